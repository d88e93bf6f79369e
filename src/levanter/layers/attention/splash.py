"""JAX's Pallas kernel for attention on TPUs ("splash"), behind named axes and on any mesh.

The kernel holds a block of scores at a time on the chip, and visits only the blocks of queries × keys that the mask
shows some of. The compiler cannot shard it, so every device is handed its own heads and rows by `jax.shard_map`: the
mapping in scope says which mesh axes shard the batch, `kv_head` and `q_heads_per_group`, and `position`, which shards
the queries only (keys and values are not sharded). What the kernel asks for is arranged here: sequences of whole blocks
(padded, the padding hidden), the scale on the queries, and masks as rules (`splash_tables`).

Words. *block*: queries × keys that are computed in one visit. *part*: the queries of a sequence that one device has.
"""

import functools
from collections.abc import Callable
from typing import cast

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as pallas
from jax.sharding import AbstractMesh, PartitionSpec
from jax.typing import DTypeLike

from levanter.layers.attention.kernel_specs import AxisShards
from levanter.layers.attention.kv_all_gather import Attend, gathering, gathers_keys
from levanter.layers.attention.mask import AttentionMask
from levanter.layers.attention.reference import HIDDEN
from levanter.layers.attention.splash_tables import (
    MOST_MARKED_KEYS,
    Rule,
    Settings,
    SplashBlocks,
    every_part_sees,
    marks_of,
    rule_by_marks,
    static_kernel,
    tables_at,
)
from levanter.layers.attention.zigzag import natural

LANES = 128
"""The width of a TPU's vector registers: every block is a multiple of it."""

BLOCKS = (128, 256, 384, 512, 768, 1024)
"""Legal blocks; with larger ones the backward pass does not fit in the 16 MiB of VMEM that a kernel may have."""

VISIT = 300**2
"""What visiting a block costs beyond its arithmetic, in pairs (head size 128): 0.35 µs at half of v4's peak."""

PADDING_SEGMENT = np.iinfo(np.int32).min


def splash_blocks(
    length: int, requested: int | None = None, *, head_size: int = LANES, dtype: DTypeLike = jnp.bfloat16
) -> SplashBlocks:
    """The cheapest legal blocks for `length` positions under a causal mask.

    A sequence padded to n blocks has n·(n+1)/2 to visit, those on the diagonal computed whole although half of each is
    hidden; small blocks pay for many visits, large ones for padding and the diagonal.

    Args:
        length: positions on one device.
        requested: the block asked for; rounded up to a legal one.
        head_size: of one head. Heads of 256 in float32 need 22.6 MiB of vector memory with blocks of 1,024.
        dtype: of queries, keys and values. In float32 heads of 128 fit with 1,024, but for dq on v5e.
    """
    is_wide = jnp.dtype(dtype).itemsize > 2
    legal = tuple(block for block in BLOCKS if block <= 512 or not is_wide or head_size <= 128)

    def at_least(size: int) -> int:
        return next((block for block in legal if block >= size), legal[-1])

    def cost(block: int) -> float:
        count = -(-length // block)
        return count * (count + 1) / 2 * (block**2 + VISIT)

    block = min(at_least(requested), at_least(length)) if requested else min(legal, key=cost)
    half = block // 2 if block > 512 else block
    return SplashBlocks(block=block, compute=half, dq=half if is_wide else block, padded=-(-length // block) * block)


def splash_obstacle(platform: str | None, dtype: DTypeLike) -> str | None:
    """Why the kernel cannot run, if it cannot."""
    if platform != "tpu":
        return f"the platform is {platform or 'not known'}, not tpu"
    if jnp.dtype(dtype) not in (jnp.dtype("bfloat16"), jnp.dtype("float32")):
        return f"the kernel takes bfloat16 and float32, not {jnp.dtype(dtype).name}"
    return None


def splash_attention(
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    mask: AttentionMask,
    *,
    softmax_scale: float,
    block_size: int | None = None,
    soft_cap: float | None = None,
    sinks: NamedArray | None = None,
    interpret: bool = False,
) -> NamedArray:
    """As `reference_attention`, by the kernel; scores and softmax are float32.

    Queries are scaled before they meet the keys, which rounds 16-bit ones once more than the reference does. Keys whose
    positions are an array are laid out in order of position first.

    Args:
        q: see `reference_attention`.
        k: see `reference_attention`.
        v: see `reference_attention`.
        mask: a rule that `splash_mask_obstacle` has nothing against.
        softmax_scale: multiplies the scores.
        block_size: positions in a block, if not by length.
        soft_cap: see `reference_attention`.
        sinks: see `reference_attention`.
        interpret: emulate the kernel, for machines without a TPU.

    Raises:
        ValueError: the kernel cannot have the mask.
        IndivisibleError: an axis does not divide into what it is mapped to.
    """
    Pos, KeyPos = q.resolve_axis("position"), k.resolve_axis("key_position")
    if obstacle := splash_mask_obstacle(mask, keys=KeyPos.size):
        raise ValueError(f"splash attention: {obstacle}; set model.attn_backend: blockwise")
    KVHead, Group, Size = (q.resolve_axis(name) for name in ("kv_head", "q_heads_per_group", "head_size"))
    leading = tuple(a for a in q.axes if a not in (Pos, KVHead, Group, Size))
    mesh = jax.sharding.get_abstract_mesh()
    cut = AxisShards.in_scope()
    parts, zigzag = cut.ways(Pos), mask.zigzag
    gathers = gathers_keys(cut, Pos, KeyPos)
    if zigzag > 1:
        # All keys are here: in their own order again, so that only the queries' positions are an array.
        mask = _keys_in_order(mask, Pos, KeyPos)
        k, v = (x if gathers else natural(x, zigzag, KeyPos.name) for x in (k, v))
    part = -(-Pos.size // parts)
    blocks = splash_blocks(min(part, KeyPos.size), block_size, head_size=Size.size, dtype=q.dtype)
    Padded = Pos.resize(-(-part // blocks.block) * blocks.block * parts)
    by_index = mask.is_by_index(Pos, KeyPos)
    PaddedKeys = KeyPos.resize(Padded.size if by_index else -(-KeyPos.size // blocks.block) * blocks.block)
    if PaddedKeys.size > KeyPos.size and not (mask.is_causal and by_index) and mask.query_segments is None:
        # Nothing else hides the padding from the queries.
        own, theirs = hax.zeros(Pos, dtype=jnp.int32), hax.zeros(KeyPos, dtype=jnp.int32)
        mask = mask.with_segment_ids(own, None if by_index else theirs)
    if sinks is None and not by_index:
        # A query that sees no key has this one, whose value is zero; beside any other key it weighs nothing.
        sinks = hax.full((KVHead, Group), HIDDEN, dtype=jnp.float32)

    def of_rows(x: NamedArray, Along: Axis) -> NamedArray:
        return x.astype(jnp.int32).broadcast_to((*leading, Along)).rearrange((*leading, Along))

    scaled = (q.astype(jnp.float32) * softmax_scale).astype(q.dtype)
    named = {"q": _padded(scaled, Pos, Padded).rearrange((*leading, KVHead, Group, Padded, Size))}
    # By the name of the queries' positions keys are cut as they are.
    given = (x.rename({KeyPos.name: Pos.name}) if gathers else _padded(x, KeyPos, PaddedKeys) for x in (k, v))
    named["k"], named["v"] = (x.rearrange((*leading, KVHead, ..., Size)) for x in given)
    with_keys = gathering(cut.mesh_axes(Pos), zigzag, PaddedKeys.size) if gathers else _as_they_are
    if mask.query_segments is not None:
        segments = _padded(of_rows(mask.query_segments, Pos), Pos, Padded, PADDING_SEGMENT)
        named["query_segments"] = segments
        named["key_segments"] = segments.rename({Pos.name: KeyPos.name})
        if not by_index:
            theirs = mask.segments_of_keys(Pos, KeyPos)
            assert theirs is not None
            named["key_segments"] = _padded(of_rows(theirs, KeyPos), KeyPos, PaddedKeys, PADDING_SEGMENT)
    if sinks is not None:
        named["sinks"] = sinks.rearrange((KVHead, Group))
    rule = Rule(mask.is_causal, mask.sliding_window)
    settings = Settings(blocks=blocks, soft_cap=soft_cap, interpret=interpret)
    static = dict(queries=Padded.size, keys=PaddedKeys.size, offset=mask.offset, parts=parts)
    static_positions = not rule.compares or (mask.query_positions is None and mask.key_positions is None)
    if static_positions and every_part_sees(rule, **static):
        kernel = static_kernel(rule, **static, settings=settings)
        # Each part of the queries has its own share of the kernel's table of blocks.
        kernel_spec = None
        if not mesh.empty:
            queries = cut.spec((Padded,))
            kernel_spec = kernel.manual_sharding_spec(jax.NamedSharding(mesh, PartitionSpec(None, *queries)))
        attend = with_keys(_at_indices)
        out = _on_every_device(attend, (kernel,), (kernel_spec,), named, cut, mesh, rows=len(leading))
    else:
        named |= _positions(mask, Pos, KeyPos, Padded, PaddedKeys, of_rows)
        attend = with_keys(functools.partial(_at_positions, rule=rule, settings=settings))
        out = _on_every_device(attend, (), (), named, cut, mesh, rows=len(leading))
    found = hax.named(out, named["q"].axes)
    return (found if Padded == Pos else found[Pos.name, 0 : Pos.size]).rearrange(q.axes)


def _padded(x: NamedArray, Short: Axis, Long: Axis, value: int = 0) -> NamedArray:
    return x if Short == Long else hax.pad(x, {Short: (0, Long.size - Short.size)}, constant_values=value)


def _as_they_are(attend: Attend) -> Attend:
    """`attend` for keys and values that are all here."""
    return attend


def _keys_in_order(mask: AttentionMask, Pos: Axis, KeyPos: Axis) -> AttentionMask:
    """The mask where queries are still in zigzag order and keys are in their own again."""
    theirs = mask.segments_of_keys(Pos, KeyPos)
    return AttentionMask(
        query_segments=mask.query_segments,
        key_segments=None if theirs is None else natural(theirs, mask.zigzag, KeyPos.name),
        query_positions=mask.positions_of_queries(Pos),
        is_causal=mask.is_causal,
        sliding_window=mask.sliding_window,
    )


def splash_mask_obstacle(mask: AttentionMask, *, keys: int) -> str | None:
    """Why the kernel cannot have a mask, if it cannot.

    Args:
        mask: the mask.
        keys: in a sequence.
    """
    if mask.explicit_mask is not None:
        return "the kernel takes masks that are given by rules (causal, window, segments), not by arrays"
    if mask.query_trunks is not None:
        return "in the kernel a query sees one segment, not that of a trunk as well"
    # A mark in the kernel is 32 bits wide, and each of two limits takes half of it.
    given = mask.key_positions is not None and "key_position" in [axis.name for axis in mask.key_positions.axes]
    if given and mask.is_causal and mask.sliding_window is not None and keys > MOST_MARKED_KEYS:
        return f"with a window and an array of positions the kernel takes at most {MOST_MARKED_KEYS} keys, not {keys}"
    return None


def _positions(
    mask: AttentionMask,
    Pos: Axis,
    KeyPos: Axis,
    Padded: Axis,
    PaddedKeys: Axis,
    of_rows: Callable[[NamedArray, Axis], NamedArray],
) -> dict[str, NamedArray]:
    """Positions of queries and keys for every row, in whole blocks; of keys none where they are consecutive."""
    queries, keys = mask.positions_of_queries(Pos), mask.key_positions
    *others, _ = of_rows(queries, Pos).axes
    if keys is not None and KeyPos.name not in [axis.name for axis in keys.axes]:
        queries, keys = of_rows(queries, Pos) - of_rows(keys, Pos), None

    def widths(Short: Axis, Long: Axis) -> list[tuple[int, int]]:
        return [*((0, 0) for _ in others), (0, Long.size - Short.size)]

    # Queries behind the end are where the last one is, so that they need no blocks of their own; keys are behind all.
    array = jnp.pad(of_rows(queries, Pos).array, widths(Pos, Padded), mode="edge")
    found = {"query_positions": hax.named(array, (*others, Padded))}
    if keys is not None:
        last = np.iinfo(np.int32).max
        array = jnp.pad(of_rows(keys, KeyPos).array, widths(KeyPos, PaddedKeys), constant_values=last)
        found["key_positions"] = hax.named(array, (*others, PaddedKeys))
    return found


def _on_every_device(
    attend: Attend,
    before: tuple[pallas.SplashAttentionKernel, ...],
    before_specs: tuple[object, ...],
    named: dict[str, NamedArray],
    cut: AxisShards,
    mesh: AbstractMesh,
    *,
    rows: int,
) -> jax.Array:
    """Calls `attend(*before, arrays, rows=rows)` with each device's own part of the arrays."""

    def local(*given: jax.Array | pallas.SplashAttentionKernel) -> jax.Array:
        arrays = dict(zip(named, given[len(before) :], strict=True))
        return attend(*given[: len(before)], arrays, rows=rows)

    if not mesh.empty:
        specs = {name: cut.spec(x.axes) for name, x in named.items()}
        in_specs = (*before_specs, *specs.values())
        local = jax.shard_map(local, in_specs=in_specs, out_specs=specs["q"], check_vma=False)
    return local(*before, *(x.array for x in named.values()))


def _over_rows(function: Callable[..., jax.Array], arrays: dict[str, jax.Array], *, rows: int) -> jax.Array:
    """`function` of the arrays of one sequence, for all sequences along the first axes; sinks are everyone's."""
    mapped = function
    for _ in range(rows):
        mapped = jax.vmap(mapped, in_axes=({name: None if name == "sinks" else 0 for name in arrays},))
    return mapped(arrays)


def _at_indices(kernel: pallas.SplashAttentionKernel, arrays: dict[str, jax.Array], *, rows: int) -> jax.Array:
    """Attends where positions are indices."""
    return _over_rows(functools.partial(_attend_row, kernel), arrays, rows=rows)


def _at_positions(arrays: dict[str, jax.Array], *, rule: Rule, settings: Settings, rows: int) -> jax.Array:
    """Attends where positions are arrays: the keys in order, the marks of the queries, and tables for all rows."""
    leading = arrays["q"].shape[:rows]
    flat = {name: x if name == "sinks" else x.reshape(-1, *x.shape[rows:]) for name, x in arrays.items()}
    queries, keys = flat.pop("query_positions"), flat.pop("key_positions", None)
    by_marks = rule_by_marks(rule, reordered=keys is not None)
    marks, order = jax.vmap(functools.partial(marks_of, rule))(queries, keys)
    if order is not None:
        flat |= {name: _ordered(flat[name], order, axis) for name, axis in (("k", -2), ("v", -2))}
        if "key_segments" in flat:
            flat["key_segments"] = _ordered(flat["key_segments"], order, -1)
    tables = tables_at(by_marks, marks, flat["k"].shape[-2], settings.blocks)

    def of_row(row: dict[str, jax.Array]) -> jax.Array:
        own = row.pop("marks")
        forward, of_queries, of_keys = (table._replace(q_sequence=own) for table in tables)
        kernel = settings.kernel((forward, of_queries, of_keys), by_marks)
        return _attend_row(kernel, row)

    out = _over_rows(of_row, {**flat, "marks": marks}, rows=1)
    return out.reshape(*leading, *out.shape[1:])


def _ordered(x: jax.Array, order: jax.Array, axis: int) -> jax.Array:
    """`x [rows, …]` with each row's entries along an axis in the row's `order [rows, key_position]`."""
    shape = [1] * x.ndim
    shape[0], shape[axis] = order.shape
    return jnp.take_along_axis(x, order.reshape(shape), axis=axis)


def _attend_row(kernel: pallas.SplashAttentionKernel, arrays: dict[str, jax.Array]) -> jax.Array:
    """One sequence: `q [kv_head, q_heads_per_group, position, head_size]`, `k` and `v [kv_head, position, head_size]`.

    Beside them are sinks and segments, if there are any. The kernel has one axis of query heads and finds the key/value
    head of each by division, as they are flattened here.
    """
    q, sinks = arrays["q"], arrays.get("sinks")
    segments = None
    if "query_segments" in arrays:
        segments = pallas.SegmentIds(arrays["query_segments"], arrays["key_segments"])
    out = kernel(
        q.reshape(-1, *q.shape[2:]),
        arrays["k"],
        arrays["v"],
        segment_ids=segments,
        sinks=None if sinks is None else sinks.reshape(-1),
    )
    return cast(jax.Array, out).reshape(q.shape)
