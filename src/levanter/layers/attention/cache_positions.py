"""Where in a cache the keys and values of new positions go: `NewPositions`, which a call makes once for all layers.

Numbers of an index are small operations on a device, and a small operation takes as long as it takes to start one: made
by each layer for itself, those of a decode step of 70B took as long as a tenth of its attention (read off what the TPU
compiler makes of it). A layer adds to them where it begins.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from haliax_ext.mapping import AxisMapping, compute_mapping_in_scope


class NewPositions(eqx.Module):
    """The positions that a call adds to the rows of a cache: the same for all layers.

    Attributes:
        positions: `[batch, position]`, int32: the position of each new token in its row; 0 for what is not there.
        there: boolean, its axes: whether the call has such a token. What is not there is not written, and what comes of
            it means nothing.
        tables: `[batch, table]`, int32: the pages of each row in order, numbered within the row's own shard; None where
            row r has page r and no other.
        reach: how many positions of a row are read, from its first; those of the call are among them. None for all.
        block: how many positions are read at a time, as far as the longest row of the call goes; None where all are
            read, whatever is in them. What a row gets does not depend on how long others are.
        lone_queries: how many queries are multiplied by the keys of a head where there would be one.
        flat: whether what is new is written by an index of few numbers, into a view of the array with fewer axes: a TPU
            loses no time with the others then. For CPUs the compiler copies the array for such a view, in every layer.
        places: where the keys and values of these positions lie in the arrays of a cache, see `placed`; none where
            every layer finds that out for itself.
    """

    positions: NamedArray
    there: NamedArray
    tables: NamedArray | None = None
    reach: int | None = eqx.field(static=True, default=None)
    block: int | None = eqx.field(static=True, default=None)
    lone_queries: int = eqx.field(static=True, default=1)
    flat: bool = eqx.field(static=True, default=False)
    places: Mapping[str, NamedArray] = eqx.field(default_factory=dict[str, NamedArray])

    @staticmethod
    def following(
        first: NamedArray,
        count: NamedArray,
        Pos: Axis,
        *,
        tables: NamedArray | None = None,
        reach: int | None = None,
        block: int | None = None,
        lone_queries: int = 1,
        flat: bool = False,
    ) -> "NewPositions":
        """Consecutive ones.

        Args:
            first: `[batch]`, int32: the position of each row's first new token.
            count: `[batch]`, int32: how many new tokens each row has.
            Pos: the axis of the call's tokens, at least as long.
            tables, reach, block, lone_queries, flat: see `NewPositions`.
        """
        index = hax.arange(Pos).broadcast_axis(first.axes).rearrange((*first.axes, Pos))
        there = index < count
        assert isinstance(there, NamedArray)
        return NewPositions(
            positions=hax.where(there, index + first, 0),
            there=there,
            tables=tables,
            reach=reach,
            block=block,
            lone_queries=lone_queries,
            flat=flat,
        )

    def placed(self, pages: NamedArray, scales: NamedArray | None = None) -> "NewPositions":
        """The same with its places in a cache, which are those of every layer: a layer adds where its own begin.

        Args:
            pages: of any stack of layers.
            scales: of integers, likewise.
        """
        held = {"pages": pages} if scales is None else {"pages": pages, "scales": scales}
        (Batch,) = (axis for axis in self.positions.axes if axis.name != "position")
        at = (Batch.name, "position")
        given = {**held, "positions": self.positions.rearrange(at), "there": self.there.rearrange(at)}
        given |= {} if self.tables is None else {"tables": self.tables}
        axes = {name: tuple(axis.name for axis in x.axes) for name, x in given.items()}
        find = functools.partial(_places, axes={name: axes[name] for name in held}, flat=self.flat)
        arrays = {name: x.array for name, x in given.items()}
        found_axes = ("kv", *at, "kv_head", "index")
        if jax.sharding.get_abstract_mesh().empty:
            found = find(arrays)
        else:
            mapping = with_pages(Batch.name)
            specs = {name: mapping.spec(names) for name, names in axes.items()}
            out = dict.fromkeys(held, mapping.spec(found_axes))
            found = jax.shard_map(find, in_specs=(specs,), out_specs=out, check_vma=False)(arrays)
        return dataclasses.replace(self, places={name: hax.named(x, found_axes) for name, x in found.items()})

    def capacity(self, Slot: Axis) -> int:
        """How many positions a row can have."""
        return Slot.size * (1 if self.tables is None else self.tables.axis_size("table"))


def with_pages(batch: str) -> AxisMapping:
    """The mapping in scope; pages lie with their rows.

    Args:
        batch: the name of the axis of rows.
    """
    mapping = compute_mapping_in_scope()
    return mapping.merged({"page": mapping.mesh_axes(batch) or None})


def _places(
    arrays: Mapping[str, jax.Array], *, axes: Mapping[str, tuple[str, ...]], flat: bool
) -> dict[str, jax.Array]:
    """Where a device's new keys and values lie in the first layer of its part of each array of a cache.

    An index of keys and values has two numbers: of the slot, and one of all other axes. So it is with scales, of which
    pages and slots are the last axes, on CPUs; for a TPU these have a number for each axis, since there is no view of
    them with fewer: which of their axes lie in one tile is the compiler's choice, and where it chose others than the
    last two (44 rows, which do not fill tiles of 8), it copied all scales for a view and back, in every layer.

    Args:
        arrays: positions, there, maybe tables, and those of the cache.
        axes: names of the axes of those of the cache.
        flat: see `NewPositions`.

    Returns:
        `[kv, batch, position, kv_head, index]` for each array of the cache: the numbers of an index, and what a layer
        adds to each of them. What is not there, or has no slot, is in a slot that no page has.
    """
    positions, there, tables = arrays["positions"], arrays["there"], arrays.get("tables")
    size = dict(zip(axes["pages"], arrays["pages"].shape, strict=True))
    slots = size["slot"]
    if tables is None:
        number = jnp.arange(positions.shape[0])[:, None]
        there = there & (positions < slots)
    else:
        number = jnp.take_along_axis(tables, positions // slots, axis=1, mode="clip")
        there = there & (positions < slots * tables.shape[1])
    at = {
        "kv": jnp.arange(2)[:, None, None, None],
        "page": number[None, :, :, None],
        "kv_head": jnp.arange(size["kv_head"])[None, None, None],
        "slot": jnp.where(there, positions % slots, slots)[None, :, :, None],
    }
    found = {}
    for name, names in axes.items():
        if flat and "head_size" not in names:
            numbers = (0, *(at[each] for each in names[1:]), 1, *(0 for _ in names[1:]))
            found[name] = jnp.stack(jnp.broadcast_arrays(*(jnp.asarray(each, jnp.int32) for each in numbers)), axis=-1)
            continue
        near, far = names[1:-2], [each for each in names[-2:] if each != "head_size"]
        index = jnp.int32(0)
        for each in near:
            index = index * size[each] + at[each]
        of_layer = math.prod(size[each] for each in near)
        numbers = (index, *(at[each] for each in far), of_layer, *(0 for _ in far))
        found[name] = jnp.stack(jnp.broadcast_arrays(*(jnp.asarray(each, jnp.int32) for each in numbers)), axis=-1)
    return found


def put(array: jax.Array, layer: jax.Array, places: jax.Array, values: jax.Array, *, flat: bool) -> jax.Array:
    """A device's part of an array of a cache, with new values in it.

    Args:
        array: with `layers` as its first axis.
        layer: the index of the layer that they are of.
        places: `[kv, batch, position, kv_head, index]`, of `NewPositions.places`.
        values: over the axes of the places but `index`, and what a place holds.
        flat: see `NewPositions`.
    """
    count = places.shape[-1] // 2
    places = places[..., :count] + layer * places[..., count:]
    if not flat:
        near = jnp.unravel_index(places[..., 0], array.shape[:-2])
        far = (places[..., n] for n in range(1, count))
        return array.at[(*near, *far)].set(values.astype(array.dtype), mode="drop")
    dims = tuple(range(count))
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(places.ndim - 1, values.ndim)),
        inserted_window_dims=dims,
        scatter_dims_to_operand_dims=dims,
    )
    view = array if count == array.ndim else array.reshape(-1, *array.shape[-2:])
    mode = jax.lax.GatherScatterMode.FILL_OR_DROP
    return jax.lax.scatter(view, places, values.astype(array.dtype), numbers, mode=mode).reshape(array.shape)


def put_in_one_piece(
    scales: jax.Array, layer: jax.Array, values: jax.Array, tables: jax.Array, positions: jax.Array, there: jax.Array
) -> jax.Array:
    """A device's part of the scales of a cache, with those of consecutive positions of one row in it.

    For many positions a TPU's compiler scatters by way of another layout of all scales, there and back in every layer.
    Here a piece is read, changed and written.

    Args:
        scales: `[layers, kv_head, kv, page, slot]`.
        layer: the index of the layer that they are of.
        values: `[kv, 1, position, kv_head]`.
        tables: `[1, 1]`: the page.
        positions: `[1, position]`, of which those come first that are there.
        there: its shape.
    """
    count, slots = positions.shape[1], scales.shape[-1]
    first = positions[0, 0]
    # A piece that would go beyond the page begins before the first position, and has its values that much later.
    start = jnp.clip(first, 0, slots - count)
    new = jnp.transpose(values[:, 0], (2, 0, 1)).astype(scales.dtype)
    new = jax.lax.dynamic_slice_in_dim(jnp.pad(new, ((0, 0), (0, 0), (count, 0))), count + start - first, count, axis=2)
    index = jnp.arange(count) + start - first
    written = (index >= 0) & (index < jnp.sum(there))
    at = (layer, 0, 0, tables[0, 0], start)
    held = jax.lax.dynamic_slice(scales, at, (1, *scales.shape[1:3], 1, count))
    return jax.lax.dynamic_update_slice(scales, jnp.where(written, new[None, :, :, None], held), at)
