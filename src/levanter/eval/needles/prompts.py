"""Questions of a wanted length: as much hay as a model's context takes, as tokens, with the places that are scored.

Everything follows from the seed: each process of a run makes the same questions, and so does a run that goes on with
what a killed one left. Lengths are counted in the model's tokens, the answer included.
"""

import hashlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from levanter.eval.needles.tasks import TASKS, NeedleText, Task

_TRIES = 12
"""Texts that are made for a question at most, until one is as long as may be."""
SLOTS = 128
"""Tokens of an answer that count, at most."""
Encode = Callable[[str], tuple[np.ndarray, np.ndarray]]
"""A text's ids, and the span of characters of each."""


class NeedleError(ValueError):
    """A question cannot be made; the message says which and why."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AskedNeedle:
    """A question as a model sees it.

    Attributes:
        task: its name.
        length: tokens that were wanted.
        number: which of its task and length.
        tokens: int32, what the model sees: everything but the last token.
        places: int32, the positions that predict what counts.
        targets: int32, the tokens that count.
        owners: int32, of which value each is.
        values: what is asked for.
        depths: where each lies, from 0 to 1; None where it is everywhere.
        asks: how the text ends, for people.
    """

    task: str
    length: int
    number: int
    tokens: np.ndarray
    places: np.ndarray
    targets: np.ndarray
    owners: np.ndarray
    values: tuple[str, ...]
    depths: tuple[float | None, ...]
    asks: str


@dataclass(frozen=True, kw_only=True)
class NeedleSpec:
    """What is asked.

    Attributes:
        tasks: their names.
        lengths: in tokens.
        samples: questions of each task and length.
        depths: how many depths they are spread over.
        seed: of the generator.
    """

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    samples: int
    depths: int
    seed: int

    def depth(self, number: int) -> float:
        """The depth of a question: all of them in turn, evenly chosen where there are fewer questions."""
        if self.depths == 1:
            return 0.5
        if self.samples >= self.depths:
            at = number % self.depths
        else:
            at = round(number * (self.depths - 1) / max(1, self.samples - 1)) if self.samples > 1 else self.depths // 2
        return at / (self.depths - 1)

    @property
    def count(self) -> int:
        """Questions of one length."""
        return len(self.tasks) * self.samples


def questions(
    plan: NeedleSpec, encode: Encode, *, bos: int | None, on_made: Callable[[int], None] = lambda _: None
) -> dict[int, list[AskedNeedle]]:
    """All questions, by length.

    Args:
        plan: what is asked.
        encode: the tokenizer.
        bos: what stands before a text; None for nothing.
        on_made: hears how many there are.

    Raises:
        NeedleError: lists the tasks that do not fit in a length.
    """
    found: dict[int, list[AskedNeedle]] = {}
    problems, made = [], 0
    for length in plan.lengths:
        of_task = []
        for name in plan.tasks:
            maker = _Maker(TASKS[name], length, plan, encode, bos)
            try:
                mine = []
                for number in range(plan.samples):
                    mine.append(maker.make(number))
                    made += 1
                    on_made(made)
                of_task.append(mine)
            except NeedleError as error:
                problems.append(str(error))
        # Whatever kills a run, of each task some questions have been asked by then.
        found[length] = [mine[n] for n in range(plan.samples) for mine in of_task]
    if problems:
        raise NeedleError("\n".join(problems))
    return found


class _Maker:
    """Makes the questions of a task and a length; knows how much hay the last one took."""

    def __init__(self, task: Task, length: int, plan: NeedleSpec, encode: Encode, bos: int | None):
        self.task, self.length, self.plan, self.encode, self.bos = task, length, plan, encode, bos
        self.units: int | None = None
        self.each = 1.0

    def make(self, number: int) -> AskedNeedle:
        """The question of a number, as long as may be."""
        least = self.task.least
        if self.units is None:
            few, more = least, least + 16
            short, longer = self._sized(number, few)[0], self._sized(number, more)[0]
            self.each = max((longer - short) / (more - few), 0.25)
            self.units = max(least, few + int((self.length - short) / self.each))
        # Between what fits and what does not, guessing by what the last unit of hay took.
        fits: tuple[int, NeedleText, np.ndarray, np.ndarray] | None = None
        units, beyond = self.units, None
        for _ in range(_TRIES):
            size, question, ids, offsets = self._sized(number, units)
            left = self.length - size
            if left < 0:
                if units <= least:
                    raise NeedleError(
                        f"{self.task.name}: its shortest text has {size:,} tokens, and {self.length:,} are wanted\n  → "
                        f"lengths: at least {size:,} for this task"
                    )
                beyond = units
            else:
                fits = units, question, ids, offsets
            if left >= 0 and (left < 2 * self.each or units + 1 == beyond):
                break
            lowest = least if fits is None else fits[0]
            if beyond is not None and fits is not None and fits[0] + 1 >= beyond:
                break
            units = max(lowest, units + (int(left / self.each) if left >= 0 else -max(1, round(-left / self.each))))
            if fits is not None:
                units = max(units, fits[0] + 1)
            if beyond is not None:
                units = min(units, beyond - 1)
        if fits is None:
            size, question, ids, offsets = self._sized(number, least)
            assert size <= self.length, f"{self.task.name}: {size} tokens for {self.length}"
            fits = least, question, ids, offsets
        units, question, ids, offsets = fits
        self.units = units
        return self._asked(number, question, ids, offsets)

    def _sized(self, number: int, units: int) -> tuple[int, NeedleText, np.ndarray, np.ndarray]:
        seed = [self.plan.seed, zlib.crc32(self.task.name.encode()), self.length, number]
        make = self.task.made_for(self.length)
        question = make(np.random.default_rng(seed), units, self.plan.depth(number))
        ids, offsets = self.encode(question.prompt + question.answer)
        return len(ids) + (self.bos is not None), question, ids, offsets

    def _asked(self, number: int, question: NeedleText, ids: np.ndarray, offsets: np.ndarray) -> AskedNeedle:
        begin = 0 if self.bos is None else 1
        whole = ids if self.bos is None else np.concatenate([np.asarray([self.bos]), ids])
        at, owners = [], []
        for owner, value in enumerate(question.hidden):
            first, last = (len(question.prompt) + each for each in (value.begin, value.end))
            mine = np.flatnonzero((offsets[:, 1] > first) & (offsets[:, 0] < last)) + begin
            new = [n for n in mine.tolist() if n not in at]
            at += new
            owners += [owner] * len(new)
            if not new:
                raise NeedleError(
                    f"{self.task.name}: {question.answer[value.begin : value.end]!r} has no token of its own in this "
                    "tokenizer"
                )
        if len(at) > SLOTS:
            raise NeedleError(f"{self.task.name}: an answer has {len(at)} tokens, and {SLOTS} at most can be scored")
        places = np.asarray(at, np.int32)
        if places[0] == 0:
            raise NeedleError(f"{self.task.name}: nothing stands before the answer")
        return AskedNeedle(
            task=self.task.name,
            length=self.length,
            number=number,
            tokens=whole[:-1].astype(np.int32),
            places=places - 1,
            targets=whole[places].astype(np.int32),
            owners=np.asarray(owners, np.int32),
            values=tuple(question.answer[each.begin : each.end] for each in question.hidden),
            depths=tuple(each.depth for each in question.hidden),
            asks=question.prompt[-240:],
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class NeedleBatch:
    """One execution of a Program.

    Attributes:
        asked: its questions; the rows behind them are empty.
        tokens: int32 `[rows, length]`; what follows a question is not seen by it.
        places, targets: int32 `[rows, SLOTS]`.
    """

    asked: tuple[AskedNeedle, ...]
    tokens: np.ndarray
    places: np.ndarray
    targets: np.ndarray

    @property
    def inputs(self) -> tuple[np.ndarray, ...]:
        """What the Program takes besides the model."""
        return self.tokens, self.places, self.targets


def batches(asked: Sequence[AskedNeedle], rows: int, length: int) -> Iterator[NeedleBatch]:
    """The questions of a length, so many at a time."""
    for first in range(0, len(asked), rows):
        some = tuple(asked[first : first + rows])
        tokens = np.zeros((rows, length), np.int32)
        places, targets = (np.zeros((rows, SLOTS), np.int32) for _ in range(2))
        for n, each in enumerate(some):
            tokens[n, : len(each.tokens)] = each.tokens
            places[n, : len(each.places)] = each.places
            targets[n, : len(each.targets)] = each.targets
        yield NeedleBatch(asked=some, tokens=tokens, places=places, targets=targets)


def digest(found: dict[int, list[AskedNeedle]]) -> str:
    """Hex SHA-256 of all questions."""
    hashed = hashlib.sha256()
    for length, asked in found.items():
        hashed.update(f"{length}:{len(asked)}|".encode())
        for each in asked:
            for array in (each.tokens, each.places, each.targets, each.owners):
                hashed.update(array.astype("<i4").tobytes() + b"|")
    return hashed.hexdigest()
