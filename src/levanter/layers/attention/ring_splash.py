"""A ring's passes by JAX's kernel for TPUs (`ring.Pass`), which is neither patched nor copied.

The keys that arrive are attended to in one call, as if they were a sequence: the mark of a query (`splash_tables`) says
up to which index, and with a window from which, it sees them. So one compiled kernel serves every hop: whole, diagonal,
nothing and any window are tables of blocks that are computed from the marks. The kernels' own backward passes are
called with what attention to *all* keys has found.

These have private names in JAX (`BACKWARD`); nothing else here uses one, and a JAX without them, or with others, has no
splash in a ring (`obstacle`). A test pins what is passed to them.
"""

import inspect
from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as pallas

from levanter.layers.attention import lse_merge
from levanter.layers.attention.reference import HIDDEN
from levanter.layers.attention.ring import Arrays, VisibleKeys
from levanter.layers.attention.splash import BLOCKS
from levanter.layers.attention.splash_tables import (
    MOST_MARKED_KEYS,
    LimitRule,
    Rule,
    Settings,
    SplashBlocks,
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
"""The kernels of the backward pass, and their parameters in order."""


def obstacle() -> str | None:
    """Why this JAX's kernel cannot run in a ring, if it cannot."""
    for name, takes in BACKWARD.items():
        found = getattr(pallas, name, None)
        if found is None or set(inspect.signature(found).parameters) != set(takes.split()):
            has = "has no" if found is None else "has another"
            return f"JAX {jax.__version__} {has} {pallas.__name__}.{name}, which splash in a ring calls"
    return None


@dataclass(frozen=True, kw_only=True)
class SplashPasses:
    """The kernel on a run of keys, and its gradient.

    Attributes:
        soft_cap: bound of the scores; None for none.
        block_size: positions in a block; None for the largest that divides a run.
        interpret: emulate the kernel.
        fused: whether the backward pass is one kernel (`Settings`). Not by default: the compiler states more cycles for
            the sum of the pieces of the queries' gradient than the two products that are spared take.
    """

    soft_cap: float | None = None
    block_size: int | None = None
    interpret: bool = False
    fused: bool = False

    def forward(
        self, sight: VisibleKeys, q: jax.Array, k: jax.Array, v: jax.Array, begins: Arrays, segments: Arrays | None
    ) -> lse_merge.Seen:
        """See `Pass`."""
        settings = self._settings(q, sight)
        tables, rule, ids = _tables(sight, q.shape[-2], begins, segments, settings.blocks)
        kernel = settings.kernel(tables, rule, residuals=True)
        # A query that sees no key here has this one, whose value is zero; beside any other key it weighs nothing.
        hidden = jnp.full((q.shape[1] * q.shape[2],), HIDDEN, jnp.float32)

        def of_row(row: dict[str, jax.Array]) -> lse_merge.Seen:
            q = row["q"]
            found = kernel(q.reshape(-1, *q.shape[2:]), row["k"], row["v"], segment_ids=_ids(row), sinks=hidden)
            out, (total,) = cast(tuple[jax.Array, tuple[jax.Array]], found)
            return out.reshape(q.shape), total.reshape(q.shape[:-1])

        return jax.vmap(of_row)({"q": q, "k": k, "v": v, **ids})

    def backward(
        self,
        sight: VisibleKeys,
        given: tuple[jax.Array, jax.Array, jax.Array],
        found: tuple[jax.Array, jax.Array, jax.Array],
        begins: Arrays,
        segments: Arrays | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `Pass`."""
        (q, k, v), (delta, total, of_out) = given, found
        settings = self._settings(q, sight)
        tables, rule, ids = _tables(sight, q.shape[-2], begins, segments, settings.blocks)
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
            mine = {name: row[name].reshape(-1, *row[name].shape[2:]) for name in queries}
            arrays = (mine["q"], row["k"], row["v"], _ids(row), None, mine["total"], mine["of_out"], mine["delta"])
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

        dq, dk, dv = (x.astype(jnp.float32) for x in jax.vmap(of_row)({**queries, "k": k, "v": v, **ids}))
        return dq, dk, dv

    def _settings(self, q: jax.Array, sight: VisibleKeys) -> Settings:
        run = q.shape[-2] // sight.runs
        blocks = run_blocks(run, self.block_size, head_size=q.shape[-1], wide=q.dtype.itemsize > 2)
        return Settings(blocks=blocks, soft_cap=self.soft_cap, interpret=self.interpret, fused=self.fused)


def _tables(
    sight: VisibleKeys, length: int, begins: Arrays, segments: Arrays | None, blocks: SplashBlocks
) -> tuple[Tables, Rule | LimitRule, dict[str, jax.Array]]:
    """The tables of blocks for the keys that are here, the rule that their marks are for, and the segments by name."""
    rule, marks = marks_by_index(sight, length, begins)
    if segments is None:
        tables = tables_at(rule, marks[None], length, blocks)
        ids = {}
    else:
        of_queries, of_keys = segments
        tables = tables_at(rule, marks[None], length, blocks, segments=(of_queries, of_keys))
        ids = {"query_segments": of_queries, "key_segments": of_keys}
    forward, to_queries, to_keys = (table._replace(q_sequence=marks) for table in tables)
    return (forward, to_queries, to_keys), rule, ids


def marks_by_index(sight: VisibleKeys, length: int, begins: Arrays) -> tuple[Rule | LimitRule, jax.Array]:
    """The rule by indices of the keys that are here, and the marks of the queries.

    A device's runs follow each other in position, so what a query sees of them is one range of indices: its end follows
    from causality, its beginning from the window. With a window and two runs the mark holds both (`LimitRule`).

    Args:
        sight: what is seen.
        length: positions on a device.
        begins: the first positions of the runs of the queries, and of the keys.

    Raises:
        ValueError: a window in zigzag order over more keys than a mark can tell apart.
    """
    own, theirs = begins
    run = length // sight.runs
    queries = (own[:, None] + jnp.arange(run, dtype=jnp.int32)[None]).reshape(-1)
    if sight.runs == 1:
        return Rule(sight.is_causal, sight.window), queries - theirs[0]
    if not sight.is_causal:
        return Rule(is_causal=False, window=None), queries

    def before(position: jax.Array) -> jax.Array:
        """How many of the keys are before a position."""
        return jnp.clip(position[:, None] - theirs[None], 0, run).sum(axis=-1, dtype=jnp.int32)

    stop = before(queries + 1)
    if sight.window is None:
        return Rule(is_causal=True, window=None), stop - 1
    if length > MOST_MARKED_KEYS:
        raise ValueError(
            f"splash in a ring: with a window and in zigzag order a device has at most {MOST_MARKED_KEYS} positions, "
            f"not {length}; use position_order: natural, or more devices in the ring"
        )
    return LimitRule(), LimitRule.of(before(queries + 1 - sight.window), stop)


def run_blocks(run: int, requested: int | None, *, head_size: int, wide: bool) -> SplashBlocks:
    """The blocks of a run of positions: the largest legal ones that divide it, as near to those asked for as they are.

    Args:
        run: consecutive positions on a device.
        requested: positions in a block; None for as many as may be.
        head_size: of one head.
        wide: whether arrays are float32.

    Raises:
        ValueError: none divides it.
    """
    legal = [size for size in BLOCKS if run % size == 0 and (size <= 512 or not wide or head_size <= 128)]
    if not legal:
        raise ValueError(
            f"splash in a ring: runs of {run} consecutive positions are no multiple of {BLOCKS[0]}; use longer "
            f"sequences or fewer devices in the ring, attention_mapping: gather, or model.attn_backend: blockwise"
        )
    block = max([size for size in legal if size <= (requested or run)], default=legal[0])
    half = block // 2 if block > 512 else block
    return SplashBlocks(block=block, compute=half, dq=half if wide else block, padded=run)


def _ids(row: dict[str, jax.Array]) -> pallas.SegmentIds | None:
    return pallas.SegmentIds(row["query_segments"], row["key_segments"]) if "query_segments" in row else None


def splash_passes(*, soft_cap: float | None, block_size: int | None, interpret: bool = False) -> SplashPasses:
    """The passes.

    Raises:
        ValueError: this JAX's kernel cannot.
    """
    if found := obstacle():
        raise ValueError(f"{found}; use attention_mapping: gather or heads, or model.attn_backend: blockwise")
    return SplashPasses(soft_cap=soft_cap, block_size=block_size, interpret=interpret)
