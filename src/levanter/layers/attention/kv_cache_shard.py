"""A device's part of attention to a cache: it writes what is new of its rows and heads, and attends to them all.

At once, or block by block as far as the longest row goes: a TPU is given one product over all positions, and a CPU
reads no more than there is.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, AxisSelector, NamedArray
from jax.typing import DTypeLike

from haliax_ext.mapping import AxisMapping, compute_mapping
from levanter.layers.attention.backends import DEFAULT_BLOCK
from levanter.layers.attention.blockwise import SoftmaxState, blockwise_attention
from levanter.layers.attention.cache_int8 import int8_vectors
from levanter.layers.attention.cache_positions import put, put_in_one_piece
from levanter.layers.attention.divided_last import attention_divided_last
from levanter.layers.attention.mask import AttentionMask

MOST_SCORES = 1 << 20
"""Queries × keys of a head up to which all of their scores exist at a time; more are worked through by blocks of keys.
A single query never has too many."""

HELD = ("pages", "scales")
"""What a layer reads and writes."""
PLACES = {name: f"places of {name}" for name in HELD}
"""What is said of where that goes."""


class PositionRange(NamedTuple):
    """Some positions of every row.

    Attributes:
        first: the first of them; of rows with several pages, the first of a page.
        length: how many.
    """

    first: jax.Array
    length: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedAttention:
    """A device's part of `attention.cached.attend_cached`.

    Attributes:
        axes: names of the axes of its arguments: q, k, v, pages, positions, there, places of pages, and maybe scales,
            their places, tables and sinks.
        reach: how many positions of a row are read.
        block: how many of them at a time; None for all.
        lone_queries, flat: see `NewPositions`.
        mask: the rule.
        softmax_scale: multiplies the scores.
        soft_cap: bound of the scores.
        dtype: in which attention is computed.
    """

    axes: Mapping[str, tuple[str, ...]]
    reach: int | None
    block: int | None
    lone_queries: int
    flat: bool
    mask: AttentionMask
    softmax_scale: float
    soft_cap: float | None
    dtype: jnp.dtype

    def __call__(self, layer: jax.Array, arrays: Mapping[str, jax.Array]) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        given = {name: hax.named(array, self.axes[name]) for name, array in arrays.items()}
        q = given["q"]
        vectors = jnp.stack([given["k"].array, given["v"].array], axis=3)
        too_large = _too_large(vectors, arrays["pages"].dtype)
        vectors = vectors if too_large is None else jnp.where(too_large, jnp.nan, vectors)
        held = self._write({name: arrays[name] for name in HELD if name in arrays}, layer, vectors, given)
        # Haliax's functions constrain what they make by the mapping in scope; here are a device's own parts.
        with compute_mapping(AxisMapping()):
            given |= self._joined(given)
            whole = self.block is None or self._stretch(given) >= _capacity(given)
            mixed = (self._at_once if whole else self._by_blocks)(held, layer, given)
        found = mixed.rearrange(given["q"].axes).array.astype(q.dtype)[:, :, :, : arrays["q"].shape[3]]
        if too_large is not None:
            lost = jnp.any(too_large, axis=(2, 3, 4))[:, :, None, None, None]
            found = jnp.where(lost, jnp.nan, found)
        return found, held

    def _joined(self, given: Mapping[str, NamedArray]) -> dict[str, NamedArray]:
        """Queries and sinks in which a single query of each head is joined by others that are 0; nothing if none is."""
        q = given["q"]
        Group = q.resolve_axis("q_heads_per_group")
        if self.lone_queries == 1 or Group.size * q.axis_size("position") > 1:
            return {}
        more: dict[AxisSelector, tuple[int, int]] = {Group: (0, self.lone_queries - 1)}
        return {name: hax.pad(given[name], more) for name in ("q", "sinks") if name in given}

    def _at_once(self, held: Mapping[str, jax.Array], layer: jax.Array, given: Mapping[str, NamedArray]) -> NamedArray:
        """Attention to all positions of the rows."""
        q, tables = given["q"], given.get("tables")
        (keys, key_scales), (values, value_scales) = (self._read(held, layer, q, tables, which) for which in (0, 1))
        Pos, KeyPos = q.resolve_axis("position"), keys.resolve_axis("key_position")
        whole = Pos.size == 1 or Pos.size * KeyPos.size <= MOST_SCORES
        formula = attention_divided_last if whole else functools.partial(blockwise_attention, block_size=DEFAULT_BLOCK)
        return formula(
            q.astype(self.dtype),
            keys.astype(self.dtype),
            values.astype(self.dtype),
            self.mask.with_positions(query_positions=given["positions"]),
            softmax_scale=self.softmax_scale,
            soft_cap=self.soft_cap,
            sinks=given.get("sinks"),
            scales=None if key_scales is None or value_scales is None else (key_scales, value_scales),
        )

    def _by_blocks(
        self, held: Mapping[str, jax.Array], layer: jax.Array, given: Mapping[str, NamedArray]
    ) -> NamedArray:
        """Attention to as many blocks as the rows have filled.

        Another block of a longer row changes nothing for the others, so that all rows get what they would get alone.
        """
        assert self.reach is None, "both a reach and blocks"
        tables, positions, there = given.get("tables"), given["positions"], given["there"]
        length, every = self._stretch(given), _capacity(given)
        mask = self.mask.with_positions(query_positions=positions)
        # Heads before positions, as `reference_attention` has them.
        axes = given["q"].axes
        last = ("position", "head_size")
        q = given["q"].rearrange((*(axis for axis in axes if axis.name not in last), *last)).astype(self.dtype)

        def block(number: jax.Array, mixing: SoftmaxState) -> SoftmaxState:
            begin = number * length
            first = jnp.minimum(begin, every - length)
            (keys, key_scales), (values, value_scales) = (
                self._read(held, layer, given["q"], tables, which, PositionRange(first, length)) for which in (0, 1)
            )
            at = hax.arange(keys.resolve_axis("key_position")) + first
            # Where blocks do not fill the positions, the last one begins among those of the one before.
            fresh = hax.named(at.array >= begin, at.axes)
            rule = mask.visible(positions, at, key_segments=None, explicit=None)
            visible = fresh if rule is None else hax.logical_and(rule, fresh)
            assert isinstance(visible, NamedArray)
            return mixing.further(
                q,
                keys.astype(self.dtype),
                values.astype(self.dtype),
                visible,
                softmax_scale=self.softmax_scale,
                soft_cap=self.soft_cap,
                scales=None if key_scales is None or value_scales is None else (key_scales, value_scales),
            )

        of_rows = jnp.where(there.array, positions.array, 0)
        behind = jnp.minimum(jnp.max(of_rows), every - 1) // length + 1
        window = self.mask.sliding_window
        seen = jnp.where(there.array, positions.array - (window or 1 << 30) + 1, every)
        first = jnp.clip(jnp.min(seen), 0, every - 1) // length
        mixed = jax.lax.fori_loop(first, behind, block, SoftmaxState.start(q, given.get("sinks")))
        return mixed.whole(self.dtype)

    def _stretch(self, given: Mapping[str, NamedArray]) -> int:
        """The positions of a block: of rows with several pages, whole pages."""
        assert self.block is not None
        if "tables" not in given or given["tables"].axis_size("table") == 1:
            return self.block
        slots = given["pages"].axis_size("slot")
        return max(1, self.block // slots) * slots

    def _read(
        self,
        held: Mapping[str, jax.Array],
        layer: jax.Array,
        q: NamedArray,
        tables: NamedArray | None,
        which: int,
        stretch: PositionRange | None = None,
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
                start: dict[str, jax.Array | int] = {"layers": layer, "kv": which}
                if stretch is not None:
                    start["slot"], size["slot"] = stretch.first, stretch.length
                part = jax.lax.dynamic_slice(
                    array, [start.get(each, 0) for each in names], [size[each] for each in names]
                )
                own = {"page": Batch, "slot": Axis("key_position", size["slot"])}
                axes = [own.get(each, Axis(each, size[each])) for each in names if each not in ("layers", "kv")]
                found[name] = hax.named(part.reshape([axis.size for axis in axes]), axes)
            else:
                slots = size["slot"]
                if stretch is not None and tables.array.shape[1] == 1:
                    part = _of_pages(array, names, tables.array[:, 0], stretch, layers=layer, kv=which)
                else:
                    if stretch is None:
                        some = tables.array[:, : -(-(self.reach or slots * tables.array.shape[1]) // slots)]
                    else:
                        some = jax.lax.dynamic_slice_in_dim(
                            tables.array, stretch.first // slots, stretch.length // slots, axis=1
                        )
                    part = array.at[_at(names, layers=layer, page=some, kv=which)].get(mode="clip").swapaxes(1, 2)
                part = part.reshape(Batch.size, KVHead.size, -1, *part.shape[4:])
                features = (Axis("head_size", each) for each in part.shape[3:])
                found[name] = hax.named(part, (Batch, KVHead, Axis("key_position", part.shape[2]), *features))
        return found["pages"], found.get("scales")

    def _write(
        self, held: Mapping[str, jax.Array], layer: jax.Array, vectors: jax.Array, given: Mapping[str, NamedArray]
    ) -> Mapping[str, jax.Array]:
        """The pages, and their scales, with what is new in them; what is not there, or has no slot, is dropped."""
        # Vectors along `head_size`, in a row as they were made: with heads and `kv` in what is written at a time, a
        # compiled step on v5e had temporaries of one and a half caches.
        vectors = jnp.moveaxis(vectors, 3, 0)
        new = {"pages": jnp.where(jnp.isfinite(vectors), vectors, 0)}
        if "scales" in held:
            new["pages"], new["scales"] = int8_vectors(new["pages"])
        written: dict[str, jax.Array] = {}
        for name, array in held.items():
            if name == "scales" and self.flat and _of_one_page(given):
                where = (given[each].array for each in ("tables", "positions", "there"))
                written[name] = put_in_one_piece(array, layer, new[name], *where)
            else:
                written[name] = put(array, layer, given[PLACES[name]].array, new[name], flat=self.flat)
        return written


def _of_one_page(given: Mapping[str, NamedArray]) -> bool:
    """Whether a call has some consecutive positions of one row, all of them in the one page of that row."""
    if "tables" not in given or given["tables"].array.shape != (1, 1):
        return False
    return 1 < given["positions"].axis_size("position") <= given["pages"].axis_size("slot")


def _capacity(given: Mapping[str, NamedArray]) -> int:
    """Positions that a row can have."""
    slots = given["pages"].axis_size("slot")
    return slots if "tables" not in given else slots * given["tables"].axis_size("table")


def _too_large(vectors: jax.Array, dtype: DTypeLike) -> jax.Array | None:
    """Which numbers a cache of a narrower range (float16) would hold as infinities; None if its range is as wide."""
    floating = jnp.issubdtype(dtype, jnp.floating)
    if not floating or jnp.finfo(dtype).maxexp >= jnp.finfo(vectors.dtype).maxexp:
        return None
    return ~jnp.isfinite(vectors.astype(dtype))


def _of_pages(
    array: jax.Array, names: Sequence[str], pages: jax.Array, stretch: PositionRange, **at: jax.Array | int
) -> jax.Array:
    """A stretch of the only pages of some rows, `[batch, kv_head, 1, slot, …]`, and nothing else of them."""
    size = dict(zip(names, array.shape, strict=True)) | dict.fromkeys((*at, "page"), 1) | {"slot": stretch.length}
    sizes = [size[each] for each in names]
    axes = (*(each for each in ("kv_head", "slot", "head_size") if each in names),)

    def of(page: jax.Array) -> jax.Array:
        start = {**at, "page": page, "slot": stretch.first}
        part = jax.lax.dynamic_slice(array, [start.get(each, 0) for each in names], sizes)
        # The axes that are left stand in this order in pages and in scales.
        return part.reshape([size[each] for each in axes])

    found = of(pages[0])[None] if len(pages) == 1 else jax.vmap(of)(pages)
    return found[:, :, None]


def _at(names: Sequence[str], **given: jax.Array | int) -> tuple[jax.Array | int | slice, ...]:
    """An index by axis names: all of those that are not given."""
    return tuple(given.get(name, slice(None)) for name in names)
