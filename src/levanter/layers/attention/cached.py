"""Attention of new positions to all before them, whose keys and values a cache holds: what generating text needs.

A *row* is a sequence that grows. Its keys and values lie in *pages* of so many *slots*, a slot for each position, in an
array for a stack of layers: `[layers, page, kv_head, kv, slot, head_size]`, where `kv` is key, then value. Position `p`
of a row is slot `p mod slots` of the row's page number `p div slots`. Which pages those are, the rows' *tables* say; or
nothing does, and then row `r` has page `r` and no other, and reading it gathers nothing.

The stack of layers is one array that goes from layer to layer and is written in place, the new positions and nothing
else: as the scanned input and output of a loop over layers, or written back layer by layer, it would exist twice or be
moved whole in every step. The axes are in this order because a device then holds, for each of its heads, one stretch of
keys and one of values, each as a matrix product reads it; with `slot` further out a 16-bit cache is copied to be
written (both were read off what the TPU compiler makes of them).

Rows are sharded like the batch, and a row's pages lie with the row: every device writes and reads its own rows and
heads, and nothing is communicated. `jax.shard_map` says so.
"""

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.typing import DTypeLike

from haliax_ext.mapping import AxisMapping, compute_mapping, compute_mapping_in_scope
from levanter.layers.attention.backends import DEFAULT_BLOCK, BackendChoice, attend
from levanter.layers.attention.mask import AttentionMask

PAGE_AXES = ("layers", "page", "kv_head", "kv", "slot", "head_size")
"""The axes of the keys and values of a stack of layers, in order."""

MOST_SCORES = 1 << 20
"""Queries × keys of a head up to which all of their scores exist at a time; more are worked through by blocks of keys.
A single query never has too many."""


class NewPositions(eqx.Module):
    """The positions that a call adds to the rows of a cache: the same for all layers.

    Attributes:
        positions: `[batch, position]`, int32: the position of each new token in its row; 0 for what is not there.
        there: boolean, its axes: whether the call has such a token. What is not there is not written, and what comes of
            it means nothing.
        tables: `[batch, table]`, int32: the pages of each row in order, numbered within the row's own shard; None where
            row r has page r and no other.
        reach: how many positions of a row are read, from its first; those of the call are among them. None for all.
    """

    positions: NamedArray
    there: NamedArray
    tables: NamedArray | None = None
    reach: int | None = eqx.field(static=True, default=None)

    @staticmethod
    def following(
        first: NamedArray,
        count: NamedArray,
        Pos: Axis,
        *,
        tables: NamedArray | None = None,
        reach: int | None = None,
    ) -> "NewPositions":
        """Consecutive ones.

        Args:
            first: `[batch]`, int32: the position of each row's first new token.
            count: `[batch]`, int32: how many new tokens each row has.
            Pos: the axis of the call's tokens, at least as long.
            tables, reach: see `NewPositions`.
        """
        index = hax.arange(Pos).broadcast_axis(first.axes).rearrange((*first.axes, Pos))
        there = index < count
        assert isinstance(there, NamedArray)
        return NewPositions(positions=hax.where(there, index + first, 0), there=there, tables=tables, reach=reach)

    def capacity(self, Slot: Axis) -> int:
        """How many positions a row can have."""
        return Slot.size * (1 if self.tables is None else self.tables.axis_size("table"))


class CachedLayers(eqx.Module):
    """What a stack of attention layers remembers: the state that its layers hand on.

    Attributes:
        pages: keys and values of all of them, over `PAGE_AXES`.
        layer: the index of the layer that comes next, int32.
    """

    pages: NamedArray
    layer: jax.Array

    @staticmethod
    def entering(pages: NamedArray) -> "CachedLayers":
        """The state before the first layer."""
        assert tuple(axis.name for axis in pages.axes) == PAGE_AXES, pages.axes
        return CachedLayers(pages=pages, layer=jnp.int32(0))


def page_axes(*, layers: int, pages: int, slots: int, KVHead: Axis, HeadSize: Axis) -> tuple[Axis, ...]:
    """The axes of a stack's keys and values."""
    return (Axis("layers", layers), Axis("page", pages), KVHead, Axis("kv", 2), Axis("slot", slots), HeadSize)


def attend_cached(
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    state: CachedLayers,
    new: NewPositions,
    *,
    mask: AttentionMask,
    softmax_scale: float,
    dtype: DTypeLike,
    soft_cap: float | None = None,
    sinks: NamedArray | None = None,
) -> tuple[NamedArray, CachedLayers]:
    """Adds the keys and values of new positions to a layer's, and attends to them all.

    A new key or value that is not finite is stored as 0: its row is lost and is known to be by its activations, but a
    later row that gets its page would multiply what it does not see by 0, and 0 · NaN is NaN.

    Args:
        q: `[batch, position, kv_head, q_heads_per_group, head_size]`.
        k: `[batch, position, kv_head, head_size]`, of the same positions.
        v: as `k`.
        state: before this layer.
        new: where the positions belong.
        mask: which positions see which, by a rule about positions alone.
        softmax_scale: multiplies the scores.
        dtype: in which attention is computed.
        soft_cap: bound of the scores; None for none.
        sinks: `[kv_head, q_heads_per_group]`; see `reference_attention`.

    Returns:
        The axes of `q`, and the state behind this layer.
    """
    assert mask.explicit_mask is None and mask.query_segments is None and not mask.moves_queries, mask
    (Batch,) = (a for a in q.axes if a.name not in ("position", "kv_head", "q_heads_per_group", "head_size"))
    of_key = (Batch.name, "position", "kv_head", "head_size")
    of_query = (*of_key[:3], "q_heads_per_group", "head_size")
    q, k, v = q.rearrange(of_query), k.rearrange(of_key), v.rearrange(of_key)
    at = (Batch.name, "position")
    given = [q, k, v, state.pages, new.positions.rearrange(at), new.there.rearrange(at)]
    given += [x for x in (new.tables, sinks) if x is not None]
    layer = _CachedAttention(
        axes=tuple(tuple(axis.name for axis in x.axes) for x in given),
        has_tables=new.tables is not None,
        reach=new.reach,
        mask=mask,
        softmax_scale=softmax_scale,
        soft_cap=soft_cap,
        dtype=jnp.dtype(dtype),
    )
    arrays = [x.array for x in given]
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        mixed, pages = layer(state.layer, *arrays)
    else:
        mapping = compute_mapping_in_scope()
        mapping = mapping.merged({"page": mapping.mesh_axes(Batch.name) or None})
        specs = [mapping.spec(names) for names in layer.axes]
        # That what is computed alike on several devices is the same there, the checker does not see.
        run = jax.shard_map(layer, in_specs=(jax.P(), *specs), out_specs=(specs[0], specs[3]), check_vma=False)
        mixed, pages = run(state.layer, *arrays)
    return hax.named(mixed, q.axes), CachedLayers(pages=hax.named(pages, state.pages.axes), layer=state.layer + 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _CachedAttention:
    """A device's part of `attend_cached`.

    Attributes:
        axes: names of the axes of its arguments: q, k, v, pages, positions, there, then tables and sinks.
        has_tables: whether there are tables.
        reach: how many positions of a row are read.
        mask: the rule.
        softmax_scale: multiplies the scores.
        soft_cap: bound of the scores.
        dtype: in which attention is computed.
    """

    axes: tuple[tuple[str, ...], ...]
    has_tables: bool
    reach: int | None
    mask: AttentionMask
    softmax_scale: float
    soft_cap: float | None
    dtype: jnp.dtype

    def __call__(self, layer: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        q, k, v, pages, positions, there, *more = (
            hax.named(array, tuple(names)) for array, names in zip(arrays, self.axes, strict=True)
        )
        tables = more.pop(0) if self.has_tables else None
        written = _written(pages.array, layer, k.array, v.array, positions.array, there.array, tables)
        keys, values = self._read(written, layer, q.axes[0], q.resolve_axis("kv_head"), tables)
        Pos, KeyPos = q.resolve_axis("position"), keys.resolve_axis("key_position")
        whole = Pos.size == 1 or Pos.size * KeyPos.size <= MOST_SCORES
        name, block = ("reference", None) if whole else ("blockwise", DEFAULT_BLOCK)
        # Haliax's functions constrain what they make by the mapping in scope; here are a device's own parts.
        with compute_mapping(AxisMapping()):
            mixed = attend(
                q.astype(self.dtype),
                keys.astype(self.dtype),
                values.astype(self.dtype),
                self.mask.with_positions(query_positions=positions),
                choice=BackendChoice(name=name, reason="by the number of scores", block_size=block),
                softmax_scale=self.softmax_scale,
                soft_cap=self.soft_cap,
                sinks=more.pop(0) if more else None,
            )
        return mixed.rearrange(q.axes).array.astype(q.dtype), written

    def _read(
        self, pages: jax.Array, layer: jax.Array, Batch: Axis, KVHead: Axis, tables: NamedArray | None
    ) -> tuple[NamedArray, NamedArray]:
        """Keys and values of the rows, `[batch, kv_head, key_position, head_size]`."""
        slots, size = pages.shape[4:]
        rows, heads = Batch.size, KVHead.size
        if tables is None:
            reach = min(self.reach or slots, slots)
            shape = (1, rows, heads, 1, reach, size)
            # Each by itself: a product reads its own part of the cache where it lies.
            keys, values = (
                jax.lax.dynamic_slice(pages, (layer, 0, 0, which, 0, 0), shape)[0, :, :, 0] for which in (0, 1)
            )
        else:
            some = tables.array[:, : -(-(self.reach or slots * tables.array.shape[1]) // slots)]
            keys, values = (
                pages.at[layer, some, :, which].get(mode="clip").swapaxes(1, 2).reshape(rows, heads, -1, size)
                for which in (0, 1)
            )
        axes = (Batch, KVHead, Axis("key_position", keys.shape[2]), Axis("head_size", size))
        return hax.named(keys, axes), hax.named(values, axes)


def _written(
    pages: jax.Array,
    layer: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    there: jax.Array,
    tables: NamedArray | None,
) -> jax.Array:
    """The pages with what is new in them; what is not there, or has no slot, is dropped."""
    slots = pages.shape[4]
    if tables is None:
        number = jnp.arange(positions.shape[0])[:, None]
        there = there & (positions < slots)
    else:
        number = jnp.take_along_axis(tables.array, positions // slots, axis=1, mode="clip")
        there = there & (positions < slots * tables.array.shape[1])
    # A scatter of vectors along `head_size`. With heads and `kv` in what is written at a time, a compiled step on v5e
    # had temporaries of one and a half caches.
    at = jnp.where(there, number, pages.shape[1])[:, :, None, None]
    head, which = jnp.arange(pages.shape[2])[:, None], jnp.arange(2)
    new = jnp.stack([k, v], axis=3)
    new = jnp.where(jnp.isfinite(new), new, 0).astype(pages.dtype)
    return pages.at[layer, at, head, which, (positions % slots)[:, :, None, None]].set(new, mode="drop")
