"""Decode state: what a mixer keeps from one call to the next while text is generated, as named leaves.

The spec of a mixer describes the leaves of one layer (`Mixer.decode_state`), before any array exists. A leaf has one of
three *kinds*, by which allocation, capacity, prefix reuse and plans treat it; none of them knows a mixer.

- `paged`: grows with the text. A page holds a fixed number of positions, and a row takes pages as it grows: keys and
  values of attention. It has the axes `page` and `slot`.
- `slot`: has a fixed size for each row: the matrix of a recurrence, the last inputs of a convolution. It has the axis
  `batch`, starts at zero, and cannot be cut back to an earlier position.
- `token_ids`: the ids before the next token. It has the axes `batch` and `earlier`, and the host knows its values.

The layers of one stack whose leaves are alike share one array for each leaf, with the axis `layers` in front, which is
carried from layer to layer and updated in place (`LayerState`).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeAlias

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jax.typing import DTypeLike

Kind: TypeAlias = Literal["paged", "slot", "token_ids"]

TOKEN_IDS = "token_ids"
"""Name of the leaf of a model that holds the ids before the next token."""
EARLIER = "earlier"
"""Axis of those ids, the oldest first."""
NO_TOKEN = -1
"""The id before the first token of a sequence."""

DecodeState: TypeAlias = Mapping[str, tuple[NamedArray | None, ...]]
"""All arrays of a model: name of a leaf → its array in each group of layers, None in groups without the leaf."""


@dataclass(frozen=True, kw_only=True)
class StateSizes:
    """The sizes of a decode state that a run decides.

    Attributes:
        rows: sequences at once.
        pages: pages of paged leaves.
        page_size: positions in a page.
        dtype: of keys and values; int8 for integers with scales.
    """

    rows: int
    pages: int
    page_size: int
    dtype: np.dtype


@dataclass(frozen=True, kw_only=True)
class StateLeaf:
    """One array of a layer's decode state.

    Attributes:
        axes: in order; axes whose size the run decides are names: `page` and `slot` of a paged leaf, `batch` of others.
        dtype: of its elements.
    """

    axes: tuple[Axis | str, ...]
    dtype: np.dtype = field(default_factory=lambda: np.dtype(np.float32))

    def __post_init__(self) -> None:
        open_axes = {axis for axis in self.axes if isinstance(axis, str)}
        assert open_axes in ({"page", "slot"}, {"batch"}), f"a leaf has page and slot, or batch; this one {self.axes}"

    @staticmethod
    def ids(count: int) -> "StateLeaf":
        """The ids of so many tokens before the next one."""
        return StateLeaf(axes=("batch", Axis(EARLIER, count)), dtype=np.dtype(np.int32))

    @property
    def kind(self) -> Kind:
        """How it grows."""
        return kind_of_axes(self.names)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its axes."""
        return tuple(axis if isinstance(axis, str) else axis.name for axis in self.axes)

    @property
    def sized(self) -> tuple[Axis, ...]:
        """The axes that the mixer sizes."""
        return tuple(axis for axis in self.axes if isinstance(axis, Axis))

    def resolved(self, sizes: StateSizes) -> tuple[Axis, ...]:
        """Its axes in a run."""
        run_sizes = {"page": sizes.pages, "slot": sizes.page_size, "batch": sizes.rows}
        return tuple(Axis(axis, run_sizes[axis]) if isinstance(axis, str) else axis for axis in self.axes)

    def nbytes(self, ways: Mapping[str, int] | None = None) -> int:
        """Bytes of one position of a paged leaf, or of one row of any other.

        Args:
            ways: number of devices over which an axis is sharded, by name; the bytes are then those of a device.
        """
        shards = {} if ways is None else ways
        return math.prod(-(-axis.size // shards.get(axis.name, 1)) for axis in self.sized) * self.dtype.itemsize


def kind_of_axes(names: Collection[str]) -> Kind:
    """The kind of an array of decode state, by the names of its axes."""
    if "page" in names:
        return "paged"
    return "token_ids" if EARLIER in names else "slot"


Leaves: TypeAlias = Mapping[str, StateLeaf]
"""Name of a leaf → the leaf."""
GroupKey: TypeAlias = tuple[tuple[str, StateLeaf], ...]


class Remembers(Protocol):
    """The spec of a mixer, as far as its decode state is concerned."""

    def decode_state(self, dtype: DTypeLike) -> Leaves:
        """The leaves of one layer; see `layers.protocols.Mixer`."""
        ...


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, kw_only=True, eq=False)
class LayerState:
    """The decode state of layers with equal leaves, carried from layer to layer.

    Attributes:
        arrays: by name of the leaf, `[layers, …]`.
        layer: the index of the next layer, int32.
    """

    arrays: Mapping[str, NamedArray]
    layer: jax.Array

    def tree_flatten(self) -> tuple[tuple[NamedArray | jax.Array, ...], tuple[str, ...]]:
        """The arrays in the order of a loop's carried values, and the names of the leaves."""
        names = tuple(sorted(self.arrays))
        arrays = [self.arrays[name] for name in names]
        # The index follows the first array: the order is part of the text of a Program, by which compiled ones are
        # looked up in XLA's persistent cache.
        return (*arrays[:1], self.layer, *arrays[1:]), names

    @staticmethod
    def tree_unflatten(names: tuple[str, ...], children: Sequence[NamedArray | jax.Array]) -> "LayerState":
        """The inverse of `tree_flatten`."""
        position = min(len(names), 1)
        arrays = (*children[:position], *children[position + 1 :])
        return LayerState(arrays=dict(zip(names, arrays, strict=True)), layer=children[position])  # pyright: ignore

    @staticmethod
    def entering(arrays: Mapping[str, NamedArray]) -> "LayerState":
        """The state before the first layer."""
        return LayerState(arrays=dict(arrays), layer=jnp.int32(0))

    def read(self, name: str) -> NamedArray:
        """The next layer's part of a leaf, without the axis `layers`."""
        whole = self.arrays[name]
        part = jax.lax.dynamic_index_in_dim(whole.array, self.layer, axis=0, keepdims=False)
        return hax.named(part, whole.axes[1:])

    def write(self, **values: NamedArray) -> "LayerState":
        """The state after this layer, with new values of some of its leaves.

        Args:
            values: by name of the leaf, over its axes in any order; cast to its dtype.
        """
        arrays = dict(self.arrays)
        for name, value in values.items():
            whole = arrays[name]
            # Named axes may come in any order; the array of the stack keeps its order.
            part = value.rearrange(whole.axes[1:]).array.astype(whole.dtype)
            updated = jax.lax.dynamic_update_index_in_dim(whole.array, part, self.layer, axis=0)
            arrays[name] = hax.named(updated, whole.axes)
        return LayerState(arrays=arrays, layer=self.layer + 1)

    def after(self, arrays: Mapping[str, NamedArray]) -> "LayerState":
        """The state after this layer, whose mixer has updated the arrays of the stack itself."""
        return LayerState(arrays={**self.arrays, **arrays}, layer=self.layer + 1)


class StackState(eqx.Module):
    """The decode state of a stack of layers, which may be of several kinds.

    Attributes:
        groups: the state of the layers with equal leaves.
        keys: what the layers of each group have in common (`group_key`).
    """

    groups: tuple[LayerState, ...]
    keys: tuple[GroupKey, ...] = eqx.field(static=True)

    def of(self, mixer: Remembers) -> LayerState:
        """The state of the next layer with this mixer; one that remembers nothing gets a state without arrays."""
        key = group_key(mixer)
        return self.groups[self.keys.index(key)] if key else LayerState.entering({})

    def replaced(self, mixer: Remembers, new: LayerState) -> "StackState":
        """This state with another one of the layers that are like the one with this mixer."""
        key = group_key(mixer)
        if not key:
            return self
        number = self.keys.index(key)
        # The loop over the layers needs the same structure in every iteration.
        assert new.arrays.keys() == self.groups[number].arrays.keys(), sorted(new.arrays)
        return replace(self, groups=(*self.groups[:number], new, *self.groups[number + 1 :]))


def layer_leaves(mixer: Remembers, dtype: DTypeLike) -> Leaves:
    """The leaves that each layer has for itself: all but the ids of earlier tokens, which a model keeps once."""
    return {name: leaf for name, leaf in mixer.decode_state(dtype).items() if leaf.kind != "token_ids"}


def group_key(mixer: Remembers) -> GroupKey:
    """What layers have in common that share arrays: names, axes and dtypes of their leaves."""
    # The dtype of keys and values is the same in all layers, so any dtype tells which layers are alike.
    return tuple(sorted(layer_leaves(mixer, np.float32).items(), key=lambda item: item[0]))
