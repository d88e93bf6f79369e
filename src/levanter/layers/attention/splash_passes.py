"""A ring's passes by JAX's kernel for TPUs (`ring.Pass`), which is neither patched nor copied.

A run of keys that arrives is attended to as if it began the sequence: the mark of a query (`splash_tables`) is its
position less that of the run's first key. So one compiled kernel serves every hop: whole, diagonal, nothing and any
window are tables of blocks that are computed from the marks. The kernel's own backward pass is called with what
attention to *all* keys has found.

That backward pass has a private name in JAX, `_splash_attention_bwd`; nothing else here uses one, and a JAX without it,
or with another one, has no splash in a ring (`obstacle`). A test pins what is passed to it.
"""

import inspect
from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as pallas

from levanter.layers.attention import merge
from levanter.layers.attention.reference import HIDDEN
from levanter.layers.attention.ring import Arrays, Sight
from levanter.layers.attention.splash import BLOCKS
from levanter.layers.attention.splash_tables import Rule, Settings, SplashBlocks, Tables, tables_at

BACKWARD = "_splash_attention_bwd"
TAKES = (
    "save_residuals",
    "mask_value",
    "is_mqa",
    "block_sizes",
    "residual_checkpoint_name",
    "mask_function",
    "attn_logits_soft_cap",
    "interpret",
    "res",
    "do",
)
"""The parameters of the kernel's backward pass, in order."""


def obstacle() -> str | None:
    """Why this JAX's kernel cannot run in a ring, if it cannot."""
    found = getattr(pallas, BACKWARD, None)
    if found is not None and tuple(inspect.signature(found).parameters) == TAKES:
        return None
    has = "has no" if found is None else "has another"
    return f"JAX {jax.__version__} {has} {pallas.__name__}.{BACKWARD}, which splash in a ring calls"


@dataclass(frozen=True, kw_only=True)
class SplashPasses:
    """The kernel on a run of keys, and its gradient.

    Attributes:
        soft_cap: bound of the scores; None for none.
        block_size: positions in a block; None for the largest that divides a run.
        interpret: emulate the kernel.
    """

    soft_cap: float | None = None
    block_size: int | None = None
    interpret: bool = False

    def forward(
        self, sight: Sight, q: jax.Array, k: jax.Array, v: jax.Array, begins: Arrays, segments: Arrays | None
    ) -> merge.Seen:
        """See `Pass`."""
        rule, settings = Rule(sight.is_causal, sight.window), self._settings(q, sight)
        # A query that sees no key here has this one, whose value is zero; beside any other key it weighs nothing.
        hidden = jnp.full((q.shape[1] * q.shape[2],), HIDDEN, jnp.float32)
        seen = merge.nothing(q.shape)
        for run in range(sight.runs):
            tables, keys = self._run(run, sight, q, (k, v), begins, segments, settings)
            kernel = settings.kernel(tables, rule, residuals=True)

            def of_row(row: dict[str, jax.Array], kernel: pallas.SplashAttentionKernel = kernel) -> merge.Seen:
                q = row["q"]
                found = kernel(q.reshape(-1, *q.shape[2:]), row["k"], row["v"], segment_ids=_ids(row), sinks=hidden)
                out, (total,) = cast(tuple[jax.Array, tuple[jax.Array]], found)
                return out.reshape(q.shape), total.reshape(q.shape[:-1])

            seen = merge.merged(seen, jax.vmap(of_row)({"q": q, **keys}))
        return seen

    def backward(
        self,
        sight: Sight,
        given: tuple[jax.Array, jax.Array, jax.Array],
        found: tuple[jax.Array, jax.Array, jax.Array],
        begins: Arrays,
        segments: Arrays | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `Pass`."""
        (q, k, v), (out, total, of_out) = given, found
        rule, settings = Rule(sight.is_causal, sight.window), self._settings(q, sight)
        rows = {"q": q, "out": out, "total": total, "of_out": of_out}
        of_q, of_keys = jnp.zeros(q.shape, jnp.float32), []
        for run in range(sight.runs):
            (_, of_queries, of_run), keys = self._run(run, sight, q, (k, v), begins, segments, settings)

            def of_row(
                row: dict[str, jax.Array], infos: tuple[object, object] = (of_queries, of_run)
            ) -> tuple[jax.Array, ...]:
                heads = {name: row[name].reshape(-1, *row[name].shape[2:]) for name in rows}
                residuals = (heads["q"], row["k"], row["v"], _ids(row), None, heads["out"], heads["total"], *infos)
                backward = getattr(pallas, BACKWARD)
                _, _, _, dq, dk, dv, _, _ = backward(
                    False,
                    pallas.DEFAULT_MASK_VALUE,
                    False,
                    settings.sizes,
                    None,
                    rule,
                    self.soft_cap,
                    self.interpret,
                    residuals,
                    heads["of_out"],
                )
                return dq.reshape(row["q"].shape), dk, dv

            dq, dk, dv = jax.vmap(of_row)({**rows, **keys})
            of_q = of_q + dq.astype(jnp.float32)
            of_keys.append((dk.astype(jnp.float32), dv.astype(jnp.float32)))
        of_k, of_v = (jnp.concatenate(parts, axis=2) for parts in zip(*of_keys, strict=True))
        return of_q, of_k, of_v

    def _settings(self, q: jax.Array, sight: Sight) -> Settings:
        run = q.shape[-2] // sight.runs
        blocks = run_blocks(run, self.block_size, head_size=q.shape[-1], wide=q.dtype.itemsize > 2)
        return Settings(blocks=blocks, soft_cap=self.soft_cap, interpret=self.interpret)

    def _run(
        self,
        run: int,
        sight: Sight,
        q: jax.Array,
        keys: tuple[jax.Array, jax.Array],
        begins: Arrays,
        segments: Arrays | None,
        settings: Settings,
    ) -> tuple[Tables, dict[str, jax.Array]]:
        """The tables of blocks for one run of the keys, and that run with its segments."""
        own, theirs = begins
        size = q.shape[-2] // sight.runs
        here = slice(run * size, (run + 1) * size)
        marks = (own[:, None] + jnp.arange(size, dtype=jnp.int32)[None]).reshape(-1) - theirs[run]
        tables = tables_at(Rule(sight.is_causal, sight.window), marks[None], size, settings.blocks)
        arrays = {"k": keys[0][:, :, here], "v": keys[1][:, :, here]}
        if segments is not None:
            mine, others = segments[0], segments[1][:, here]
            arrays |= {"query_segments": mine, "key_segments": others}
            meet = jnp.any((mine.min(-1) <= others.max(-1)) & (mine.max(-1) >= others.min(-1))).astype(jnp.int32)
            tables = tuple(table._replace(block_mask=jnp.asarray(table.block_mask) * meet) for table in tables)
        forward, of_queries, of_keys = (table._replace(q_sequence=marks) for table in tables)
        return (forward, of_queries, of_keys), arrays


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
