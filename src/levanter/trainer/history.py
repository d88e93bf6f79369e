"""The curves of a run: some points of its metrics, kept over restarts.

`history.json` in the run's folder has a point for each bucket of consecutive steps, with the means of the bucket, and
one for each evaluation. It serves the report of a run, whatever its tracker is. A run that resumes drops the points of
the steps that it takes again.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from levanter.trainer.record_file import RecordFile, finite, finite_or_none
from levanter.trainer.report import StepReport

FILE = "history.json"
POINTS = 1000
"""The largest number of points of a run whose length does not change."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Some consecutive steps.

    Attributes:
        taken: steps taken after the last of them.
        loss: mean, in nats; None if one is not finite.
        grad_norm: mean; None if one is not finite.
        learning_rate: of the last step.
        tokens_per_second: without pauses; None if a step contains a compilation.
    """

    taken: int
    loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    tokens_per_second: float | None


@dataclass(frozen=True, kw_only=True)
class EvaluationPoint:
    """An evaluation between two steps.

    Attributes:
        taken: steps taken before it.
        loss: of all sets, in nats.
    """

    taken: int
    loss: float


class History:
    """Collects the points of a run, and keeps them in its folder; one process does."""

    def __init__(self, folder: Path, *, first: int, stop: int, tokens_of: Callable[[int], int]):
        """Reads the points of earlier attempts.

        Args:
            folder: of the run.
            first: number of the first step of this attempt.
            stop: number of steps of the whole run.
            tokens_of: step → its tokens.
        """
        self._file, self._tokens_of = RecordFile(folder / FILE), tokens_of
        self._every, self._bucket, self._compiled = max(1, -(-stop // POINTS)), list[StepReport](), False
        points, evaluations = self._file.read(_parse) or ([], [])
        # A point that ends behind the first step contains steps of which there will be new numbers.
        self._points = [point for point in points if point.taken <= first]
        self.evaluations = [point for point in evaluations if point.taken <= first]

    @property
    def points(self) -> list[Point]:
        """The points so far, the unfinished bucket's included."""
        return [*self._points, *([self._point()] if self._bucket else [])]

    def step(self, report: StepReport) -> None:
        """Adds a step: a listener of the training loop."""
        self._bucket.append(report)
        # A point behind the first step shows the loss of the model that the run began with.
        if len(self._bucket) >= self._every or report.step == 0:
            self._points.append(self._point())
            self._bucket, self._compiled = [], False

    def compiled(self) -> None:
        """Notes that the present step waits for a compilation, so that its duration is no rate."""
        self._compiled = True

    def evaluated(self, taken: int, metrics: Mapping[str, float]) -> None:
        """Adds the loss of an evaluation, if it has one."""
        # Tasks log other metrics as well; this name is the one that they share.
        loss = metrics.get("eval/loss")
        if loss is not None and math.isfinite(loss):
            self.evaluations.append(EvaluationPoint(taken=taken, loss=float(loss)))

    def save(self) -> None:
        """Writes the file."""
        points, evaluations = map(asdict, self.points), map(asdict, self.evaluations)
        self._file.write({"points": list(points), "evaluations": list(evaluations)})

    def _point(self) -> Point:
        steps, last = self._bucket, self._bucket[-1]
        # Total tokens over total seconds: a mean of rates would give short steps too much weight.
        seconds = sum(report.seconds for report in steps)
        tokens = sum(self._tokens_of(report.step) for report in steps)
        return Point(
            taken=last.taken,
            loss=_mean(report.loss for report in steps),
            grad_norm=_mean(report.grad_norm for report in steps),
            learning_rate=_mean([last.learning_rate]),
            tokens_per_second=tokens / seconds if seconds > 0 and not self._compiled else None,
        )


def _mean(values: Iterable[float]) -> float | None:
    # JSON has no NaN, and a chart draws None as a gap.
    numbers = list(values)
    mean = math.fsum(numbers) / len(numbers) if all(map(math.isfinite, numbers)) else math.nan
    return mean if math.isfinite(mean) else None


def _parse(document: Mapping[str, object]) -> tuple[list[Point], list[EvaluationPoint]]:
    rows, evaluations = document.get("points"), document.get("evaluations")
    if not isinstance(rows, list) or not isinstance(evaluations, list):
        raise ValueError("points or evaluations are missing")
    if not all(isinstance(row, Mapping) for row in (*rows, *evaluations)):
        raise ValueError("a point is not an object")
    names = ("loss", "grad_norm", "learning_rate", "tokens_per_second")
    return [
        Point(taken=int(finite(row.get("taken"))), **{name: finite_or_none(row.get(name)) for name in names})
        for row in rows
    ], [EvaluationPoint(taken=int(finite(row.get("taken"))), loss=finite(row.get("loss"))) for row in evaluations]
