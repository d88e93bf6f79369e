"""Leaves of decode state with a fixed size for each row, in calls for some of the rows.

A decode call has all rows, in order. A prefill call has *lanes*: lane `l` computes a part of the prompt of row
`rows[l]`. Before the call the lanes take the leaves of their rows, and afterwards they put them back; pages stay where
they are.

Lanes are sharded like rows, and a lane is in the shard of its row, so each device moves its own rows without
communication.
"""

import functools
from collections.abc import Callable

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray

from haliax_ext.mapping import compute_mapping_in_scope, ways_in_scope
from levanter.layers.decode_state import TOKEN_IDS, DecodeState, kind_of_axes


def take_lanes(
    state: DecodeState, rows: NamedArray, *, fresh: NamedArray, earlier: NamedArray | None, total: int
) -> DecodeState:
    """The state as a prefill call takes it: slot leaves and token ids over the lanes.

    Args:
        state: over all rows.
        rows: int32 `[batch]`, the row of each lane; `total` for an unused lane.
        fresh: int32 `[batch]`, not 0 where a row begins: its slot leaves are then zero, whatever was in them.
        earlier: `[batch, earlier]`, the ids before the tokens of each lane; None if the model reads none.
        total: number of rows.
    """

    def take(x: jax.Array, lanes: jax.Array, begins: jax.Array, *, axis: int, rows_here: int) -> jax.Array:
        # Shards have equally many consecutive rows, so the remainder is the number within the shard. An unused lane
        # takes an arbitrary row.
        part = jnp.take(x, lanes % rows_here, axis=axis)
        begins = (begins != 0).reshape(*(1,) * axis, -1, *(1,) * (part.ndim - axis - 1))
        return jnp.where(begins, jnp.zeros((), part.dtype), part)

    def of_lanes(x: NamedArray | None) -> NamedArray | None:
        if x is None or kind_of_axes(_names(x)) == "paged":
            return x
        axes = tuple(rows.axes[0] if axis.name == "batch" else axis for axis in x.axes)
        return hax.named(_in_shards(take, x, rows, fresh, total=total), axes)

    lanes = {name: tuple(map(of_lanes, groups)) for name, groups in state.items() if name != TOKEN_IDS}
    return lanes if earlier is None else {**lanes, TOKEN_IDS: (earlier,)}


def put_lanes(state: DecodeState, lanes: DecodeState, rows: NamedArray, *, total: int) -> DecodeState:
    """The state over all rows after a prefill call.

    Args:
        state: before the call.
        lanes: what the call returned for its lanes, with the pages of all rows.
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

    return {name: tuple(map(of_rows, groups, lanes[name])) for name, groups in state.items()}


def _names(x: NamedArray) -> tuple[str, ...]:
    return tuple(axis.name for axis in x.axes)


def _in_shards(
    function: Callable[..., jax.Array], x: NamedArray, rows: NamedArray, other: NamedArray, *, total: int
) -> jax.Array:
    """Calls a function with each device's shards of an array over rows, the lanes' rows, and an array over lanes."""
    function = functools.partial(function, axis=_names(x).index("batch"), rows_here=total // ways_in_scope("batch"))
    arrays = (x.array, rows.array, other.array)
    if jax.sharding.get_abstract_mesh().empty:
        return function(*arrays)
    mapping = compute_mapping_in_scope()
    specs = tuple(mapping.spec(_names(one)) for one in (x, rows, other))
    # Both functions return the axes of the first array, with rows or with lanes in the place of its rows.
    return jax.shard_map(function, in_specs=specs, out_specs=specs[0], check_vma=False)(*arrays)
