"""The decode state of a decoder: which layers share arrays, an empty state, and the way through the stacks and back.

Each stack of layers is scanned by itself (`models.decoder.scan_layout`), so it has arrays of its own: for every group
of its layers with equal leaves, one array for each leaf. Attention layers of all kinds are one group unless their heads
differ; the recurrent layers between them are another one. The ids of earlier tokens are a leaf of the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import haliax as hax
import jax.numpy as jnp
from haliax import Axis, NamedArray, zeros

from levanter.layers.attention.cache_positions import NewPositions
from levanter.layers.decode_state import (
    EARLIER,
    NO_TOKEN,
    TOKEN_IDS,
    DecodeState,
    GroupKey,
    LayerState,
    Leaves,
    StackState,
    StateLeaf,
    StateSizes,
    group_key,
    layer_leaves,
)
from levanter.layers.protocols import IndexesPages, Mixer
from levanter.models.decoder.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers of a stack that share arrays.

    Attributes:
        stack: the number of the stack.
        key: what the layers have in common.
        mixer: of one of them.
        layers: how many there are.
    """

    stack: int
    key: GroupKey
    mixer: Mixer
    layers: int

    def axes(self, leaf: StateLeaf, sizes: StateSizes) -> tuple[Axis, ...]:
        """The axes of the array of a leaf."""
        return (Axis("layers", self.layers), *leaf.resolved(sizes))


def layer_groups(config: DecoderConfig) -> tuple[LayerGroup, ...]:
    """The groups of all stacks, in order. A layer that remembers nothing is in none.

    Raises:
        ValueError: a mixer does not say what it remembers.
    """
    # A mixer without the method would be decoded as if it saw no earlier token.
    if silent := [n for n, layer in enumerate(config.layers) if not hasattr(layer.mixer, "decode_state")]:
        kind = type(config.layers[silent[0]].mixer).__name__
        raise ValueError(
            f"text cannot be generated with this model: its layer {silent[0]} (a {kind}) does not say what it "
            f"remembers of earlier tokens\n  → {kind}.decode_state (docs/extending/decode-state.md)"
        )
    # Unrolled layers are one BlockSeq and share arrays; scanned ones have arrays for each run.
    ends = [run.start + run.layers for run in config.runs] if config.scan_layers else [config.num_layers]
    groups: list[LayerGroup] = []
    start = 0
    for stack, end in enumerate(ends):
        counts: dict[GroupKey, list[Mixer]] = {}
        for layer in config.layers[start:end]:
            if key := group_key(layer.mixer):
                counts.setdefault(key, []).append(layer.mixer)
        groups += [
            LayerGroup(stack=stack, key=key, mixer=mixers[0], layers=len(mixers)) for key, mixers in counts.items()
        ]
        start = end
    return tuple(groups)


def empty_state(config: DecoderConfig, sizes: StateSizes) -> DecodeState:
    """A state in which no row has any token; call it inside `jit` or `eval_shape`, so that it is made in its shards.

    Args:
        config: the architecture.
        sizes: of the run.

    Raises:
        ValueError: a mixer does not say what it remembers.
    """
    groups = layer_groups(config)
    leaves = [layer_leaves(group.mixer, sizes.dtype) for group in groups]
    state: dict[str, tuple[NamedArray | None, ...]] = {}
    for name in dict.fromkeys(name for group_leaves in leaves for name in group_leaves):
        state[name] = tuple(
            _zeros(group, of_group, name, sizes) for group, of_group in zip(groups, leaves, strict=True)
        )
    if config.earlier_token_ids:
        leaf = StateLeaf.ids(config.earlier_token_ids)
        state[TOKEN_IDS] = (hax.full(leaf.resolved(sizes), NO_TOKEN, dtype=leaf.dtype),)
    return state


def _zeros(group: LayerGroup, leaves: Leaves, name: str, sizes: StateSizes) -> NamedArray | None:
    return zeros(group.axes(leaves[name], sizes), dtype=leaves[name].dtype) if name in leaves else None


def entering_stacks(config: DecoderConfig, state: DecodeState, *, stacks: int) -> list[StackState]:
    """The state of each stack before its first layer."""
    entering: list[list[tuple[GroupKey, LayerState]]] = [[] for _ in range(stacks)]
    for number, group in enumerate(layer_groups(config)):
        entering[group.stack].append((group.key, LayerState.entering(group_arrays(state, number))))
    return [
        StackState(groups=tuple(layers for _, layers in pairs), keys=tuple(key for key, _ in pairs))
        for pairs in entering
    ]


def leaving_stacks(state: DecodeState, stacks: Sequence[StackState]) -> DecodeState:
    """A state with the arrays that the stacks left; the inverse of `entering_stacks`."""
    groups = [group for stack in stacks for group in stack.groups]
    names = [name for name in state if name != TOKEN_IDS]
    return {**state, **{name: tuple(group.arrays.get(name) for group in groups) for name in names}}


def group_arrays(state: DecodeState, number: int) -> dict[str, NamedArray]:
    """The arrays of a group of layers, by name of the leaf."""
    arrays = {name: groups[number] for name, groups in state.items() if name != TOKEN_IDS}
    return {name: x for name, x in arrays.items() if x is not None}


def with_page_indices(config: DecoderConfig, state: DecodeState, new: NewPositions) -> NewPositions:
    """New positions with what mixers compute about them once for all layers, outside the scans."""
    for number, group in enumerate(layer_groups(config)):
        if isinstance(group.mixer, IndexesPages):
            new = group.mixer.with_cache_indices(new, group_arrays(state, number))
    return new


def following_ids(earlier: NamedArray, tokens: NamedArray, valid: NamedArray) -> NamedArray:
    """The ids before the next token, `[batch, earlier]`, after a call.

    Args:
        earlier: the ids before the call.
        tokens: of the call, `[batch, position]`.
        valid: which of them are tokens; these come first.
    """
    Earlier = earlier.resolve_axis(EARLIER)
    ids = tokens.rearrange((..., "position")).rename({"position": EARLIER}).astype(earlier.dtype)
    joined = hax.concatenate(EARLIER, [earlier, ids.rearrange(tuple(axis.name for axis in earlier.axes))])
    # The window moves by the number of tokens that a row got: rows that got none keep theirs.
    moved = hax.sum(valid.astype(jnp.int32), "position").array[:, None] + jnp.arange(Earlier.size)[None]
    return hax.named(jnp.take_along_axis(joined.array, moved, axis=1), earlier.axes)
