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

A cache of 8-bit integers has a second array for a stack of layers, of the same axes but `head_size`: the scales
(`layers.attention.cache_int8`).
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.typing import DTypeLike

from haliax_ext.mapping import AxisMapping, compute_mapping, compute_mapping_in_scope
from levanter.layers.attention.backends import DEFAULT_BLOCK
from levanter.layers.attention.blockwise import blockwise_attention
from levanter.layers.attention.cache_int8 import int8_vectors
from levanter.layers.attention.mask import AttentionMask
from levanter.layers.attention.reference import reference_attention

PAGE_AXES = ("layers", "page", "kv_head", "kv", "slot", "head_size")
"""The axes of the keys and values of a stack of layers, in order."""

SCALE_AXES = ("layers", "kv_head", "kv", "page", "slot")
"""The axes of the scales of integers, in order. With `kv` beside `slot` they would be laid out anew, and back, for each
call."""

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
        scales: of integers, over `SCALE_AXES`; None where keys and values are stored as they are.
    """

    pages: NamedArray
    layer: jax.Array
    scales: NamedArray | None = None

    @staticmethod
    def entering(pages: NamedArray, scales: NamedArray | None = None) -> "CachedLayers":
        """The state before the first layer."""
        assert tuple(axis.name for axis in pages.axes) == PAGE_AXES, pages.axes
        assert scales is None or tuple(axis.name for axis in scales.axes) == SCALE_AXES, scales.axes
        return CachedLayers(pages=pages, layer=jnp.int32(0), scales=scales)


def page_axes(*, layers: int, pages: int, slots: int, KVHead: Axis, HeadSize: Axis) -> tuple[Axis, ...]:
    """The axes of a stack's keys and values."""
    return (Axis("layers", layers), Axis("page", pages), KVHead, Axis("kv", 2), Axis("slot", slots), HeadSize)


def scale_axes(pages: Sequence[Axis]) -> tuple[Axis, ...]:
    """The axes of the scales of a stack's keys and values.

    Args:
        pages: those of the keys and values.
    """
    by_name = {axis.name: axis for axis in pages}
    return tuple(by_name[name] for name in SCALE_AXES)


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
    later row that gets its page would multiply what it does not see by 0, and 0 · NaN is NaN. What a cache of float16
    has no number for is taken for one that is not finite.

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
    at = (Batch.name, "position")
    given = {
        "q": q.rearrange(of_query),
        "k": k.rearrange(of_key),
        "v": v.rearrange(of_key),
        "pages": state.pages,
        "scales": state.scales,
        "positions": new.positions.rearrange(at),
        "there": new.there.rearrange(at),
        "tables": new.tables,
        "sinks": sinks,
    }
    there = {name: x for name, x in given.items() if x is not None}
    layer = _CachedAttention(
        axes={name: tuple(axis.name for axis in x.axes) for name, x in there.items()},
        reach=new.reach,
        mask=mask,
        softmax_scale=softmax_scale,
        soft_cap=soft_cap,
        dtype=jnp.dtype(dtype),
    )
    arrays = {name: x.array for name, x in there.items()}
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        mixed, held = layer(state.layer, arrays)
    else:
        mapping = compute_mapping_in_scope()
        mapping = mapping.merged({"page": mapping.mesh_axes(Batch.name) or None})
        specs = {name: mapping.spec(names) for name, names in layer.axes.items()}
        kept = {name: specs[name] for name in _HELD if name in specs}
        # That what is computed alike on several devices is the same there, the checker does not see.
        run = jax.shard_map(layer, in_specs=(jax.P(), specs), out_specs=(specs["q"], kept), check_vma=False)
        mixed, held = run(state.layer, arrays)
    behind = {name: hax.named(x, there[name].axes) for name, x in held.items()}
    mixed = hax.named(mixed, there["q"].axes).rearrange(q.axes)
    return mixed, CachedLayers(**behind, layer=state.layer + 1)


_HELD = ("pages", "scales")
"""What a layer reads and writes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _CachedAttention:
    """A device's part of `attend_cached`.

    Attributes:
        axes: names of the axes of its arguments: q, k, v, pages, positions, there, and maybe scales, tables and sinks.
        reach: how many positions of a row are read.
        mask: the rule.
        softmax_scale: multiplies the scores.
        soft_cap: bound of the scores.
        dtype: in which attention is computed.
    """

    axes: Mapping[str, tuple[str, ...]]
    reach: int | None
    mask: AttentionMask
    softmax_scale: float
    soft_cap: float | None
    dtype: jnp.dtype

    def __call__(self, layer: jax.Array, arrays: Mapping[str, jax.Array]) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        given = {name: hax.named(array, self.axes[name]) for name, array in arrays.items()}
        q, positions, tables = given["q"], given["positions"], given.get("tables")
        vectors = jnp.stack([given["k"].array, given["v"].array], axis=3)
        too_large = _too_large(vectors, arrays["pages"].dtype)
        vectors = vectors if too_large is None else jnp.where(too_large, jnp.nan, vectors)
        held = self._write({name: arrays[name] for name in _HELD if name in arrays}, layer, vectors, given)
        (keys, key_scales), (values, value_scales) = (self._read(held, layer, q, tables, which) for which in (0, 1))
        Pos, KeyPos = q.resolve_axis("position"), keys.resolve_axis("key_position")
        whole = Pos.size == 1 or Pos.size * KeyPos.size <= MOST_SCORES
        formula = reference_attention if whole else functools.partial(blockwise_attention, block_size=DEFAULT_BLOCK)
        # Haliax's functions constrain what they make by the mapping in scope; here are a device's own parts.
        with compute_mapping(AxisMapping()):
            mixed = formula(
                q.astype(self.dtype),
                keys.astype(self.dtype),
                values.astype(self.dtype),
                self.mask.with_positions(query_positions=positions),
                softmax_scale=self.softmax_scale,
                soft_cap=self.soft_cap,
                sinks=given.get("sinks"),
                scales=None if key_scales is None or value_scales is None else (key_scales, value_scales),
            )
        found = mixed.rearrange(q.axes).array.astype(q.dtype)
        if too_large is not None:
            lost = jnp.any(too_large, axis=(2, 3, 4))[:, :, None, None, None]
            found = jnp.where(lost, jnp.nan, found)
        return found, held

    def _read(
        self, held: Mapping[str, jax.Array], layer: jax.Array, q: NamedArray, tables: NamedArray | None, which: int
    ) -> tuple[NamedArray, NamedArray | None]:
        """Keys or values of the rows, `[batch, kv_head, key_position, head_size]`, and their scales without the last.

        Each by itself: a product reads its own part of the cache where it lies.
        """
        Batch, KVHead = q.axes[0], q.resolve_axis("kv_head")
        found: dict[str, NamedArray] = {}
        for name, array in held.items():
            names = self.axes[name]
            size = dict(zip(names, array.shape, strict=True))
            if tables is None:
                reach = min(self.reach or size["slot"], size["slot"])
                size |= {"layers": 1, "kv": 1, "page": Batch.size, "slot": reach}
                start = {"layers": layer, "kv": which}
                part = jax.lax.dynamic_slice(
                    array, [start.get(each, 0) for each in names], [size[each] for each in names]
                )
                own = {"page": Batch, "slot": Axis("key_position", size["slot"])}
                axes = [own.get(each, Axis(each, size[each])) for each in names if each not in start]
                found[name] = hax.named(part.reshape([axis.size for axis in axes]), axes)
            else:
                slots = size["slot"]
                some = tables.array[:, : -(-(self.reach or slots * tables.array.shape[1]) // slots)]
                part = array.at[_at(names, layers=layer, page=some, kv=which)].get(mode="clip").swapaxes(1, 2)
                part = part.reshape(Batch.size, KVHead.size, -1, *part.shape[4:])
                features = (Axis("head_size", each) for each in part.shape[3:])
                found[name] = hax.named(part, (Batch, KVHead, Axis("key_position", part.shape[2]), *features))
        return found["pages"], found.get("scales")

    def _write(
        self, held: Mapping[str, jax.Array], layer: jax.Array, vectors: jax.Array, given: Mapping[str, NamedArray]
    ) -> Mapping[str, jax.Array]:
        """The pages, and their scales, with what is new in them; what is not there, or has no slot, is dropped."""
        positions, there, tables = given["positions"].array, given["there"].array, given.get("tables")
        pages = held["pages"]
        slots = pages.shape[4]
        if tables is None:
            number = jnp.arange(positions.shape[0])[:, None]
            there = there & (positions < slots)
        else:
            number = jnp.take_along_axis(tables.array, positions // slots, axis=1, mode="clip")
            there = there & (positions < slots * tables.array.shape[1])
        # A scatter of vectors along `head_size`. With heads and `kv` in what is written at a time, a compiled step on
        # v5e had temporaries of one and a half caches.
        number = jnp.where(there, number, pages.shape[1])[:, :, None, None]
        head, which = jnp.arange(pages.shape[2])[:, None], jnp.arange(2)
        at = {"layers": layer, "page": number, "kv_head": head, "kv": which}
        at["slot"] = (positions % slots)[:, :, None, None]
        new = {"pages": jnp.where(jnp.isfinite(vectors), vectors, 0)}
        if "scales" in held:
            new["pages"], new["scales"] = int8_vectors(new["pages"])
        return {
            name: array.at[_at(self.axes[name], **at)].set(new[name].astype(array.dtype), mode="drop")
            for name, array in held.items()
        }


def _too_large(vectors: jax.Array, dtype: DTypeLike) -> jax.Array | None:
    """Which numbers a cache of a narrower range (float16) would hold as infinities; None if its range is as wide."""
    floating = jnp.issubdtype(dtype, jnp.floating)
    if not floating or jnp.finfo(dtype).maxexp >= jnp.finfo(vectors.dtype).maxexp:
        return None
    return ~jnp.isfinite(vectors.astype(dtype))


def _at(names: Sequence[str], **given: jax.Array | int) -> tuple[jax.Array | int | slice, ...]:
    """An index by axis names: all of those that are not given."""
    return tuple(given.get(name, slice(None)) for name in names)
