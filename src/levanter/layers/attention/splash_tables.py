"""Which blocks of queries × keys the splash kernel visits, and how it hides entries inside of them.

The kernel has a table of blocks, and a function of a number of each query (its *mark*) and of the indices of the keys.
Where positions are indices, a mark is the query's position, and the table holds exactly the blocks that show something:
NumPy arrays, made once and outside of any trace. Where positions are arrays, marks and tables are computed from them
on the device (`marks_of`, `tables_at`): of every block it is asked whether some row may see some of it, by the smallest
and the largest mark.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as pallas
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as pallas_info
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import Mask, MultiHeadMask

Numbers = np.ndarray | jax.Array
Tables = tuple[pallas_info.MaskInfo, pallas_info.MaskInfo, pallas_info.MaskInfo]
"""Of the forward pass, of the gradient of the queries, of that of keys and values."""

MOST_MARKED_KEYS = (1 << 16) - 1
"""Keys that two limits in one 32-bit mark can tell apart; see `LimitRule`."""


@dataclass(frozen=True, kw_only=True)
class SplashBlocks:
    """How a sequence is cut for the kernel.

    Attributes:
        block: queries, and keys, in a block.
        compute: keys of it whose scores exist at a time.
        dq: queries, and keys, in a block of the kernel for the queries' gradient, which takes all its keys at once.
        padded: positions of a part, in whole blocks.
    """

    block: int
    compute: int
    dq: int
    padded: int


@dataclass(frozen=True)
class Rule:
    """A mask by the distance from a key to the query that looks at it, on arrays of any kind; a mark is a position."""

    is_causal: bool
    window: int | None

    def __call__(self, queries: Numbers, keys: Numbers | int) -> Numbers:
        distance = queries - keys
        if self.window is None:
            return distance >= 0 if self.is_causal else distance == distance
        near = distance < self.window
        return near & (distance >= 0) if self.is_causal else near

    @property
    def compares(self) -> bool:
        """Whether it hides anything."""
        return self.is_causal or self.window is not None

    def may_show(self, smallest: Numbers, largest: Numbers, first: Numbers, last: Numbers) -> Numbers:
        """Whether queries with marks from `smallest` to `largest` may see one of the keys from `first` to `last`."""
        reached = largest >= first if self.is_causal else largest == largest
        return reached if self.window is None else reached & (smallest - last < self.window)


@dataclass(frozen=True)
class LimitRule:
    """A mask by two limits: the first key that a query sees, and how many keys are not behind it, as the low and the
    high 16 bits of its mark."""

    def __call__(self, marks: jax.Array, keys: jax.Array) -> jax.Array:
        return (keys >= self.first(marks)) & (keys < self.stop(marks))

    @staticmethod
    def first(marks: jax.Array) -> jax.Array:
        """The first visible key."""
        return marks & MOST_MARKED_KEYS

    @staticmethod
    def stop(marks: jax.Array) -> jax.Array:
        """The key behind the last visible one."""
        return jax.lax.shift_right_logical(marks, jnp.full_like(marks, 16))

    @staticmethod
    def of(first: jax.Array, stop: jax.Array) -> jax.Array:
        """The marks of two limits, int32."""
        return jnp.left_shift(stop.astype(jnp.int32), 16) | first.astype(jnp.int32)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What of a kernel depends on no mask.

    Attributes:
        blocks: how sequences are cut.
        soft_cap: bound of the scores; None for none.
        interpret: emulate the kernel.
        fused: whether one kernel makes all gradients, which computes the scores once and not twice, and the gradient of
            the queries in as many pieces as keys have blocks.
    """

    blocks: SplashBlocks
    soft_cap: float | None = None
    interpret: bool = False
    fused: bool = False

    @property
    def sizes(self) -> pallas.BlockSizes:
        """The blocks, as the kernel takes them."""
        blocks = self.blocks
        return pallas.BlockSizes(
            block_q=blocks.block,
            block_kv=blocks.block,
            block_kv_compute=blocks.compute,
            block_q_dkv=blocks.block,
            block_kv_dkv=blocks.block,
            block_kv_dkv_compute=blocks.compute,
            block_q_dq=None if self.fused else blocks.dq,
            block_kv_dq=None if self.fused else blocks.dq,
            use_fused_bwd_kernel=self.fused,
        )

    def kernel(
        self, tables: Tables, function: Callable[..., object] | None, *, residuals: bool = False
    ) -> pallas.SplashAttentionKernel:
        """The kernel with its tables: of the forward pass, of the gradient of the queries, of keys and values.

        Args:
            tables: of blocks.
            function: of marks and indices of keys: what is visible.
            residuals: whether it returns the log-sum-exp too, and cannot be differentiated.
        """
        return pallas.SplashAttentionKernel(
            *tables,
            block_sizes=self.sizes,
            is_mqa=False,
            save_residuals=residuals,
            mask_value=pallas.DEFAULT_MASK_VALUE,
            attn_logits_soft_cap=self.soft_cap,
            residual_checkpoint_name=None
            if residuals
            else "attention",  # of `AttentionSpec.saved`: its output, and its log-sum-exp
            mask_function=function,
            interpret=self.interpret,
        )


class RuleMask(Mask):
    """A rule as the kernel's mask: asked for a block, it gives one entry for each distance in it.

    The kernel's own masks give every entry, of which only whether any and whether all are set is of interest; for 64k
    positions that takes ten seconds.
    """

    def __init__(self, rule: Rule, queries: int, keys: int, offset: int = 0):
        self.rule = rule
        self.queries, self.keys, self.offset = queries, keys, offset
        if rule.compares:
            # Their presence is what tells the kernel to compute the mask and not to read it.
            self.q_sequence = np.arange(offset, offset + queries, dtype=np.int32)
            self.mask_function = rule

    @property
    def shape(self) -> tuple[int, int]:
        """How many queries and keys."""
        return (self.queries, self.keys)

    def __getitem__(self, block: tuple[slice, slice]) -> np.ndarray:
        queries, keys = block
        smallest = self.offset + queries.start - (keys.stop - 1)
        largest = self.offset + queries.stop - 1 - keys.start
        return np.asarray(self.rule(np.arange(smallest, largest + 1), 0))

    def _identity(self) -> tuple[Rule, int, int, int]:
        return self.rule, self.queries, self.keys, self.offset

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RuleMask) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())


def every_part_sees(rule: Rule, *, queries: int, keys: int, offset: int, parts: int) -> bool:
    """Whether each part of the queries sees a key: the kernel's own tables know no part that sees none."""
    size = queries // parts
    firsts = offset + np.arange(parts) * size
    return bool(np.all(rule.may_show(firsts, firsts + size - 1, np.asarray(0), np.asarray(keys - 1))))


@functools.lru_cache(maxsize=64)
def static_kernel(
    rule: Rule, *, queries: int, keys: int, offset: int, parts: int, settings: Settings
) -> pallas.SplashAttentionKernel:
    """The kernel where positions are indices, with its tables as NumPy arrays: made once, and outside of any trace.

    One head's mask serves all heads.

    Args:
        rule: the mask.
        queries: in whole blocks.
        keys: in whole blocks.
        offset: the position of the first query.
        parts: what the queries are cut in.
        settings: what depends on no mask.
    """
    mask, blocks = MultiHeadMask([RuleMask(rule, queries, keys, offset)]), settings.blocks
    shape = (blocks.block, blocks.block)
    forward, function = pallas_info.process_mask(mask, shape, q_seq_shards=parts)
    of_queries, _ = pallas_info.process_mask(mask, (blocks.dq, blocks.dq), q_seq_shards=parts)
    of_keys, _ = pallas_info.process_mask_dkv(mask, shape, q_seq_shards=parts)
    return settings.kernel((forward, of_queries, of_keys), function)


def rule_by_marks(rule: Rule, *, reordered: bool) -> Rule | LimitRule:
    """The rule by the marks of `marks_of` and by indices of keys.

    Args:
        rule: by positions.
        reordered: whether the keys' positions are an array, by which they are laid out.
    """
    if not reordered:
        return rule
    if rule.window is None:
        return Rule(is_causal=True, window=None)
    return LimitRule() if rule.is_causal else Rule(is_causal=False, window=1)


def marks_of(rule: Rule, queries: jax.Array, keys: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """The marks of one row's queries where positions are arrays; see `rule_by_marks`.

    Args:
        rule: the mask.
        queries: positions relative to that of the key with index 0, `[position]`; absolute where `keys` are given.
        keys: positions in any order, `[key_position]`; None where they are consecutive.

    Returns:
        The marks, and the order in which the keys are to be laid out, by position; None where they stay as they are.
    """
    if keys is None:
        return queries, None
    order = jnp.argsort(keys)
    ordered = keys[order]
    # By index, causality is how many keys are not behind the query, and a window how many are too far before it.
    stop = jnp.searchsorted(ordered, queries, side="right").astype(jnp.int32)
    if rule.window is None:
        return stop - 1, order
    first = jnp.searchsorted(ordered, queries - rule.window, side="right").astype(jnp.int32)
    return (LimitRule.of(first, stop) if rule.is_causal else first), order


def tables_at(
    rule: Rule | LimitRule,
    marks: jax.Array,
    keys: int,
    blocks: SplashBlocks,
    *,
    segments: tuple[jax.Array, jax.Array] | None = None,
) -> Tables:
    """The tables of blocks for queries with these marks: as `Settings.kernel` takes them, without the marks.

    Args:
        rule: by marks and by indices of keys.
        marks: `[rows, position]`, in whole blocks; the rows share the tables.
        keys: in whole blocks.
        blocks: how both are cut.
        segments: of queries and keys, `[rows, …]`; blocks that have none in common are not visited.
    """

    def meet(size: int) -> jax.Array:
        """`[rows, blocks of queries, blocks of keys]`: whether the ranges of their segments overlap."""
        assert segments is not None
        own, theirs = (ids.reshape(ids.shape[0], -1, size) for ids in segments)
        lowest, highest = own.min(-1)[..., None], own.max(-1)[..., None]
        return (lowest <= theirs.max(-1)[:, None]) & (highest >= theirs.min(-1)[:, None])

    def visited(size: int) -> jax.Array:
        """`[1, blocks of queries, blocks of keys]`: 1 where some row may see something."""
        of_blocks = marks.reshape(marks.shape[0], -1, size)
        first = jnp.arange(0, keys, size, dtype=jnp.int32)[None, None]
        last = first + (size - 1)
        if isinstance(rule, LimitRule):
            begin, stop = rule.first(of_blocks).min(-1), rule.stop(of_blocks).max(-1)
            seen = (begin[..., None] <= last) & (stop[..., None] > first)
        else:
            smallest, largest = of_blocks.min(-1)[..., None], of_blocks.max(-1)[..., None]
            seen = rule.may_show(smallest, largest, first, last)
        if segments is not None:
            seen = seen & meet(size)
        return jnp.any(seen, axis=0)[None].astype(jnp.int32)

    def table(size: int, axis: int) -> pallas_info.MaskInfo:
        # What is read for a block that is not visited is the first one, again.
        seen = visited(size)
        index = jax.lax.broadcasted_iota(jnp.int32, seen.shape, axis)
        return pallas_info.MaskInfo(seen * index, None, seen, None, None, is_dynamic_mask=True)

    return table(blocks.block, 2), table(blocks.dq, 2), table(blocks.block, 1)
