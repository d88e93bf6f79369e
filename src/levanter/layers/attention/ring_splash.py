"""`RingStep` by JAX's splash attention kernel for TPUs, which is neither patched nor copied.

One kernel call attends to the keys of a hop as if they were a sequence: the mark of a query (`splash_tables`) is the
index up to which, and with a window from which, it sees them. One compiled kernel therefore serves every hop: full,
diagonal, empty and windowed visibility are block tables computed from the marks. The backward kernels are called with
the log-sum-exp of attention to *all* keys.

The backward kernels are private in JAX (`BACKWARD`). If JAX lacks them or their parameters differ, splash does not run
in a ring (`obstacle`). A test pins the arguments.
"""

import inspect
from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as pallas

import levanter.layers.attention.lse_merge as lse_merge
from levanter.layers.attention.reference import HIDDEN
from levanter.layers.attention.ring import Arrays, VisibleKeys
from levanter.layers.attention.splash_blocks import BLOCKS, MAX_MARKED_KEYS, SplashBlocks
from levanter.layers.attention.splash_tables import (
    LimitRule,
    Rule,
    Settings,
    Tables,
    tables_at,
)

OF_QUERIES, OF_KEYS = "_splash_attention_bwd_dq", "_splash_attention_bwd_dkv"
_ARRAYS = "q k v segment_ids sinks logsumexp do di"
_MASK = "is_mqa mask_info mask_value attn_logits_soft_cap"
_REST = "q_layout k_layout v_layout mask_function interpret"
BACKWARD = {
    OF_QUERIES: f"{_ARRAYS} bq bkv {_MASK} {_REST}",
    OF_KEYS: f"{_ARRAYS} bq bkv bkv_compute {_MASK} use_fused_bwd_kernel {_REST}",
}
"""Name of a backward kernel → its parameters in order."""


def obstacle() -> str | None:
    """Why the kernel of the installed JAX cannot run in a ring; None if it can."""
    for name, takes in BACKWARD.items():
        kernel = getattr(pallas, name, None)
        # As sets: whether the order has changed as well is left to the test that pins the positional arguments.
        if kernel is None or set(inspect.signature(kernel).parameters) != set(takes.split()):
            has = "has no" if kernel is None else "has another"
            return f"JAX {jax.__version__} {has} {pallas.__name__}.{name}, which splash in a ring calls"
    return None


@dataclass(frozen=True, kw_only=True)
class SplashRingStep:
    """The splash kernel on the keys of a hop, and its gradient.

    Attributes:
        soft_cap: bound of the scores; None for none.
        block_size: positions per block; None for the largest that divides a run.
        interpret: emulate the kernel.
        fused: whether the backward pass is one kernel (`Settings`). Not by default: by the compiler's cycle counts the
            sum over the partial query gradients costs more than the two products that it saves.
    """

    soft_cap: float | None = None
    block_size: int | None = None
    interpret: bool = False
    fused: bool = False

    def forward(
        self,
        visible_keys: VisibleKeys,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        begins: Arrays,
        segments: Arrays | None,
    ) -> lse_merge.PartialAttention:
        """See `RingStep`."""
        settings = self._settings(q, visible_keys)
        tables, rule, ids = _tables(visible_keys, q.shape[-2], begins, segments, settings.blocks)
        # With residuals the kernel returns the log-sum-exp and has no gradient; the ring defines its own (`backward`).
        kernel = settings.kernel(tables, rule, residuals=True)
        # A sink of score HIDDEN: the only key of a query that sees none in this hop, with value zero; otherwise its
        # weight is zero.
        hidden = jnp.full((q.shape[1] * q.shape[2],), HIDDEN, jnp.float32)

        def of_row(row: dict[str, jax.Array]) -> lse_merge.PartialAttention:
            q = row["q"]
            outputs = kernel(q.reshape(-1, *q.shape[2:]), row["k"], row["v"], segment_ids=_ids(row), sinks=hidden)
            # `[query heads, position, head_size]` and `[query heads, position]`, with the heads of a group adjacent.
            out, (total,) = cast(tuple[jax.Array, tuple[jax.Array]], outputs)
            return out.reshape(q.shape), total.reshape(q.shape[:-1])

        return jax.vmap(of_row)({"q": q, "k": k, "v": v, **ids})

    def backward(
        self,
        visible_keys: VisibleKeys,
        inputs: tuple[jax.Array, jax.Array, jax.Array],
        # `kernel` takes one sequence: map over the rows of the device.
        residuals: tuple[jax.Array, jax.Array, jax.Array],
        begins: Arrays,
        segments: Arrays | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `RingStep`."""
        (q, k, v), (delta, total, of_out) = inputs, residuals
        settings = self._settings(q, visible_keys)
        tables, rule, ids = _tables(visible_keys, q.shape[-2], begins, segments, settings.blocks)
        queries = {"q": q, "total": total, "of_out": of_out, "delta": delta}
        sizes = settings.sizes
        shared = dict(
            is_mqa=False,
            mask_value=pallas.DEFAULT_MASK_VALUE,
            attn_logits_soft_cap=self.soft_cap,
            q_layout=sizes.q_layout,
            k_layout=sizes.k_layout,
            v_layout=sizes.v_layout,
            mask_function=rule,
            interpret=self.interpret,
        )

        def of_row(row: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
            # The kernel has one axis of query heads: flatten [kv_head, group].
            mine = {name: row[name].reshape(-1, *row[name].shape[2:]) for name in queries}
            arrays = (mine["q"], row["k"], row["v"], _ids(row), None, mine["total"], mine["of_out"], mine["delta"])
            # The dkv kernel returns dq only where it is fused; otherwise dq is None here and comes from its own kernel.
            dq, dk, dv = getattr(pallas, OF_KEYS)(
                *arrays,
                bq=sizes.block_q_dkv,
                bkv=sizes.block_kv_dkv,
                bkv_compute=sizes.block_kv_dkv_compute,
                mask_info=tables[2],
                use_fused_bwd_kernel=settings.fused,
                **shared,
            )
            if not settings.fused:
                of_queries = getattr(pallas, OF_QUERIES)
                dq = of_queries(*arrays, bq=sizes.block_q_dq, bkv=sizes.block_kv_dq, mask_info=tables[1], **shared)
            return dq.reshape(row["q"].shape), dk, dv

        # The gradients of the hops are added up in float32, whatever the inputs are.
        dq, dk, dv = (x.astype(jnp.float32) for x in jax.vmap(of_row)({**queries, "k": k, "v": v, **ids}))
        return dq, dk, dv

    def _settings(self, q: jax.Array, visible_keys: VisibleKeys) -> Settings:
        run = q.shape[-2] // visible_keys.runs
        blocks = run_blocks(run, self.block_size, head_size=q.shape[-1], wide=q.dtype.itemsize > 2)
        return Settings(blocks=blocks, soft_cap=self.soft_cap, interpret=self.interpret, fused=self.fused)


def _tables(
    visible_keys: VisibleKeys, length: int, begins: Arrays, segments: Arrays | None, blocks: SplashBlocks
) -> tuple[Tables, Rule | LimitRule, dict[str, jax.Array]]:
    """The block tables for the keys of a hop, the rule that reads their marks, and the segments by name."""
    rule, marks = marks_by_index(visible_keys, length, begins)
    if segments is None:
        tables = tables_at(rule, marks[None], length, blocks)
        ids = {}
    else:
        of_queries, of_keys = segments
        tables = tables_at(rule, marks[None], length, blocks, segments=(of_queries, of_keys))
        ids = {"query_segments": of_queries, "key_segments": of_keys}
    # The kernel passes `q_sequence` to its mask function as the first argument, which here are marks, not positions.
    forward, to_queries, to_keys = (table._replace(q_sequence=marks) for table in tables)
    return (forward, to_queries, to_keys), rule, ids


def marks_by_index(visible_keys: VisibleKeys, length: int, begins: Arrays) -> tuple[Rule | LimitRule, jax.Array]:
    """The rule by indices of the keys of a hop, and the marks of the queries.

    The runs of a device ascend in position, so a query sees one range of indices: causality gives its end, the window
    its beginning. With a window and two runs the mark holds both (`LimitRule`).

    Args:
        visible_keys: the static part of the mask.
        length: positions per device.
        begins: the first positions of the runs of the queries, and of the keys.

    Raises:
        ValueError: a window in zigzag order over more keys than a mark can represent.
    """
    query_begins, key_begins = begins
    run = length // visible_keys.runs
    queries = (query_begins[:, None] + jnp.arange(run, dtype=jnp.int32)[None]).reshape(-1)
    if visible_keys.runs == 1:
        # One run: the distance of positions equals that of indices after a shift by the first key's position.
        return Rule(visible_keys.is_causal, visible_keys.window), queries - key_begins[0]
    # Two runs without causality have no window either (`ring_obstacle`): nothing is masked, and the marks are not read.
    if not visible_keys.is_causal:
        return Rule(is_causal=False, window=None), queries

    def before(position: jax.Array) -> jax.Array:
        """How many keys of the hop are before a position: those of each run, added up."""
        return jnp.clip(position[:, None] - key_begins[None], 0, run).sum(axis=-1, dtype=jnp.int32)

    # Causality includes the query's own position, hence the keys before the position after it.
    stop = before(queries + 1)
    if visible_keys.window is None:
        return Rule(is_causal=True, window=None), stop - 1
    if length > MAX_MARKED_KEYS:
        raise ValueError(
            f"splash in a ring: with a window and in zigzag order a device has at most {MAX_MARKED_KEYS} positions, "
            f"not {length}; use position_order: natural, or more devices in the ring"
        )
    # A window of w positions starts at `query − w + 1`; the number of keys before that is the index of the first
    # visible one.
    return LimitRule(), LimitRule.of(before(queries + 1 - visible_keys.window), stop)


def run_blocks(run: int, requested: int | None, *, head_size: int, wide: bool) -> SplashBlocks:
    """The blocks of a run of positions: the largest legal block size that divides it, at most `requested`.

    Args:
        run: consecutive positions on a device.
        requested: positions per block; None for the largest.
        head_size: of one head.
        wide: whether arrays are float32.

    Raises:
        ValueError: no legal block size divides the run.
    """
    # Nothing is padded in a ring, so a block must divide the run. Float32 heads beyond 128 exceed the VMEM with blocks
    # above 512 (`splash_blocks`).
    legal = [size for size in BLOCKS if run % size == 0 and (size <= 512 or not wide or head_size <= 128)]
    if not legal:
        raise ValueError(
            f"splash in a ring: runs of {run} consecutive positions are not a multiple of {BLOCKS[0]}; use longer "
            f"sequences or fewer devices in the ring, attention_mapping: gather, or model.attn_backend: blockwise"
        )
    block = max([size for size in legal if size <= (requested or run)], default=legal[0])
    # As in `splash_blocks`: blocks above 512 are computed in halves, and in float32 the dq kernel takes half blocks.
    half = block // 2 if block > 512 else block
    return SplashBlocks(block=block, compute=half, dq=half if wide else block, padded=run)


def _ids(row: dict[str, jax.Array]) -> pallas.SegmentIds | None:
    return pallas.SegmentIds(row["query_segments"], row["key_segments"]) if "query_segments" in row else None


def splash_ring_step(*, soft_cap: float | None, block_size: int | None, interpret: bool = False) -> SplashRingStep:
    """The ring_step.

    Raises:
        ValueError: this JAX's kernel cannot.
    """
    if reason := obstacle():
        raise ValueError(f"{reason}; use attention_mapping: gather or heads, or model.attn_backend: blockwise")
    return SplashRingStep(soft_cap=soft_cap, block_size=block_size, interpret=interpret)
