"""Leaves of decode state with a fixed size for each row, in calls for some of the rows.

A decode call has all rows, in order. A prefill call has *lanes*: lane `l` computes a part of the prompt of row
`rows[l]`. Before the call the lanes take the leaves of their rows, and afterwards they put them back; pages stay where
they are.

A *snapshot* is a copy of a row's slot leaves at the end of a page. A row that begins with pages of another one loads
the snapshot at their end. Snapshots are arrays of their own, which the model does not see.

Lanes are sharded like rows, and a lane is in the shard of its row, so each device moves its own rows without
communication.
"""

import functools
from collections.abc import Callable

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from haliax_ext.mapping import compute_mapping_in_scope, ways_in_scope
from levanter.layers.decode_state import TOKEN_IDS, DecodeState, kind_of_axes

SNAPSHOT = "snapshot"
"""Axis of the snapshots; also the beginning of the names of their arrays."""


def with_snapshots(state: DecodeState, count: int) -> DecodeState:
    """A state with arrays for so many snapshots of its slot leaves; none if it has no such leaves."""
    arrays: dict[str, tuple[NamedArray | None, ...]] = {}
    for name, groups in state.items():
        if count and any(x is not None and kind_of_axes(_names(x)) == "slot" for x in groups):
            arrays[f"{SNAPSHOT}.{name}"] = tuple(None if x is None else _resized(x, count) for x in groups)
    return {**state, **arrays}


def _resized(x: NamedArray, count: int) -> NamedArray:
    axes = tuple(Axis(SNAPSHOT, count) if axis.name == "batch" else axis for axis in x.axes)
    return hax.zeros(axes, dtype=x.dtype)


def model_leaves(state: DecodeState) -> DecodeState:
    """A state without its snapshots, as the model takes it."""
    return {name: groups for name, groups in state.items() if not name.startswith(SNAPSHOT)}


def take_lanes(
    state: DecodeState,
    rows: NamedArray,
    *,
    fresh: NamedArray,
    earlier: NamedArray | None,
    load: NamedArray | None,
    total: int,
) -> DecodeState:
    """The state as a prefill call takes it: slot leaves and token ids over the lanes.

    Args:
        state: over all rows.
        rows: int32 `[batch]`, the row of each lane; `total` for an unused lane.
        fresh: int32 `[batch]`, not 0 where a row begins: its slot leaves are then zero, whatever was in them.
        earlier: `[batch, earlier]`, the ids before the tokens of each lane; None if the model reads none.
        load: int32 `[batch]`, the snapshot of the shard that a lane begins with, or -1; None without snapshots.
        total: number of rows.
    """

    def take(x: jax.Array, lanes: jax.Array, begins: jax.Array, *, axis: int, rows_here: int) -> jax.Array:
        # Shards have equally many consecutive rows, so the remainder is the number within the shard. An unused lane
        # takes an arbitrary row.
        part = jnp.take(x, lanes % rows_here, axis=axis)
        begins = (begins != 0).reshape(*(1,) * axis, -1, *(1,) * (part.ndim - axis - 1))
        return jnp.where(begins, jnp.zeros((), part.dtype), part)

    def load_saved(x: jax.Array, saved: jax.Array, numbers: jax.Array, *, axis: int, rows_here: int) -> jax.Array:
        del rows_here
        loads = (numbers >= 0).reshape(*(1,) * axis, -1, *(1,) * (x.ndim - axis - 1))
        return jnp.where(loads, jnp.take(saved, jnp.maximum(numbers, 0), axis=axis), x)

    def of_lanes(x: NamedArray | None, saved: NamedArray | None) -> NamedArray | None:
        if x is None or kind_of_axes(_names(x)) == "paged":
            return x
        axes = tuple(rows.axes[0] if axis.name == "batch" else axis for axis in x.axes)
        part = hax.named(_in_shards(take, x, rows, fresh, total=total), axes)
        if saved is None or load is None:
            return part
        return hax.named(_in_shards(load_saved, part, saved, load, total=total), axes)

    lanes: dict[str, tuple[NamedArray | None, ...]] = {}
    for name, groups in model_leaves(state).items():
        if name != TOKEN_IDS:
            saved = state.get(f"{SNAPSHOT}.{name}", (None,) * len(groups))
            lanes[name] = tuple(map(of_lanes, groups, saved))
    return lanes if earlier is None else {**lanes, TOKEN_IDS: (earlier,)}


def put_lanes(
    state: DecodeState, lanes: DecodeState, rows: NamedArray, *, save: NamedArray | None, total: int
) -> DecodeState:
    """The state over all rows after a prefill call.

    Args:
        state: before the call.
        lanes: what the call returned for its lanes, with the pages of all rows.
        save: int32 `[batch]`, the snapshot of the shard that a lane writes at its end, or -1; None without snapshots.
        rows, total: see `take_lanes`.
    """

    def put(x: jax.Array, lanes: jax.Array, new: jax.Array, *, axis: int, rows_here: int) -> jax.Array:
        # An unused lane gets a number past the last row, where the update is dropped.
        numbers = jnp.where(lanes < total, lanes % rows_here, rows_here)
        return x.at[(*(slice(None),) * axis, numbers)].set(new, mode="drop")

    def of_rows(x: NamedArray | None, new: NamedArray | None) -> NamedArray | None:
        if x is None or new is None or kind_of_axes(_names(x)) == "paged":
            return new
        return hax.named(_in_shards(put, x, rows, new.rearrange(_names(x)), total=total), x.axes)

    def put_saved(x: jax.Array, numbers: jax.Array, new: jax.Array, *, axis: int, rows_here: int) -> jax.Array:
        del rows_here
        # A negative index would count from the end; this one is past the end, and its update is dropped.
        numbers = jnp.where(numbers < 0, x.shape[axis], numbers)
        return x.at[(*(slice(None),) * axis, numbers)].set(new, mode="drop")

    def of_snapshots(x: NamedArray | None, new: NamedArray | None) -> NamedArray | None:
        if x is None or new is None or save is None:
            return x
        order = ("batch" if name == SNAPSHOT else name for name in _names(x))
        return hax.named(_in_shards(put_saved, x, save, new.rearrange(tuple(order)), total=total), x.axes)

    after: dict[str, tuple[NamedArray | None, ...]] = {}
    for name, groups in state.items():
        saved = name.startswith(SNAPSHOT)
        new = lanes[name.removeprefix(f"{SNAPSHOT}.")]
        after[name] = tuple(map(of_snapshots if saved else of_rows, groups, new))
    return after


def _names(x: NamedArray) -> tuple[str, ...]:
    return tuple(axis.name for axis in x.axes)


def _in_shards(function: Callable[..., jax.Array], x: NamedArray, *others: NamedArray, total: int) -> jax.Array:
    """Calls a function with each device's shards of an array over rows, lanes or snapshots, and of other arrays."""
    # The axis of rows, lanes or snapshots is at the same place in all arrays that have other axes, too.
    axis = next(n for n, name in enumerate(_names(x)) if name in ("batch", SNAPSHOT))
    function = functools.partial(function, axis=axis, rows_here=total // ways_in_scope("batch"))
    arrays = tuple(one.array for one in (x, *others))
    if jax.sharding.get_abstract_mesh().empty:
        return function(*arrays)
    mapping = compute_mapping_in_scope()
    specs = tuple(mapping.spec(_names(one)) for one in (x, *others))
    # All functions return the axes of the first array, with rows or with lanes in the place of its rows.
    return jax.shard_map(function, in_specs=specs, out_specs=specs[0], check_vma=False)(*arrays)
