"""`NewPositions`: the cache slots that the keys and values of new tokens are written to, computed once for all layers.

The index arithmetic consists of small operations, each of which costs at least its launch. Computed by every layer, it
took a tenth of the attention time of a 70B decode step (estimate of the TPU compiler). So it is computed once for layer
0, and each layer adds its own offset.
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
    """The positions that one call appends to the rows of a cache; the same for all layers.

    Attributes:
        positions: `[batch, position]`, int32: the position of each new token in its row; 0 where `valid` is false.
        valid: boolean over the same axes: whether the entry is a token. Invalid entries are not written, and their
            outputs are meaningless.
        tables: `[batch, table]`, int32: the pages of each row in order, numbered within the row's shard; None if row r
            has exactly page r.
        reach: how many positions of a row are read, starting at the first; includes those of the call. None for all.
        block: how many positions are read at a time, up to the end of the longest row of the call; None to read all in
            one product. The result of a row does not depend on the length of the others.
        lone_queries: queries that the keys of a head are multiplied by (padded) where there would be only one.
        flat: whether writes use an index of few components into a view of the cache with fewer axes. A TPU then spends
            no time on the other components; on CPUs XLA copies the array for such a view, in every layer.
        cache_indices: number of key and value heads → scatter indices into the arrays of layers with so many, see
            `with_cache_indices`; empty if every layer computes its own.
    """

    positions: NamedArray
    valid: NamedArray
    tables: NamedArray | None = None
    reach: int | None = eqx.field(static=True, default=None)
    block: int | None = eqx.field(static=True, default=None)
    lone_queries: int = eqx.field(static=True, default=1)
    flat: bool = eqx.field(static=True, default=False)
    cache_indices: Mapping[int, Mapping[str, NamedArray]] = eqx.field(
        default_factory=dict[int, Mapping[str, NamedArray]]
    )

    @staticmethod
    def consecutive(
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
        """Consecutive positions per row.

        Args:
            first: `[batch]`, int32: the position of the first new token of each row.
            count: `[batch]`, int32: how many new tokens each row has, at most `Pos.size`.
            Pos: the axis of the call's tokens.
            tables, reach, block, lone_queries, flat: see `NewPositions`.
        """
        # `[batch, position]`: the tokens of a row come first, the entries behind them are invalid.
        index = hax.arange(Pos).broadcast_axis(first.axes).rearrange((*first.axes, Pos))
        valid = index < count
        assert isinstance(valid, NamedArray)
        return NewPositions(
            positions=hax.where(valid, index + first, 0),
            valid=valid,
            tables=tables,
            reach=reach,
            block=block,
            lone_queries=lone_queries,
            flat=flat,
        )

    def with_cache_indices(self, pages: NamedArray, scales: NamedArray | None = None) -> "NewPositions":
        """These positions with their indices into a cache: those of layer 0, and the stride per layer.

        Args:
            pages: the keys and values of any stack of layers.
            scales: the scales of int8 keys and values of that stack.
        """
        cache_arrays = {"pages": pages} if scales is None else {"pages": pages, "scales": scales}
        # The rows have one axis, whatever its name; its mapping says where their pages are.
        (Batch,) = (axis for axis in self.positions.axes if axis.name != "position")
        at = (Batch.name, "position")
        inputs = {**cache_arrays, "positions": self.positions.rearrange(at), "valid": self.valid.rearrange(at)}
        inputs |= {} if self.tables is None else {"tables": self.tables}
        axes = {name: tuple(axis.name for axis in x.axes) for name, x in inputs.items()}
        compute_indices = functools.partial(
            _cache_indices, axes={name: axes[name] for name in cache_arrays}, flat=self.flat
        )
        arrays = {name: x.array for name, x in inputs.items()}
        index_axes = ("kv", *at, "kv_head", "index")
        if jax.sharding.get_abstract_mesh().empty:
            # Without a mesh the only device holds all pages.
            indices = compute_indices(arrays)
        else:
            # Tables number the pages of a shard, so each device computes the indices into its own shard.
            mapping = with_pages(Batch.name)
            specs = {name: mapping.spec(names) for name, names in axes.items()}
            out = dict.fromkeys(cache_arrays, mapping.spec(index_axes))
            indices = jax.shard_map(compute_indices, in_specs=(specs,), out_specs=out, check_vma=False)(arrays)
        named = {name: hax.named(x, index_axes) for name, x in indices.items()}
        return dataclasses.replace(self, cache_indices={**self.cache_indices, pages.axis_size("kv_head"): named})

    def known_indices(self, pages: NamedArray) -> Mapping[str, NamedArray]:
        """The scatter indices into the arrays of a stack of layers; empty if they were not computed."""
        # They depend on the number of heads, and on no other size in which layers of one model differ.
        return self.cache_indices.get(pages.axis_size("kv_head"), {})


def with_pages(batch: str) -> AxisMapping:
    """The mapping in scope, with `page` sharded like the rows.

    Args:
        batch: the name of the axis of rows.
    """
    mapping = compute_mapping_in_scope()
    return mapping.merged({"page": mapping.mesh_axes(batch) or None})


def _cache_indices(
    arrays: Mapping[str, jax.Array], *, axes: Mapping[str, tuple[str, ...]], flat: bool
) -> dict[str, jax.Array]:
    """Scatter indices of a device's new keys and values in its shard of each cache array, for layer 0.

    An index of keys and values has two components: the slot, and one for all axes before it. On CPUs the same holds for
    scales, whose last axes are page and slot. On TPUs an index of scales has one component per axis, because a view
    with
    fewer axes is not free: the compiler chooses which axes share a tile, and where it chose others than the last two
    (44 rows, which do not fill tiles of 8) it copied all scales to the view and back, in every layer.

    Args:
        arrays: positions, valid, optional tables, and the cache arrays.
        axes: names of the axes of the cache arrays.
        flat: see `NewPositions`.

    Returns:
        `[kv, batch, position, kv_head, index]` for each cache array: the index components for layer 0, followed by the
        increment per layer of each component. Invalid positions, and those beyond the row's capacity, get an
        out-of-range slot, which the scatter drops.
    """
    positions, valid, tables = arrays["positions"], arrays["valid"], arrays.get("tables")
    # Inside `shard_map`: sizes of this device's shard.
    size = dict(zip(axes["pages"], arrays["pages"].shape, strict=True))
    slots = size["slot"]
    # Position p of a row is slot p mod slots of the row's page number p div slots.
    if tables is None:
        number = jnp.arange(positions.shape[0])[:, None]
        valid = valid & (positions < slots)
    else:
        # A position beyond the table is clipped to its last page; the next line makes it invalid.
        number = jnp.take_along_axis(tables, positions // slots, axis=1, mode="clip")
        valid = valid & (positions < slots * tables.shape[1])
    # Each entry broadcasts over `[kv, batch, position, kv_head]`; slot number `slots` is out of range, so it is
    # dropped.
    at = {
        "kv": jnp.arange(2)[:, None, None, None],
        "page": number[None, :, :, None],
        "kv_head": jnp.arange(size["kv_head"])[None, None, None],
        "slot": jnp.where(valid, positions % slots, slots)[None, :, :, None],
    }
    indices = {}
    for name, names in axes.items():
        if flat and "head_size" not in names:
            # Scales on TPU: one component per axis; only the first one, `layers`, advances with the layer.
            numbers = (0, *(at[axis_name] for axis_name in names[1:]), 1, *(0 for _ in names[1:]))
            indices[name] = jnp.stack(jnp.broadcast_arrays(*(jnp.asarray(x, jnp.int32) for x in numbers)), axis=-1)
            continue
        # Row-major index over all axes between `layers` and the last two; a layer adds their product.
        near, far = names[1:-2], [axis_name for axis_name in names[-2:] if axis_name != "head_size"]
        index = jnp.int32(0)
        for axis_name in near:
            index = index * size[axis_name] + at[axis_name]
        layer_stride = math.prod(size[axis_name] for axis_name in near)
        numbers = (index, *(at[axis_name] for axis_name in far), layer_stride, *(0 for _ in far))
        indices[name] = jnp.stack(jnp.broadcast_arrays(*(jnp.asarray(x, jnp.int32) for x in numbers)), axis=-1)
    return indices


def scatter_into_cache(
    array: jax.Array, layer: jax.Array, indices: jax.Array, values: jax.Array, *, flat: bool
) -> jax.Array:
    """Writes new values into a device's shard of a cache array.

    Args:
        array: the cache array; its first axis is `layers`.
        layer: the index of the layer.
        indices: `[kv, batch, position, kv_head, index]`, from `NewPositions.cache_indices`.
        values: over the axes of `indices` without `index`, then the axes of one entry.
        flat: see `NewPositions`.
    """
    # The last axis holds the components for layer 0, then the increments per layer.
    count = indices.shape[-1] // 2
    indices = indices[..., :count] + layer * indices[..., count:]
    if not flat:
        # Unravel the combined component, so that XLA scatters into the array itself and copies no view.
        near = jnp.unravel_index(indices[..., 0], array.shape[:-2])
        far = (indices[..., n] for n in range(1, count))
        return array.at[(*near, *far)].set(values.astype(array.dtype), mode="drop")
    # The components of an index address the first axes of the view; the rest, `head_size`, is the update.
    dims = tuple(range(count))
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(indices.ndim - 1, values.ndim)),
        inserted_window_dims=dims,
        scatter_dims_to_operand_dims=dims,
    )
    view = array if count == array.ndim else array.reshape(-1, *array.shape[-2:])
    mode = jax.lax.GatherScatterMode.FILL_OR_DROP
    return jax.lax.scatter(view, indices, values.astype(array.dtype), numbers, mode=mode).reshape(array.shape)


def update_scales_slice(
    scales: jax.Array, layer: jax.Array, values: jax.Array, tables: jax.Array, positions: jax.Array, valid: jax.Array
) -> jax.Array:
    """Writes the scales of consecutive positions of one row into a device's shard of the scales.

    For many positions the TPU compiler implements a scatter through another layout of all scales, converted back and
    forth in every layer. A read-modify-write of one slice avoids that.

    Args:
        scales: `[layers, kv_head, kv, page, slot]`.
        layer: the index of the layer.
        values: `[kv, 1, position, kv_head]`.
        tables: `[1, 1]`: the page.
        positions: `[1, position]`, the valid ones first.
        valid: `[1, position]`.
    """
    count, slots = positions.shape[1], scales.shape[-1]
    # Consecutive positions fill consecutive slots, so the first one places all of them.
    first = positions[0, 0]
    # A slice that would exceed the page starts earlier than the first position; its values are shifted back to match.
    start = jnp.clip(first, 0, slots - count)
    new = jnp.transpose(values[:, 0], (2, 0, 1)).astype(scales.dtype)
    # Padding in front and slicing from `count + start − first` shifts the values by `first − start` slots.
    new = jax.lax.dynamic_slice_in_dim(jnp.pad(new, ((0, 0), (0, 0), (count, 0))), count + start - first, count, axis=2)
    # The number of the new position that a slot of the slice receives; negative before the first one.
    index = jnp.arange(count) + start - first
    written = (index >= 0) & (index < jnp.sum(valid))
    at = (layer, 0, 0, tables[0, 0], start)
    current = jax.lax.dynamic_slice(scales, at, (1, *scales.shape[1:3], 1, count))
    return jax.lax.dynamic_update_slice(scales, jnp.where(written, new[None, :, :, None], current), at)
