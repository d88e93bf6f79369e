"""Training data: any row of a run, computed from (configuration, seed, step) alone.

    step ──► draws g₀ … g₁      the batch schedule: how many rows came before
         ──► (set, turn)         the mixture: which set each draw takes from, and its index among that set's draws
         ──► row of the set      epoch = turn ÷ rows; an order for each epoch (the shuffle)
         ──► tokens              documents laid into rows, read from the token store

Every arrow is computed from what the process knows from the beginning, so every process makes the same global batch, a
process may make only its rows of it, and a run that resumes at step n reads from step n on: nothing is replayed and no
state of the data is saved.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from levanter.data.config import BlockShuffleConfig
from levanter.data.errors import DataError
from levanter.data.mixture import Mixture
from levanter.data.rows import Rows, TrainRows, take_mixed
from levanter.data.shuffle import Blocks, Identity, Permutation, ShuffledWindows, permutation, subkey


@dataclass(frozen=True, kw_only=True)
class BatchSchedule:
    """The number of rows of each step.

    Attributes:
        starts: the first step of each stage, ascending from 0.
        sizes: the rows of each step of the stage.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, stages: Sequence[tuple[int, int]]) -> "BatchSchedule":
        """A schedule from (first step, rows)."""
        schedule = cls(starts=tuple(start for start, _ in stages), sizes=tuple(size for _, size in stages))
        assert schedule.starts[0] == 0 and list(schedule.starts) == sorted(set(schedule.starts)), stages
        assert min(schedule.sizes) >= 1, stages
        return schedule

    def rows(self, step: int) -> int:
        """The rows of a step."""
        return self.sizes[self._stage(step)]

    def first_draw(self, step: int) -> int:
        """Rows of all steps before."""
        i = self._stage(step)
        return self._before[i] + (step - self.starts[i]) * self.sizes[i]

    def whole_steps(self, draws: int) -> int:
        """The number of whole steps that `draws` rows suffice for."""
        # The last stage that begins at or before this draw.
        i = max(i for i, before in enumerate(self._before) if before <= draws)
        return self.starts[i] + (draws - self._before[i]) // self.sizes[i]

    def _stage(self, step: int) -> int:
        assert step >= 0, step
        return max(i for i, start in enumerate(self.starts) if start <= step)

    @cached_property
    def _before(self) -> tuple[int, ...]:
        before = [0]
        for i in range(1, len(self.starts)):
            before.append(before[-1] + (self.starts[i] - self.starts[i - 1]) * self.sizes[i - 1])
        return tuple(before)


@dataclass(frozen=True, kw_only=True, eq=False)
class SetRows:
    """The rows of one set in the order in which training reads them, epoch after epoch.

    Attributes:
        name: the set.
        rows: all of its rows.
        used: how many of them training reads; they come first in `split`.
        held_out: how many of them are held out for validation; they come last in `split`.
        split: the order in which rows are divided into used and held out.
        shuffle: the configuration's key.
        kind: of permutation, for `shuffle: true`.
        key: the key from which its orders are derived.
    """

    name: str
    rows: Rows
    used: int
    held_out: int
    split: Permutation
    shuffle: bool | int | BlockShuffleConfig
    kind: str | None
    key: int

    def numbers(self, turns: np.ndarray) -> np.ndarray:
        """The row of each turn."""
        # A set with `used` rows is read in epochs, each in an order of its own.
        epochs, positions = np.divmod(np.asarray(turns, np.int64), self.used)
        items = np.empty_like(positions)
        for epoch in np.unique(epochs):
            mask = epochs == epoch
            items[mask] = self._order(int(epoch))(positions[mask])
        # `items` are positions in the divided set (used rows first); `split` maps them to rows.
        return self.split(items)

    def held_out_rows(self, start: int, stop: int) -> TrainRows:
        """Rows `start` to `stop` of those held out."""
        assert 0 <= start <= stop <= self.held_out, (start, stop, self.held_out)
        # The last `held_out` positions of the division.
        return self.rows.take(self.split(np.arange(start, stop) + len(self.rows) - self.held_out))

    @cached_property
    def _order(self) -> Callable[[int], Permutation]:
        # Setting up an order may take a search (`Blocks`), so the orders of recent epochs are cached.
        return lru_cache(maxsize=4)(self._make_order)

    def _make_order(self, epoch: int) -> Permutation:
        key = subkey(self.key, "epoch", epoch)
        shuffle = self.shuffle
        if isinstance(shuffle, BlockShuffleConfig):
            return Blocks(self.used, key, shuffle.io_block_size, shuffle.window_blocks, shuffle.perm_type)
        if not shuffle:
            return Identity(self.used)
        if shuffle is True:
            return permutation(self.kind, self.used, key)
        return ShuffledWindows(self.used, key, shuffle, self.kind)


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingData:
    """The data of a training run. Immutable; every process holds the same description.

    Attributes:
        positions: tokens in a row.
        sets: the sets that are drawn from.
        mixture: how they are mixed.
        schedule: rows of each step.
        ignored: the id that is never predicted (`data.ignore_token_id`); None where no id is.
        draws: the rows before the data ends, by the stop strategy; None if it never ends.
        described: lines that describe the sets.
        notes: notes for the user about the configuration.
        samples: a conversation of each set that has them, with the counted tokens marked.
    """

    positions: int
    sets: tuple[SetRows, ...]
    mixture: Mixture
    schedule: BatchSchedule
    ignored: int | None
    draws: int | None
    described: tuple[str, ...]
    notes: tuple[str, ...]
    samples: tuple[str, ...] = ()

    @property
    def steps(self) -> int | None:
        """The number of whole steps until the data ends; None if it repeats."""
        return None if self.draws is None else self.schedule.whole_steps(self.draws)

    def steps_of_epochs(self, epochs: int) -> int:
        """Whole steps until every set has been read `epochs` times."""
        # Counting every set `epochs` times as long turns "each set read `epochs` times" into "each set read once".
        draws = self.mixture.end([set_rows.used * epochs for set_rows in self.sets], "all_exhausted")
        if draws is None:
            raise DataError(
                "the last weights exclude a set that was not finished before; it never completes its last epoch"
            )
        return max(self.schedule.whole_steps(draws), 1)

    def rows(self, step: int, start: int = 0, stop: int | None = None) -> TrainRows:
        """Rows `start` to `stop` of the global batch of a step; all of them by default.

        Raises:
            DataError: a token store was damaged since it was opened.
            IndexError: the data ends before this step.
        """
        size = self.schedule.rows(step)
        stop = size if stop is None else stop
        assert 0 <= start <= stop <= size, (start, stop, size)
        first = self.schedule.first_draw(step)
        if self.draws is not None and first + size > self.draws:
            raise IndexError(f"step {step} needs rows up to {first + size:,}, the data ends after {self.draws:,}")
        which, turns = self.mixture.at(np.arange(first + start, first + stop))
        numbers = np.empty_like(turns)
        for i in np.unique(which):
            mask = which == i
            numbers[mask] = self.sets[i].numbers(turns[mask])
        batch = take_mixed([set_rows.rows for set_rows in self.sets], which, numbers)
        if self.ignored is not None:
            # The prediction of the ignored id counts nowhere; its weight is at the position before it.
            batch.loss_weights[:, :-1] *= batch.tokens[:, 1:] != self.ignored
        return batch

    def sources(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The set of each row of a step, and which row of the set it is."""
        first = self.schedule.first_draw(step)
        which, turns = self.mixture.at(np.arange(first, first + self.schedule.rows(step)))
        numbers = [int(self.sets[i].numbers(turn[None])[0]) for i, turn in zip(which, turns, strict=True)]
        return which, np.array(numbers, np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 of everything that decides which rows come when, batch sizes aside.

        A run that resumes compares it with the one in its checkpoint.
        """
        # The texts of `describe` and the reprs of permutations are part of the digest: rewording one of them would
        # refuse to resume every earlier run.
        facts = [
            self.positions,
            [
                (set_rows.name, len(set_rows.rows), set_rows.rows.describe(), set_rows.used, set_rows.held_out)
                for set_rows in self.sets
            ],
            [(set_rows.split, set_rows.shuffle, set_rows.kind, set_rows.key) for set_rows in self.sets],
            [(stage.start, stage.block, stage.key, stage.shares.tolist()) for stage in self.mixture.stages],
            [line.partition("; token store")[0] for line in self.described],
        ]
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def describe(self, steps: int | None = None) -> list[str]:
        """Lines for the user: each set with its tokens and rows, its share of the run, and its epochs.

        Args:
            steps: the run's steps; without them, shares and epochs are omitted.
        """
        lines = list(self.described)
        if steps is not None:
            draws = self.schedule.first_draw(steps)
            turns = self.mixture.turns_before(draws)
            for set_rows, count in zip(self.sets, turns, strict=True):
                lines.append(
                    f"{set_rows.name}: {count:,} of {draws:,} rows ({count / max(draws, 1):.2%}), "
                    f"{count / set_rows.used:.2f} epochs"
                )
        if self.steps is not None:
            lines.append(f"the data ends after {self.steps:,} steps")
        return lines

    def report(self, steps: int) -> list[str]:
        """Everything that is logged when a run begins: `describe`, the notes, and the samples."""
        return [*self.describe(steps), *self.notes, *self.samples]
