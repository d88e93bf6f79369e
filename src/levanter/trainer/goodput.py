"""Goodput: the share of a run's time in which its model was trained, over all its restarts.

A run is a number of *attempts*: the processes that it was started as, each from the last checkpoint of the one before.
`TimeAccount` divides the time of an attempt among a few activities, and `GoodputFile` keeps the attempts of a run in
`goodput.json`, so that the time of earlier attempts counts, and the time between them.

    goodput = (seconds of steps − seconds of steps that were taken again) / (now − start of the first attempt)

A step is taken again if its attempt ended before a checkpoint of it was saved. (Published definitions differ in what
they count as lost; this one counts everything that is not a step which the final model contains.)
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, get_args

from levanter.trainer.record_file import RecordFile, finite
from levanter.trainer.report import StepReport

FILE = "goodput.json"

Activity = Literal["start", "data preparation", "loading", "compilation", "steps", "input", "saving", "evaluation"]
"""What an attempt spends time on: `input` is waiting for batches, `saving` is of checkpoints and exports."""
ACTIVITIES: tuple[Activity, ...] = get_args(Activity)
OTHER, REPEATED, DOWN = "other", "steps taken again", "between attempts"


@dataclass(frozen=True, kw_only=True)
class RunAttempt:
    """The time of one attempt.

    Attributes:
        began: Unix time of its begin.
        until: Unix time at which this was written.
        first: number of its first step.
        taken: steps of the run that were taken when it ended, those of earlier attempts included.
        seconds: activity → seconds.
    """

    began: float
    until: float
    first: int
    taken: int
    seconds: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """The time of a run so far.

    Attributes:
        seconds: activity → seconds, over all attempts; they add up to `total`.
        total: seconds since the run first began.
        attempts: number of attempts.
    """

    seconds: Mapping[str, float]
    total: float
    attempts: int

    @property
    def share(self) -> float:
        """The share of the total in steps that were not taken again."""
        return self.seconds["steps"] / self.total if self.total > 0 else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Activity → its share, largest first; activities without time are left out."""
        ordered = sorted(self.seconds.items(), key=lambda entry: -entry[1])
        return {name: seconds / self.total for name, seconds in ordered if seconds > 0} if self.total > 0 else {}


def goodput(attempts: Sequence[RunAttempt]) -> Goodput:
    """Adds up the attempts of a run, in order.

    Args:
        attempts: one at least.
    """
    # Every name is there, so that readers need no defaults.
    seconds: dict[str, float] = dict.fromkeys((*ACTIVITIES, OTHER, REPEATED, DOWN), 0.0)
    total = 0.0
    for index, attempt in enumerate(attempts):
        wall = max(0.0, attempt.until - attempt.began)
        known = {name: max(0.0, attempt.seconds.get(name, 0.0)) for name in ACTIVITIES}
        # Clocks may be set back: the parts then define the duration.
        wall = max(wall, sum(known.values()))
        for name, value in known.items():
            seconds[name] += value
        # What nobody timed: hooks, the profiler, the interpreter between two activities.
        seconds[OTHER] += wall - sum(known.values())
        total += wall
        # The last attempt is the present one: none of its steps is lost yet.
        if index + 1 < len(attempts):
            after = attempts[index + 1]
            # Steps beyond the next attempt's first one are taken again, each for the mean duration of this attempt's.
            lost, steps_taken = attempt.taken - max(after.first, attempt.first), attempt.taken - attempt.first
            repeated = known["steps"] * lost / steps_taken if lost > 0 else 0.0
            # They move from one name to the other, so that everything still adds up to the total.
            seconds["steps"] -= repeated
            seconds[REPEATED] += repeated
            down = max(0.0, after.began - attempt.until)
            seconds[DOWN] += down
            total += down
    return Goodput(seconds=seconds, total=total, attempts=len(attempts))


@dataclass(kw_only=True)
class TimeAccount:
    """Divides the time of an attempt among its activities.

    Attributes:
        seconds: activity → seconds so far.
        clock: seconds, monotonic.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ACTIVITIES, 0.0))
    clock: Callable[[], float] = time.monotonic
    _in_step: float = 0.0

    def add(self, activity: Activity, seconds: float) -> None:
        """Adds seconds to an activity."""
        # A difference of two measurements may be below zero by their rounding.
        self.seconds[activity] += max(0.0, seconds)

    @contextmanager
    def timed(self, activity: Activity) -> Iterator[None]:
        """Adds the duration of the block to an activity."""
        began = self.clock()
        try:
            yield
        finally:
            self.add(activity, self.clock() - began)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Adds the duration of a compilation in the training loop, which is no part of the step that waits for it."""
        began = self.clock()
        try:
            yield
        finally:
            # Counted if it raises, too: an attempt may end with it.
            took = self.clock() - began
            self.add("compilation", took)
            self._in_step += took

    def step(self, report: StepReport) -> None:
        """Adds a step: a listener of the training loop."""
        self.add("input", report.waited)
        # The duration of a step is measured from the numbers of the one before, so it contains both.
        self.add("steps", report.seconds - report.waited - self._in_step)
        self._in_step = 0.0


class GoodputFile:
    """The attempts of a run, kept in its folder; one process has it."""

    def __init__(self, folder: Path, account: TimeAccount, *, began: float, first: int):
        """Reads the earlier attempts.

        Args:
            folder: of the run.
            account: of this attempt.
            began: Unix time at which this attempt began.
            first: number of its first step.
        """
        self._file, self._account, self._began, self._first = RecordFile(folder / FILE), account, began, first
        self._taken = first
        self._earlier = self._file.read(_parse) or []

    def now(self) -> Goodput:
        """The time of the run so far."""
        return goodput([*self._earlier, self._attempt()])

    def step(self, report: StepReport) -> None:
        """Counts a step: a listener, behind the account's."""
        self._taken = report.taken

    def save(self) -> None:
        """Writes the file."""
        self._file.write({"attempts": [asdict(attempt) for attempt in (*self._earlier, self._attempt())]})

    def _attempt(self) -> RunAttempt:
        return RunAttempt(
            began=self._began,
            # Unix time, unlike durations: attempts are processes, perhaps of different machines.
            until=time.time(),
            first=self._first,
            taken=self._taken,
            seconds={name: round(value, 3) for name, value in self._account.seconds.items()},
        )


def _parse(document: Mapping[str, object]) -> list[RunAttempt]:
    rows = document.get("attempts")
    if not isinstance(rows, list):
        raise ValueError("attempts are missing")
    return [_parse_attempt(row) for row in rows]


def _parse_attempt(row: object) -> RunAttempt:
    if not isinstance(row, Mapping) or not isinstance(seconds := row.get("seconds"), Mapping):
        raise ValueError("an attempt is not an object with its seconds")
    began, until, first, taken = (finite(row.get(name)) for name in ("began", "until", "first", "taken"))
    return RunAttempt(
        began=began,
        until=until,
        first=int(first),
        taken=int(taken),
        seconds={name: finite(seconds.get(name, 0.0)) for name in ACTIVITIES},
    )
