"""Mixtures: computes which set each row of a run comes from.

Training *draws* rows one after the other; draw `g` is a place in the whole run, over all steps. `Mixture.at(g)` answers
which set it comes from, and which *turn* of the set it is: its 0th, 1st, … row in this run. Both are computed from `g`
alone.

Draws come in *blocks* of `mixture_block_size`. Weights become whole numbers over a *period* of `PERIOD` blocks (largest
remainders, so they add up), and every block of the period gets `⌊share⌋` or `⌈share⌉` rows of a set: in any stretch of
a run, the number of rows of a set differs from its weight by less than a block's rounding, not by luck. Within a block
the order is random and keyed by the block's number. So the turns of a set before a block are a table look-up and a
multiplication, and the rest is a count within one block.

*Stages* change the weights at a step; each begins a new block. *Stop strategies* define when the data ends: never
(`restart`: sets begin again, in another order), when the first set that is drawn from ends (`first_exhausted`), or when
each has been read once (`all_exhausted`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np

from levanter.data.shuffle import Feistel, subkey

PERIOD = 1024
"""The number of blocks over which weights are exact."""

StopRule = Literal["restart", "first_exhausted", "all_exhausted"]


@dataclass(frozen=True, kw_only=True, eq=False)
class MixtureStage:
    """Constant weights from one draw on.

    Attributes:
        start: the first draw.
        shares: int64 `[sets]`, rows of each set in a period; they add up to `PERIOD × block`.
        block: draws in a block.
        key: the key from which the order within blocks is derived.
    """

    start: int
    shares: np.ndarray
    block: int
    key: int

    @cached_property
    def _counts(self) -> np.ndarray:
        """int64 `[PERIOD, sets]`: rows of each set in each block of a period."""
        # Every block gets the whole part of its share; `rest` counts the blocks of a period that get one row more.
        whole, remainders = np.divmod(self.shares, PERIOD)
        counts = np.tile(whole, (PERIOD, 1))
        # The ones left over, set by set, dealt round the blocks like cards: no set gets two in one block (each has
        # fewer than PERIOD), and every block gets equally many.
        sets = np.repeat(np.arange(len(remainders)), remainders)
        # A keyed order of the blocks, so that the extra rows of a set are spread over the period.
        order = Feistel(PERIOD, subkey(self.key, "rest"))(np.arange(PERIOD))
        counts[order[np.arange(len(sets)) % PERIOD], sets] += 1
        assert (counts.sum(axis=1) == self.block).all()
        return counts

    @cached_property
    def _before(self) -> np.ndarray:
        """int64 `[PERIOD + 1, sets]`: rows of each set in the blocks before."""
        return np.concatenate([np.zeros((1, len(self.shares)), np.int64), np.cumsum(self._counts, axis=0)])

    def turns_before_block(self, number: int) -> np.ndarray:
        """int64 `[sets]`: how often each set is drawn in the stage before block `number`."""
        # Whole periods have exactly `shares` rows of each set, so only the begun period is looked up.
        periods, index = divmod(number, PERIOD)
        return periods * self.shares + self._before[index]

    def block_sets(self, number: int) -> np.ndarray:
        """int32 `[block]`: the set of each draw of block `number`."""
        # The block's rows sorted by set, then permuted with the block's own key: any block is computed without the
        # others.
        sets = np.repeat(np.arange(len(self.shares), dtype=np.int32), self._counts[number % PERIOD])
        return sets[Feistel(self.block, subkey(self.key, "block", number))(np.arange(self.block))]

    def turns_before(self, draws: int) -> np.ndarray:
        """int64 `[sets]`: how often each set is drawn in the stage's first `draws` draws."""
        # Complete blocks by the table, the begun block by counting its first draws.
        number, remainder = divmod(draws, self.block)
        turns = self.turns_before_block(number)
        if remainder:
            turns = turns + np.bincount(self.block_sets(number)[:remainder], minlength=len(self.shares))
        return turns


@dataclass(frozen=True, kw_only=True, eq=False)
class Mixture:
    """A weighted mixture of sets, in stages.

    Attributes:
        names: the sets.
        stages: by first draw, ascending from 0.
    """

    names: tuple[str, ...]
    stages: tuple[MixtureStage, ...]

    @cached_property
    def _stage_turns(self) -> np.ndarray:
        """int64 `[stages, sets]`: the turns of each set before each stage."""
        before = np.zeros((len(self.stages), len(self.names)), np.int64)
        for i in range(1, len(self.stages)):
            length = self.stages[i].start - self.stages[i - 1].start
            before[i] = before[i - 1] + self.stages[i - 1].turns_before(length)
        return before

    def _stage_index(self, draw: int) -> int:
        return max(i for i, stage in enumerate(self.stages) if stage.start <= draw)

    def at(self, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The set of each draw (int32), and its turn within the set (int64).

        Args:
            draws: int64, of any order.
        """
        draws = np.asarray(draws, np.int64)
        sets = np.empty(draws.shape, np.int32)
        turns = np.empty(draws.shape, np.int64)
        starts = np.array([stage.start for stage in self.stages], np.int64)
        stage_numbers = np.searchsorted(starts, draws, side="right") - 1
        # Draws of a batch are consecutive, so they lie in one or two blocks, which are computed once.
        for i in np.unique(stage_numbers):
            stage = self.stages[i]
            indices = np.flatnonzero(stage_numbers == i)
            blocks, offsets = np.divmod(draws[indices] - stage.start, stage.block)
            for number in np.unique(blocks):
                chosen = blocks == number
                block_sets, block_turns = self._block(int(i), int(number))
                sets[indices[chosen]] = block_sets[offsets[chosen]]
                turns[indices[chosen]] = block_turns[offsets[chosen]]
        return sets, turns

    def turns_before(self, draw: int) -> np.ndarray:
        """int64 `[sets]`: how often each set is drawn before `draw`."""
        i = self._stage_index(draw)
        return self._stage_turns[i] + self.stages[i].turns_before(draw - self.stages[i].start)

    @cached_property
    def _block(self):
        """`(stage, block) → sets, turns` of its draws; the last few are cached."""

        # Large enough for one batch, which may span a few blocks; consecutive batches mostly share a block.
        @lru_cache(maxsize=8)
        def block(i: int, number: int) -> tuple[np.ndarray, np.ndarray]:
            sets = self.stages[i].block_sets(number)
            turns = np.empty(len(sets), np.int64)
            base = self._stage_turns[i] + self.stages[i].turns_before_block(number)
            for set_index in np.unique(sets):
                mask = sets == set_index
                # Draws of one set within the block are numbered in their order, after all draws of the set before the
                # block.
                turns[mask] = base[set_index] + np.arange(np.count_nonzero(mask))
            return sets, turns

        return block

    def end(self, sizes: Sequence[int], strategy: StopRule) -> int | None:
        """The number of draws until the data ends; None if it never does.

        Args:
            sizes: the rows of each set.
            strategy: see the module.
        """
        if strategy == "restart":
            return None
        # A set whose weight is always 0 never ends, and must not keep `all_exhausted` from ending.
        ends = [self._draw_behind(i, size) for i, size in enumerate(sizes) if self._is_drawn(i)]
        finite = [end for end in ends if end is not None]
        if strategy == "first_exhausted":
            return min(finite) if finite else None
        return max(finite) if len(finite) == len(ends) else None

    def _is_drawn(self, which: int) -> bool:
        return any(stage.shares[which] > 0 for stage in self.stages)

    def _draw_behind(self, which: int, turns: int) -> int | None:
        """The draw after the `turns`-th turn of a set; None if it never comes (its last stage has weight 0)."""
        high = 1
        last = self.stages[-1]
        # Weight 0 from the last stage on: the number of draws stays below `turns` forever, and the search would not
        # end.
        if last.shares[which] == 0 and self.turns_before(last.start)[which] < turns:
            return None
        # `turns_before` is monotonic: double an upper bound, then bisect.
        while self.turns_before(high)[which] < turns:
            high *= 2
        low = 0
        while low < high:
            middle = (low + high) // 2
            if self.turns_before(middle)[which] < turns:
                low = middle + 1
            else:
                high = middle
        return low


def round_weights(weights: Mapping[str, float], names: Sequence[str], *, block: int, where: str) -> np.ndarray:
    """Weights as whole numbers of rows in a period: the largest remainders are rounded up.

    Args:
        weights: any numbers of at least 0 with a positive sum; a set that is not named has weight 0.
        names: the sets.
        block: draws in a block.
        where: the key in the configuration, for messages.

    Raises:
        ValueError: no weight is positive, one is not finite, or one is too small to be drawn at all.
    """
    values = np.array([float(weights.get(name, 0.0)) for name in names])
    if not np.isfinite(values).all() or (values < 0).any():
        raise ValueError(f"{where}: weights must be finite and not negative, got {dict(weights)}")
    if values.sum() <= 0:
        raise ValueError(f"{where}: no weight is positive: {dict(weights)}")
    total = PERIOD * block
    exact = values / values.sum() * total
    # Largest-remainder method: floors first, then one more for the largest fractions until the sum is exact.
    shares = np.floor(exact).astype(np.int64)
    # A stable sort, so that equal remainders are rounded up in the order of the sets, on every machine.
    largest = np.argsort(-(exact - shares), kind="stable")
    shares[largest[: total - shares.sum()]] += 1
    undrawn = [name for name, weight, share in zip(names, values, shares, strict=True) if weight > 0 and share == 0]
    if undrawn:
        raise ValueError(
            f"{where}: the weight of {', '.join(undrawn)} is less than 1 row in {total:,} (mixture_block_size {block} "
            f"× {PERIOD} blocks) and would never be drawn; raise it, or mixture_block_size, or set it to 0"
        )
    return shares


def plan_mixture(
    stages: Sequence[tuple[int, Mapping[str, float]]], names: Sequence[str], *, block: int, seed: int
) -> Mixture:
    """A mixture from weights.

    Args:
        stages: (first draw, weights), ascending from draw 0.
        names: the sets.
        block: draws in a block (`mixture_block_size`).
        seed: of the order within blocks.

    Raises:
        ValueError: a weight that cannot be used (`round_weights`), a block without draws.
    """
    if block < 1:
        raise ValueError(f"data.mixture_block_size must be at least 1, got {block}")
    assert stages and stages[0][0] == 0, stages
    return Mixture(
        names=tuple(names),
        stages=tuple(
            MixtureStage(
                start=start,
                shares=round_weights(weights, names, block=block, where="data.train_weights"),
                block=block,
                key=subkey(seed, "mixture", number),
            )
            for number, (start, weights) in enumerate(stages)
        ),
    )
