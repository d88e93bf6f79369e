"""Interfaces of the parts of a layer: mixers, in which positions see each other, and feed-forward parts.

The *spec* of a part is its configuration. It creates the module, and describes it before any array exists: the axes of
its weights, those that tensor parallelism shards, the activations that it constrains to the mesh or names for gradient
checkpointing, its operations, and the state that it carries from call to call during generation. Planning, search and
FLOP counts read the specs only, so they work for any kind of layer.

An activation is described by its axes other than batch and position.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Literal, Protocol, runtime_checkable

import equinox as eqx
import jax
from haliax import Axis, NamedArray
from jax.typing import DTypeLike

from levanter.layers.attention.cache_positions import NewPositions
from levanter.layers.decode_state import Leaves

Shapes = Mapping[str, tuple[Axis, ...]]
"""Name of an activation → its axes other than batch and position."""


class Part(Protocol):
    """The spec of a part of a layer."""

    @property
    def Embed(self) -> Axis:
        """The axis of the residual stream."""
        ...

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of its weights."""
        ...

    @property
    def tensor_axes(self) -> tuple[tuple[str, ...], ...]:
        """The axes that tensor parallelism shards; axes in one tuple (major first) are sharded together."""
        ...

    @property
    def activations(self) -> Shapes:
        """The activations that it constrains by the compute mapping."""
        ...

    @property
    def saved(self) -> Shapes:
        """The activations that it names for gradient checkpointing (`layers.remat_names`)."""
        ...

    @property
    def matmul_parameters(self) -> int:
        """Weights that multiply each token."""
        ...

    def sequence_flops(self, length: int, *, attention: Literal["causal", "full"]) -> int:
        """FLOPs of a forward pass over one sequence, beyond the products with the weights in `matmul_parameters`.

        Attention counts its products of queries with keys and of weights with values, a recurrence the updates and
        reads of its state; a part that treats each position alone returns 0.

        Args:
            length: tokens in the sequence.
            attention: `causal` counts the pairs of positions that the mask shows; `full` counts pairs in both
                directions, as the usual convention of MFU does. A part without such pairs ignores it.
        """
        ...

    def init(self, *, key: jax.Array) -> eqx.Module:
        """The module, freshly initialized."""
        ...


class FeedForward(Part, Protocol):
    """The spec of a feed-forward part: `MlpSpec`, `ExpertsSpec`.

    Its module is called as `feed_forward(x, context)`, maps `[…, embed]` to the same axes and returns an array, or
    `Outputs` if it has auxiliary sums. Where text is generated, of which a call has few tokens, `context.new` is set.
    """


class Mixer(Part, Protocol):
    """The spec of a mixer, in which positions see each other: `AttentionSpec`.

    Its module is called as `mixer(x, context, state)` and returns `[…, position, embed]` and its new state; see
    `layers.context.ForwardContext`.
    """

    @property
    def attribute(self) -> str:
        """The name of the module in the layer, and so in the paths of its leaves: `self_attn`, `mixer`."""
        ...

    @property
    def rope(self) -> str | None:
        """Name of the rotary table that it reads; None for none."""
        ...

    def decode_state(self, dtype: DTypeLike) -> Leaves:
        """The leaves that a layer keeps from call to call while text is generated (`layers.decode_state`).

        While text is generated the module gets and returns a `LayerState` of these leaves. Entries of `x` where
        `context.new.valid` is false are padding: they must not change the state.

        Args:
            dtype: of keys and values in the cache, which the run decides; int8 for integers with scales. A leaf of
                another kind has a dtype that its mixer chooses.
        """
        ...


@runtime_checkable
class IndexesPages(Protocol):
    """What a mixer also has if it computes something about new positions once for all layers: `AttentionSpec`."""

    def with_cache_indices(self, new: NewPositions, arrays: Mapping[str, NamedArray]) -> NewPositions:
        """The new positions with the indices into the arrays of its layers.

        Args:
            new: the positions.
            arrays: the leaves of a group of its layers, with the axis `layers`.
        """
        ...


@runtime_checkable
class WindowedAttention(Protocol):
    """What a mixer also has if its queries see the keys within a window: `AttentionSpec`.

    It is the geometry of the mask, by which the cost of a sharded sequence is computed; FLOPs are those of
    `sequence_flops`. A mixer without it takes no part in that cost.
    """

    @property
    def window(self) -> int | None:
        """How many keys a query sees, itself included; None for all before it."""
        ...

    @property
    def query_features(self) -> int:
        """Features of all query heads: `heads · head_size`."""
        ...


def merged_axes(axes: Iterable[Axis]) -> dict[str, Axis]:
    """The axes by name.

    An axis that occurs in several sizes gets their greatest common divisor, because a divisor of it divides all sizes.
    """
    merged: dict[str, Axis] = {}
    for axis in axes:
        known = merged.setdefault(axis.name, axis)
        merged[axis.name] = axis.resize(math.gcd(known.size, axis.size))
    return merged
