"""KV-cache attention on one device: writes the new keys and values of its rows and heads, then attends to all.

Either in one product over all positions (TPU), or block by block up to the end of the longest row (CPU), so that a CPU
reads only filled slots.
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
from levanter.layers.attention.cache_positions import scatter_into_cache, update_scales_slice
from levanter.layers.attention.mask import AttentionMask
from levanter.layers.attention.reference import few_query_attention

MAX_MATERIALIZED_SCORES = 1 << 20
"""Queries × keys per head up to which all scores are materialized; above it, `blockwise_attention` runs. A single query
always materializes its scores."""

CACHE_ARRAYS = ("pages", "scales")
"""Names of the arguments that a layer reads and writes."""
CACHE_INDICES = {name: f"indices of {name}" for name in CACHE_ARRAYS}
"""Name of a cache array → name of the argument with its scatter indices."""


class PositionRange(NamedTuple):
    """A range of positions, the same for every row.

    Attributes:
        first: the first position; with several pages per row, the first of a page.
        length: the number of positions.
    """

    first: jax.Array
    length: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedAttention:
    """The computation of `attend_cached` on one device.

    Attributes:
        axes: names of the axes of each argument: q, k, v, pages, positions, valid, indices of pages, and optionally
            scales, their indices, tables and sinks.
        reach: how many positions of a row are read.
        block: positions read at a time; None for all.
        lone_queries, flat: see `NewPositions`.
        mask: the rule by positions.
        softmax_scale: multiplies the scores.
        soft_cap: bound of the scores.
        dtype: dtype of the attention products.
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
        inputs = {name: hax.named(array, self.axes[name]) for name, array in arrays.items()}
        q = inputs["q"]
        # `[batch, position, kv_head, kv, head_size]`.
        vectors = jnp.stack([inputs["k"].array, inputs["v"].array], axis=3)
        # A NaN in a query, key or value reaches the row's activations, by which the caller detects a lost row.
        too_large = _too_large(vectors, arrays["pages"].dtype)
        vectors = vectors if too_large is None else jnp.where(too_large, jnp.nan, vectors)
        # Written before they are read: a new position attends, through the cache, to its own key and to the new keys
        # before it.
        cache = self._write({name: arrays[name] for name in CACHE_ARRAYS if name in arrays}, layer, vectors, inputs)
        # Inside shard_map the arrays are local shards: an empty mapping keeps Haliax from constraining them.
        with compute_mapping(AxisMapping()):
            inputs |= self._pad_lone_queries(inputs)
            # A block that holds the whole capacity would be a loop of one iteration.
            whole = self.block is None or self._block_length(inputs) >= _capacity(inputs)
            mixed = (self._attend_all if whole else self._attend_by_blocks)(cache, layer, inputs)
        # The slice drops the queries that `_pad_lone_queries` added.
        output = mixed.rearrange(inputs["q"].axes).array.astype(q.dtype)[:, :, :, : arrays["q"].shape[3]]
        if too_large is not None:
            # One value lost spoils the position for all heads: over `kv_head`, `kv` and `head_size`.
            overflowed = jnp.any(too_large, axis=(2, 3, 4))[:, :, None, None, None]
            output = jnp.where(overflowed, jnp.nan, output)
        return output, cache

    def _pad_lone_queries(self, inputs: Mapping[str, NamedArray]) -> dict[str, NamedArray]:
        """Queries and sinks padded from one query per head to `lone_queries`; empty if no padding is needed."""
        q = inputs["q"]
        Group = q.resolve_axis("q_heads_per_group")
        if self.lone_queries == 1 or Group.size * q.axis_size("position") > 1:
            return {}
        padding: dict[AxisSelector, tuple[int, int]] = {Group: (0, self.lone_queries - 1)}
        return {name: hax.pad(inputs[name], padding) for name in ("q", "sinks") if name in inputs}

    def _attend_all(
        self, cache: Mapping[str, jax.Array], layer: jax.Array, inputs: Mapping[str, NamedArray]
    ) -> NamedArray:
        """Attention to all positions of the rows in one product."""
        q, tables = inputs["q"], inputs.get("tables")
        (keys, key_scales), (values, value_scales) = (self._read(cache, layer, q, tables, which) for which in (0, 1))
        Pos, KeyPos = q.resolve_axis("position"), keys.resolve_axis("key_position")
        whole = Pos.size == 1 or Pos.size * KeyPos.size <= MAX_MATERIALIZED_SCORES
        formula = few_query_attention if whole else functools.partial(blockwise_attention, block_size=DEFAULT_BLOCK)
        return formula(
            q.astype(self.dtype),
            keys.astype(self.dtype),
            values.astype(self.dtype),
            # Keys are read in order of position from 0 on, so the index of a key is its position.
            self.mask.with_positions(query_positions=inputs["positions"]),
            softmax_scale=self.softmax_scale,
            soft_cap=self.soft_cap,
            sinks=inputs.get("sinks"),
            scales=None if key_scales is None or value_scales is None else (key_scales, value_scales),
        )

    def _attend_by_blocks(
        self, cache: Mapping[str, jax.Array], layer: jax.Array, inputs: Mapping[str, NamedArray]
    ) -> NamedArray:
        """Attention to as many blocks of positions as the longest row has filled.

        A block beyond the end of a row leaves its softmax state unchanged, so rows do not affect each other.
        """
        assert self.reach is None, "both a reach and blocks"
        tables, positions, valid = inputs.get("tables"), inputs["positions"], inputs["valid"]
        length, capacity = self._block_length(inputs), _capacity(inputs)
        mask = self.mask.with_positions(query_positions=positions)
        # Heads before positions, as `reference_attention` has them.
        axes = inputs["q"].axes
        last = ("position", "head_size")
        q = inputs["q"].rearrange((*(axis for axis in axes if axis.name not in last), *last)).astype(self.dtype)

        def block(number: jax.Array, state: SoftmaxState) -> SoftmaxState:
            begin = number * length
            first_block = jnp.minimum(begin, capacity - length)
            (keys, key_scales), (values, value_scales) = (
                self._read(cache, layer, inputs["q"], tables, which, PositionRange(first_block, length))
                for which in (0, 1)
            )
            at = hax.arange(keys.resolve_axis("key_position")) + first_block
            # The last block is moved back to end at the capacity; positions that it repeats are masked.
            fresh = hax.named(at.array >= begin, at.axes)
            rule = mask.visible(positions, at, key_segments=None, explicit=None)
            visible = fresh if rule is None else hax.logical_and(rule, fresh)
            assert isinstance(visible, NamedArray)
            return state.update(
                q,
                keys.astype(self.dtype),
                values.astype(self.dtype),
                visible,
                softmax_scale=self.softmax_scale,
                soft_cap=self.soft_cap,
                scales=None if key_scales is None or value_scales is None else (key_scales, value_scales),
            )

        # Blocks before the first position that any query sees (window), and after the last one, are skipped.
        last_positions = jnp.where(valid.array, positions.array, 0)
        stop_block = jnp.minimum(jnp.max(last_positions), capacity - 1) // length + 1
        window = self.mask.sliding_window
        # Without a window every query sees position 0, since 2³⁰ exceeds any capacity. Entries that are no tokens do
        # not lower the minimum: they count as the capacity.
        seen = jnp.where(valid.array, positions.array - (window or 1 << 30) + 1, capacity)
        first_block = jnp.clip(jnp.min(seen), 0, capacity - 1) // length
        mixed = jax.lax.fori_loop(first_block, stop_block, block, SoftmaxState.start(q, inputs.get("sinks")))
        return mixed.normalized(self.dtype)

    def _block_length(self, inputs: Mapping[str, NamedArray]) -> int:
        """Positions per block; whole pages if rows have several pages."""
        assert self.block is not None
        if "tables" not in inputs or inputs["tables"].axis_size("table") == 1:
            return self.block
        # A block is found by the numbers of its pages, so it consists of whole ones.
        slots = inputs["pages"].axis_size("slot")
        return max(1, self.block // slots) * slots

    def _read(
        self,
        cache: Mapping[str, jax.Array],
        layer: jax.Array,
        q: NamedArray,
        tables: NamedArray | None,
        which: int,
        position_range: PositionRange | None = None,
    ) -> tuple[NamedArray, NamedArray | None]:
        """Keys (`which` 0) or values (1) of the rows, `[batch, kv_head, key_position, head_size]`, and their scales.

        Keys and values are read separately, so that each product reads its slice of the cache in place.
        """
        Batch, KVHead = q.axes[0], q.resolve_axis("kv_head")
        arrays: dict[str, NamedArray] = {}
        for name, array in cache.items():
            names = self.axes[name]
            size = dict(zip(names, array.shape, strict=True))
            if tables is None:
                # Row r is page r: one slice of the array, without a gather. `reach` is static, so the compiled program
                # reads that many slots and no more.
                reach = min(self.reach or size["slot"], size["slot"])
                size |= {"layers": 1, "kv": 1, "page": Batch.size, "slot": reach}
                start: dict[str, jax.Array | int] = {"layers": layer, "kv": which}
                if position_range is not None:
                    start["slot"], size["slot"] = position_range.first, position_range.length
                part = jax.lax.dynamic_slice(
                    array, [start.get(axis_name, 0) for axis_name in names], [size[axis_name] for axis_name in names]
                )
                axis_of_name = {"page": Batch, "slot": Axis("key_position", size["slot"])}
                axes = [
                    axis_of_name.get(axis_name, Axis(axis_name, size[axis_name]))
                    for axis_name in names
                    if axis_name not in ("layers", "kv")
                ]
                arrays[name] = hax.named(part.reshape([axis.size for axis in axes]), axes)
            else:
                slots = size["slot"]
                if position_range is not None and tables.array.shape[1] == 1:
                    part = _read_single_pages(array, names, tables.array[:, 0], position_range, layers=layer, kv=which)
                else:
                    if position_range is None:
                        # Only as many pages as hold `reach` positions are read.
                        page_numbers = tables.array[:, : -(-(self.reach or slots * tables.array.shape[1]) // slots)]
                    else:
                        page_numbers = jax.lax.dynamic_slice_in_dim(
                            tables.array, position_range.first // slots, position_range.length // slots, axis=1
                        )
                    # Gather whole pages, [batch, table, kv_head, slot, …]. Unused table entries are masked by position,
                    # so `clip` may read any page for them.
                    part = (
                        array.at[_index(names, layers=layer, page=page_numbers, kv=which)]
                        .get(mode="clip")
                        .swapaxes(1, 2)
                    )
                # [batch, kv_head, table, slot, …]: pages in table order and their slots join into `key_position`.
                part = part.reshape(Batch.size, KVHead.size, -1, *part.shape[4:])
                features = (Axis("head_size", width) for width in part.shape[3:])
                arrays[name] = hax.named(part, (Batch, KVHead, Axis("key_position", part.shape[2]), *features))
        return arrays["pages"], arrays.get("scales")

    def _write(
        self, cache: Mapping[str, jax.Array], layer: jax.Array, vectors: jax.Array, inputs: Mapping[str, NamedArray]
    ) -> Mapping[str, jax.Array]:
        """The cache arrays with the new entries; entries that are invalid or beyond the capacity are dropped."""
        # One scatter update per vector along `head_size`: with heads and `kv` inside the update window, a compiled step
        # on v5e had temporaries of one and a half caches.
        vectors = jnp.moveaxis(vectors, 3, 0)
        # `attend_cached` says why values that are not finite are stored as 0.
        new = {"pages": jnp.where(jnp.isfinite(vectors), vectors, 0)}
        if "scales" in cache:
            new["pages"], new["scales"] = int8_vectors(new["pages"])
        written: dict[str, jax.Array] = {}
        for name, array in cache.items():
            if name == "scales" and self.flat and _is_single_page_prefill(inputs):
                where = (inputs[key].array for key in ("tables", "positions", "valid"))
                written[name] = update_scales_slice(array, layer, new[name], *where)
            else:
                written[name] = scatter_into_cache(
                    array, layer, inputs[CACHE_INDICES[name]].array, new[name], flat=self.flat
                )
        return written


def _is_single_page_prefill(inputs: Mapping[str, NamedArray]) -> bool:
    """Whether the call appends several consecutive positions to a single row that has a single page."""
    if "tables" not in inputs or inputs["tables"].array.shape != (1, 1):
        return False
    return 1 < inputs["positions"].axis_size("position") <= inputs["pages"].axis_size("slot")


def _capacity(inputs: Mapping[str, NamedArray]) -> int:
    """The number of positions that a row can have."""
    slots = inputs["pages"].axis_size("slot")
    return slots if "tables" not in inputs else slots * inputs["tables"].axis_size("table")


def _too_large(vectors: jax.Array, dtype: DTypeLike) -> jax.Array | None:
    """Which values overflow in a cache of a narrower range (float16); None if the range is as wide."""
    # Int8 caches scale each vector to its own range, so nothing overflows.
    floating = jnp.issubdtype(dtype, jnp.floating)
    if not floating or jnp.finfo(dtype).maxexp >= jnp.finfo(vectors.dtype).maxexp:
        return None
    return ~jnp.isfinite(vectors.astype(dtype))


def _read_single_pages(
    array: jax.Array, names: Sequence[str], pages: jax.Array, position_range: PositionRange, **at: jax.Array | int
) -> jax.Array:
    """A range of slots of rows that have one page each, `[batch, kv_head, 1, slot, …]`."""
    size = (
        dict(zip(names, array.shape, strict=True)) | dict.fromkeys((*at, "page"), 1) | {"slot": position_range.length}
    )
    sizes = [size[name] for name in names]
    axes = (*(name for name in ("kv_head", "slot", "head_size") if name in names),)

    def read_page(page: jax.Array) -> jax.Array:
        start = {**at, "page": page, "slot": position_range.first}
        part = jax.lax.dynamic_slice(array, [start.get(name, 0) for name in names], sizes)
        # Pages and scales have the remaining axes in this order.
        return part.reshape([size[name] for name in axes])

    # The slice of one row stays a slice; `vmap` turns those of several rows into a gather.
    slices = read_page(pages[0])[None] if len(pages) == 1 else jax.vmap(read_page)(pages)
    return slices[:, :, None]


def _index(names: Sequence[str], **indices: jax.Array | int) -> tuple[jax.Array | int | slice, ...]:
    """An index tuple by axis names; axes without an index are taken whole."""
    return tuple(indices.get(name, slice(None)) for name in names)
