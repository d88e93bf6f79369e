"""Block tables and mask functions of the splash kernel.

The kernel takes a table of the blocks to visit, and a mask function of a number per query (its *mark*) and the key
indices. Where positions are indices, the mark is the query's position and the table holds exactly the blocks with a
visible entry: NumPy arrays, computed once outside of any trace. Where positions are arrays, marks and tables are
computed on the device (`query_marks`, `tables_at`): a block is visited if, by its smallest and largest mark, some row
may see some of its keys.
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

from levanter.layers.attention.splash_blocks import MAX_MARKED_KEYS, SplashBlocks

Numbers = np.ndarray | jax.Array
Tables = tuple[pallas_info.MaskInfo, pallas_info.MaskInfo, pallas_info.MaskInfo]
"""Block tables of the forward kernel, the dq kernel and the dkv kernel."""


@dataclass(frozen=True)
class Rule:
    """A mask by the distance of query and key positions, for NumPy and JAX arrays; a mark is a position."""

    is_causal: bool
    window: int | None

    def __call__(self, queries: Numbers, keys: Numbers | int) -> Numbers:
        distance = queries - keys
        if self.window is None:
            # `distance == distance` is True everywhere, in the shape of the inputs, for NumPy and JAX arrays alike.
            return distance >= 0 if self.is_causal else distance == distance
        near = distance < self.window
        return near & (distance >= 0) if self.is_causal else near

    @property
    def compares(self) -> bool:
        """Whether the rule masks anything."""
        return self.is_causal or self.window is not None

    def may_show(self, smallest: Numbers, largest: Numbers, first: Numbers, last: Numbers) -> Numbers:
        """Whether queries with marks from `smallest` to `largest` may see one of the keys from `first` to `last`."""
        # Causality: the query with the largest mark sees furthest ahead. Window: the one with the smallest mark sees
        # furthest back. Exact for consecutive positions; for others a block without a visible entry may be visited.
        reached = largest >= first if self.is_causal else largest == largest
        return reached if self.window is None else reached & (smallest - last < self.window)


@dataclass(frozen=True)
class LimitRule:
    """A mask by a range of key indices: the low 16 bits of a mark are its start, the high 16 bits its end."""

    def __call__(self, marks: jax.Array, keys: jax.Array) -> jax.Array:
        return (keys >= self.first(marks)) & (keys < self.stop(marks))

    @staticmethod
    def first(marks: jax.Array) -> jax.Array:
        """The index of the first visible key."""
        return marks & MAX_MARKED_KEYS

    @staticmethod
    def stop(marks: jax.Array) -> jax.Array:
        """The index after the last visible key."""
        # A logical shift: an arithmetic one would extend the sign bit of ends above 32,767.
        return jax.lax.shift_right_logical(marks, jnp.full_like(marks, 16))

    @staticmethod
    def of(first: jax.Array, stop: jax.Array) -> jax.Array:
        """Packs two limits into int32 marks."""
        # An end above 32,767 sets the sign bit of the mark; `stop` undoes that.
        return jnp.left_shift(stop.astype(jnp.int32), 16) | first.astype(jnp.int32)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The parameters of a kernel that do not depend on the mask.

    Attributes:
        blocks: block sizes.
        soft_cap: bound of the scores; None for none.
        interpret: emulate the kernel.
        fused: whether one kernel computes all gradients: it computes the scores once instead of twice, but writes one
            partial query gradient per block of keys.
    """

    blocks: SplashBlocks
    soft_cap: float | None = None
    interpret: bool = False
    fused: bool = False

    @property
    def sizes(self) -> pallas.BlockSizes:
        """The block sizes as the kernel takes them."""
        blocks = self.blocks
        return pallas.BlockSizes(
            block_q=blocks.block,
            block_kv=blocks.block,
            block_kv_compute=blocks.compute,
            block_q_dkv=blocks.block,
            block_kv_dkv=blocks.block,
            block_kv_dkv_compute=blocks.compute,
            # The fused backward kernel returns the query gradients as well, so there is no dq kernel to give blocks to.
            block_q_dq=None if self.fused else blocks.dq,
            block_kv_dq=None if self.fused else blocks.dq,
            use_fused_bwd_kernel=self.fused,
        )

    def kernel(
        self, tables: Tables, function: Callable[..., object] | None, *, residuals: bool = False
    ) -> pallas.SplashAttentionKernel:
        """The kernel with its block tables.

        Args:
            tables: of the forward, dq and dkv kernels.
            function: mask function of marks and key indices.
            residuals: whether it returns the log-sum-exp as well; it is then not differentiable.
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
            else "attention",  # name in `AttentionSpec.saved`, for the output and the log-sum-exp
            mask_function=function,
            interpret=self.interpret,
        )


class RuleMask(Mask):
    """A rule as a mask of the kernel: indexing with a block returns one entry per distance in it.

    The kernel only tests whether any and whether all entries of a block are set. Its own masks materialize every entry,
    which takes ten seconds for 64k positions.
    """

    def __init__(self, rule: Rule, queries: int, keys: int, offset: int = 0):
        self.rule = rule
        self.queries, self.keys, self.offset = queries, keys, offset
        if rule.compares:
            # With these attributes the kernel computes the mask instead of reading it.
            self.q_sequence = np.arange(offset, offset + queries, dtype=np.int32)
            self.mask_function = rule

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of queries and keys."""
        return (self.queries, self.keys)

    def __getitem__(self, block: tuple[slice, slice]) -> np.ndarray:
        queries, keys = block
        # A rule depends on the distance only, so an array over all distances of the block has the same any() and all().
        smallest = self.offset + queries.start - (keys.stop - 1)
        largest = self.offset + queries.stop - 1 - keys.start
        return np.asarray(self.rule(np.arange(smallest, largest + 1), 0))

    def _identity(self) -> tuple[Rule, int, int, int]:
        return self.rule, self.queries, self.keys, self.offset

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RuleMask) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())


def every_shard_sees_a_key(rule: Rule, *, queries: int, keys: int, offset: int, num_shards: int) -> bool:
    """Whether each shard of the queries sees a key; the kernel's static tables do not support a shard without any."""
    size = queries // num_shards
    # The position of the first query of each shard; keys have the positions from 0 to `keys` − 1.
    firsts = offset + np.arange(num_shards) * size
    return bool(np.all(rule.may_show(firsts, firsts + size - 1, np.asarray(0), np.asarray(keys - 1))))


@functools.lru_cache(maxsize=64)
def static_kernel(
    rule: Rule, *, queries: int, keys: int, offset: int, num_shards: int, settings: Settings
) -> pallas.SplashAttentionKernel:
    """The kernel where positions are indices, with NumPy tables; cached, and built outside of any trace.

    The mask of one head serves all heads.

    Args:
        rule: the mask.
        queries: number of queries, in whole blocks.
        keys: number of keys, in whole blocks.
        offset: the position of the first query.
        num_shards: shards of the queries.
        settings: parameters that do not depend on the mask.
    """
    mask, blocks = MultiHeadMask([RuleMask(rule, queries, keys, offset)]), settings.blocks
    shape = (blocks.block, blocks.block)
    # `process_mask` lists the key blocks that each query block visits; `process_mask_dkv` the query blocks that each
    # key block visits. The mask function is that of the rule in all three.
    forward, function = pallas_info.process_mask(mask, shape, q_seq_shards=num_shards)
    of_queries, _ = pallas_info.process_mask(mask, (blocks.dq, blocks.dq), q_seq_shards=num_shards)
    of_keys, _ = pallas_info.process_mask_dkv(mask, shape, q_seq_shards=num_shards)
    return settings.kernel((forward, of_queries, of_keys), function)


def rule_by_marks(rule: Rule, *, reordered: bool) -> Rule | LimitRule:
    """The rule that reads the marks of `query_marks` and key indices.

    Args:
        rule: the rule by positions.
        reordered: whether keys have explicit positions and are sorted by them.
    """
    if not reordered:
        return rule
    # A mark is the index of the last visible key: causality over indices in sorted order.
    if rule.window is None:
        return Rule(is_causal=True, window=None)
    # A window without causality: a mark is the index of the first visible key, and `mark − key < 1` shows all keys from
    # there on.
    return LimitRule() if rule.is_causal else Rule(is_causal=False, window=1)


def query_marks(rule: Rule, queries: jax.Array, keys: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """The marks of the queries of one row where positions are arrays; see `rule_by_marks`.

    Args:
        rule: the mask.
        queries: positions, `[position]`; relative to that of key 0 if `keys` is None.
        keys: positions in any order, `[key_position]`; None if consecutive.

    Returns:
        The marks, and the permutation that sorts the keys by position; None if the keys keep their order.
    """
    if keys is None:
        return queries, None
    # A permutation of keys and values leaves attention unchanged, and sorting makes the visible keys a range.
    order = jnp.argsort(keys)
    ordered = keys[order]
    # In sorted order, a query sees keys [first, stop): `stop` keys have positions up to the query's (causality), and
    # `first` keys are at least `window` positions before it.
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
    """The block tables for queries with these marks, as `Settings.kernel` takes them but without the marks.

    Args:
        rule: the rule by marks and key indices.
        marks: `[rows, position]`, in whole blocks; all rows share the tables.
        keys: number of keys, in whole blocks.
        blocks: block sizes.
        segments: of queries and keys, `[rows, …]`; blocks without a common segment are not visited.
    """

    def meet(size: int) -> jax.Array:
        """`[rows, query blocks, key blocks]`: whether the ranges of their segment ids overlap."""
        assert segments is not None
        # `[rows, blocks, size]`; the minimum and maximum of a block bound its ids.
        query_segments, key_segments = (ids.reshape(ids.shape[0], -1, size) for ids in segments)
        lowest, highest = query_segments.min(-1)[..., None], query_segments.max(-1)[..., None]
        # The ranges may overlap without a common id. The block is then visited in vain: the kernel compares the ids
        # themselves.
        return (lowest <= key_segments.max(-1)[:, None]) & (highest >= key_segments.min(-1)[:, None])

    def visited(size: int) -> jax.Array:
        """`[1, query blocks, key blocks]`: 1 where some row may see some key of the block."""
        of_blocks = marks.reshape(marks.shape[0], -1, size)
        first = jnp.arange(0, keys, size, dtype=jnp.int32)[None, None]
        last = first + (size - 1)
        if isinstance(rule, LimitRule):
            # The union of the ranges of a block's queries.
            begin, stop = rule.first(of_blocks).min(-1), rule.stop(of_blocks).max(-1)
            seen = (begin[..., None] <= last) & (stop[..., None] > first)
        else:
            smallest, largest = of_blocks.min(-1)[..., None], of_blocks.max(-1)[..., None]
            seen = rule.may_show(smallest, largest, first, last)
        if segments is not None:
            # Per row, before `any` combines the rows: a block needs one row that admits it by both rules.
            seen = seen & meet(size)
        return jnp.any(seen, axis=0)[None].astype(jnp.int32)

    def table(size: int, axis: int) -> pallas_info.MaskInfo:
        # A visited block counts as partly masked (1): these bounds cannot prove that a block needs no mask (2).
        # The index of the block to load; skipped blocks load block 0 again.
        seen = visited(size)
        index = jax.lax.broadcasted_iota(jnp.int32, seen.shape, axis)
        return pallas_info.MaskInfo(seen * index, None, seen, None, None, is_dynamic_mask=True)

    # The forward and dq kernels load key blocks (axis 2) for a query block, the dkv kernel query blocks (axis 1) for a
    # key block.
    return table(blocks.block, 2), table(blocks.dq, 2), table(blocks.block, 1)
