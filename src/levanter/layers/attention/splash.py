"""JAX's Pallas kernel for attention on TPUs ("splash"), behind named axes and on any mesh.

The kernel keeps one block of scores at a time on the chip and visits only blocks of queries × keys with a visible
entry. XLA cannot shard it, so it runs under `jax.shard_map` on the heads and rows of each device: the mapping in scope
names the mesh axes that shard the batch, `kv_head`, `q_heads_per_group`, and `position`, which shards the queries only
(keys and values are gathered). This module meets the kernel's requirements: sequences of whole blocks (padded, the
padding masked), scaled queries, and masks as rules (`splash_tables`).

Keys and values sharded like their queries are gathered inside `shard_map`: the transpose is then a reduce-scatter of
the gradients, where the compiler would all-reduce whole gradients and slice them afterwards.
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

from levanter.layers.attention.kernel_specs import AxisShards
from levanter.layers.attention.mask import AttentionMask
from levanter.layers.attention.reference import HIDDEN
from levanter.layers.attention.splash_blocks import splash_blocks, splash_mask_obstacle
from levanter.layers.attention.splash_tables import (
    Rule,
    Settings,
    every_shard_sees_a_key,
    query_marks,
    rule_by_marks,
    static_kernel,
    tables_at,
)
from levanter.layers.attention.zigzag import natural

PADDING_SEGMENT = np.iinfo(np.int32).min

Attend = Callable[..., jax.Array]
"""Attention on one device: `attend(*kernel, arrays, rows=…)`; keys and values are `[…, key_position, head_size]`."""


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
    """`reference_attention` by the splash kernel; scores and softmax are float32.

    Queries are scaled before the product, which rounds 16-bit queries once more than the reference does. Keys with
    explicit positions are sorted by position first.

    Args:
        q: see `reference_attention`.
        k: see `reference_attention`.
        v: see `reference_attention`.
        mask: a rule that the kernel supports, see `splash_mask_obstacle`.
        softmax_scale: multiplies the scores.
        block_size: positions per block; None chooses by length.
        soft_cap: see `reference_attention`.
        sinks: see `reference_attention`.
        interpret: emulate the kernel, for machines without a TPU.

    Raises:
        ValueError: the kernel does not support the mask.
        IndivisibleError: an axis size is not a multiple of its number of shards.
    """
    Pos, KeyPos = q.resolve_axis("position"), k.resolve_axis("key_position")
    if obstacle := splash_mask_obstacle(mask, keys=KeyPos.size):
        raise ValueError(f"splash attention: {obstacle}; set model.attn_backend: blockwise")
    KVHead, Group, Size = (q.resolve_axis(name) for name in ("kv_head", "q_heads_per_group", "head_size"))
    leading = tuple(a for a in q.axes if a not in (Pos, KVHead, Group, Size))
    mesh = jax.sharding.get_abstract_mesh()
    cut = AxisShards.in_scope()
    num_shards, zigzag = cut.num_shards(Pos), mask.zigzag
    gathers_keys = can_gather_keys(cut, Pos, KeyPos)
    if zigzag > 1:
        # Every device gets all keys, so restore their natural order: only the queries need explicit positions.
        mask = _keys_in_order(mask, Pos, KeyPos)
        k, v = (x if gathers_keys else natural(x, zigzag, KeyPos.name) for x in (k, v))
    shard_length = -(-Pos.size // num_shards)
    blocks = splash_blocks(min(shard_length, KeyPos.size), block_size, head_size=Size.size, dtype=q.dtype)
    # Each shard of the queries is padded to whole blocks.
    Padded = Pos.resize(-(-shard_length // blocks.block) * blocks.block * num_shards)
    by_index = mask.is_by_index(Pos, KeyPos)
    PaddedKeys = KeyPos.resize(Padded.size if by_index else -(-KeyPos.size // blocks.block) * blocks.block)
    if PaddedKeys.size > KeyPos.size and not (mask.is_causal and by_index) and mask.query_segments is None:
        # Neither causality nor segments mask the padded keys: put them in another segment.
        query_segments, key_segments = hax.zeros(Pos, dtype=jnp.int32), hax.zeros(KeyPos, dtype=jnp.int32)
        mask = mask.with_segment_ids(query_segments, None if by_index else key_segments)
    if sinks is None and not by_index:
        # A sink of score HIDDEN: the only key of a query that sees none, with value zero; otherwise its weight is zero.
        sinks = hax.full((KVHead, Group), HIDDEN, dtype=jnp.float32)

    def of_rows(x: NamedArray, Along: Axis) -> NamedArray:
        return x.astype(jnp.int32).broadcast_to((*leading, Along)).rearrange((*leading, Along))

    scaled = (q.astype(jnp.float32) * softmax_scale).astype(q.dtype)
    named = {"q": _padded(scaled, Pos, Padded).rearrange((*leading, KVHead, Group, Padded, Size))}
    # Keys that are gathered inside shard_map are named `position`, so the mapping shards them like the queries.
    keys_and_values = (
        x.rename({KeyPos.name: Pos.name}) if gathers_keys else _padded(x, KeyPos, PaddedKeys) for x in (k, v)
    )
    named["k"], named["v"] = (x.rearrange((*leading, KVHead, ..., Size)) for x in keys_and_values)
    with_keys = gather_keys(cut.mesh_axes(Pos), zigzag, PaddedKeys.size) if gathers_keys else _as_they_are
    if mask.query_segments is not None:
        segments = _padded(of_rows(mask.query_segments, Pos), Pos, Padded, PADDING_SEGMENT)
        named["query_segments"] = segments
        named["key_segments"] = segments.rename({Pos.name: KeyPos.name})
        if not by_index:
            key_segments = mask.segments_of_keys(Pos, KeyPos)
            assert key_segments is not None
            named["key_segments"] = _padded(of_rows(key_segments, KeyPos), KeyPos, PaddedKeys, PADDING_SEGMENT)
    if sinks is not None:
        named["sinks"] = sinks.rearrange((KVHead, Group))
    rule = Rule(mask.is_causal, mask.sliding_window)
    settings = Settings(blocks=blocks, soft_cap=soft_cap, interpret=interpret)
    static = dict(queries=Padded.size, keys=PaddedKeys.size, offset=mask.offset, num_shards=num_shards)
    static_positions = not rule.compares or (mask.query_positions is None and mask.key_positions is None)
    if static_positions and every_shard_sees_a_key(rule, **static):
        kernel = static_kernel(rule, **static, settings=settings)
        # The block table is sharded along with the queries: each shard has its own rows of it.
        kernel_spec = None
        if not mesh.empty:
            queries = cut.spec((Padded,))
            kernel_spec = kernel.manual_sharding_spec(jax.NamedSharding(mesh, PartitionSpec(None, *queries)))
        attend = with_keys(_at_indices)
        out = _shard_mapped(attend, (kernel,), (kernel_spec,), named, cut, mesh, rows=len(leading))
    else:
        named |= _padded_positions(mask, Pos, KeyPos, Padded, PaddedKeys, of_rows)
        attend = with_keys(functools.partial(_at_positions, rule=rule, settings=settings))
        out = _shard_mapped(attend, (), (), named, cut, mesh, rows=len(leading))
    output = hax.named(out, named["q"].axes)
    return (output if Padded == Pos else output[Pos.name, 0 : Pos.size]).rearrange(q.axes)


def _padded(x: NamedArray, Short: Axis, Long: Axis, value: int = 0) -> NamedArray:
    return x if Short == Long else hax.pad(x, {Short: (0, Long.size - Short.size)}, constant_values=value)


def _as_they_are(attend: Attend) -> Attend:
    """`attend` for keys and values that are replicated."""
    return attend


def _keys_in_order(mask: AttentionMask, Pos: Axis, KeyPos: Axis) -> AttentionMask:
    """The mask for queries in zigzag order and keys in natural order."""
    theirs = mask.segments_of_keys(Pos, KeyPos)
    return AttentionMask(
        query_segments=mask.query_segments,
        key_segments=None if theirs is None else natural(theirs, mask.zigzag, KeyPos.name),
        query_positions=mask.positions_of_queries(Pos),
        is_causal=mask.is_causal,
        sliding_window=mask.sliding_window,
    )


def _padded_positions(
    mask: AttentionMask,
    Pos: Axis,
    KeyPos: Axis,
    Padded: Axis,
    PaddedKeys: Axis,
    of_rows: Callable[[NamedArray, Axis], NamedArray],
) -> dict[str, NamedArray]:
    """Positions of queries and keys per row, padded to whole blocks; none for keys that are consecutive."""
    queries, keys = mask.positions_of_queries(Pos), mask.key_positions
    # The axes of the rows; positions may differ between them.
    *others, _ = of_rows(queries, Pos).axes
    # Consecutive keys: only the distance matters, so subtract the first key's position from the queries.
    if keys is not None and KeyPos.name not in [axis.name for axis in keys.axes]:
        queries, keys = of_rows(queries, Pos) - of_rows(keys, Pos), None

    def widths(Short: Axis, Long: Axis) -> list[tuple[int, int]]:
        return [*((0, 0) for _ in others), (0, Long.size - Short.size)]

    # Padded queries repeat the last position, so that they visit no further blocks; padded keys come after all queries.
    array = jnp.pad(of_rows(queries, Pos).array, widths(Pos, Padded), mode="edge")
    positions = {"query_positions": hax.named(array, (*others, Padded))}
    if keys is not None:
        last = np.iinfo(np.int32).max
        array = jnp.pad(of_rows(keys, KeyPos).array, widths(KeyPos, PaddedKeys), constant_values=last)
        positions["key_positions"] = hax.named(array, (*others, PaddedKeys))
    return positions


def _shard_mapped(
    attend: Attend,
    before: tuple[pallas.SplashAttentionKernel, ...],
    before_specs: tuple[object, ...],
    named: dict[str, NamedArray],
    cut: AxisShards,
    mesh: AbstractMesh,
    *,
    rows: int,
) -> jax.Array:
    """Calls `attend(*before, arrays, rows=rows)` on each device with its shards of the arrays."""

    def local(*args: jax.Array | pallas.SplashAttentionKernel) -> jax.Array:
        arrays = dict(zip(named, args[len(before) :], strict=True))
        return attend(*args[: len(before)], arrays, rows=rows)

    if not mesh.empty:
        # Sharding of the arguments is by name: an axis that the mapping does not shard is replicated.
        specs = {name: cut.spec(x.axes) for name, x in named.items()}
        in_specs = (*before_specs, *specs.values())
        local = jax.shard_map(local, in_specs=in_specs, out_specs=specs["q"], check_vma=False)
    return local(*before, *(x.array for x in named.values()))


def _over_rows(function: Callable[..., jax.Array], arrays: dict[str, jax.Array], *, rows: int) -> jax.Array:
    """Maps `function` of the arrays of one sequence over the leading axes; sinks are shared."""
    mapped = function
    for _ in range(rows):
        mapped = jax.vmap(mapped, in_axes=({name: None if name == "sinks" else 0 for name in arrays},))
    return mapped(arrays)


def _at_indices(kernel: pallas.SplashAttentionKernel, arrays: dict[str, jax.Array], *, rows: int) -> jax.Array:
    """Attention where positions are indices."""
    return _over_rows(functools.partial(_attend_row, kernel), arrays, rows=rows)


def _at_positions(arrays: dict[str, jax.Array], *, rule: Rule, settings: Settings, rows: int) -> jax.Array:
    """Attention where positions are arrays: sorts the keys, computes marks per row and block tables for all rows."""
    # All row axes become one, because `vmap` below maps one.
    leading = arrays["q"].shape[:rows]
    flat = {name: x if name == "sinks" else x.reshape(-1, *x.shape[rows:]) for name, x in arrays.items()}
    queries, keys = flat.pop("query_positions"), flat.pop("key_positions", None)
    by_marks = rule_by_marks(rule, reordered=keys is not None)
    marks, order = jax.vmap(functools.partial(query_marks, rule))(queries, keys)
    if order is not None:
        flat |= {name: _ordered(flat[name], order, axis) for name, axis in (("k", -2), ("v", -2))}
        if "key_segments" in flat:
            flat["key_segments"] = _ordered(flat["key_segments"], order, -1)
    # One table serves all rows, so it is computed outside of `vmap`; each row's marks then mask within the blocks.
    tables = tables_at(by_marks, marks, flat["k"].shape[-2], settings.blocks)

    def of_row(row: dict[str, jax.Array]) -> jax.Array:
        row_marks = row.pop("marks")
        forward, of_queries, of_keys = (table._replace(q_sequence=row_marks) for table in tables)
        kernel = settings.kernel((forward, of_queries, of_keys), by_marks)
        return _attend_row(kernel, row)

    out = _over_rows(of_row, {**flat, "marks": marks}, rows=1)
    return out.reshape(*leading, *out.shape[1:])


def _ordered(x: jax.Array, order: jax.Array, axis: int) -> jax.Array:
    """`x [rows, …]` with the entries of each row along an axis permuted by `order [rows, key_position]`."""
    shape = [1] * x.ndim
    shape[0], shape[axis] = order.shape
    return jnp.take_along_axis(x, order.reshape(shape), axis=axis)


def _attend_row(kernel: pallas.SplashAttentionKernel, arrays: dict[str, jax.Array]) -> jax.Array:
    """One sequence: `q [kv_head, q_heads_per_group, position, head_size]`, `k` and `v [kv_head, position, head_size]`.

    `arrays` may hold sinks and segments as well. The kernel has one axis of query heads and computes the key/value head
    of each by division, which matches the flattening here.
    """
    # The kernel's own `q_sequence` and tables carry the mask; here only segments and sinks remain.
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


def can_gather_keys(cut: AxisShards, Pos: Axis, KeyPos: Axis) -> bool:
    """Whether queries are sharded and keys, the same tokens, can be sharded the same way."""
    num_shards = cut.num_shards(Pos)
    return num_shards > 1 and cut.num_shards(KeyPos) == 1 and Pos.size == KeyPos.size and KeyPos.size % num_shards == 0


def gather_keys(axes: tuple[str, ...], zigzag: int, length: int) -> Callable[[Attend], Attend]:
    """A wrapper that turns attention to all keys into attention to sharded keys, gathered on each device.

    Args:
        axes: mesh axes that shard keys and values.
        zigzag: number of shards of their zigzag order, which is undone; 1 for natural order.
        length: the length they are padded to.
    """

    def all_gather(x: jax.Array, groups: list[list[int]] | None = None) -> jax.Array:
        # Gather along a new outermost axis: along another one the TPU compiler emits an all-reduce and a slice for the
        # transpose instead of a reduce-scatter.
        shards = jax.lax.all_gather(x, axes, axis_index_groups=groups)
        along = x.ndim - 2
        # `[n, …, positions of a shard, head_size]`: the shards are adjacent again once n stands before the positions.
        return jnp.moveaxis(shards, 0, along).reshape(*x.shape[:along], -1, x.shape[-1])

    def full_keys(x: jax.Array) -> jax.Array:
        along = x.ndim - 2
        if zigzag > 1:
            # Device i holds run i and run 2n − 1 − i: the first halves ascend with the rank, the second ones descend.
            early, late = jnp.split(x, 2, axis=along)
            backwards = [list(reversed(range(zigzag)))]
            whole = jnp.concatenate((all_gather(early), all_gather(late, backwards)), axis=along)
        else:
            whole = all_gather(x)
        # The padding to whole blocks comes last: the shards on the wire have none.
        return jnp.pad(whole, [(0, length - whole.shape[along] if axis == along else 0) for axis in range(x.ndim)])

    def with_keys(attend: Attend) -> Attend:
        def attend_to_all(*args: object, rows: int) -> jax.Array:
            *kernel, last = args
            arrays = cast(dict[str, jax.Array], last)
            # Positions and segments of keys are mapped by `key_position`, which is not sharded here: they arrive whole.
            return attend(*kernel, arrays | {name: full_keys(arrays[name]) for name in ("k", "v")}, rows=rows)

        return attend_to_all

    return with_keys
