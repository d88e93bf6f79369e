"""The report of a training run: where its time went, its curves, and the page `report.html` in its folder."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from levanter.commands.train.report_page import report_page
from levanter.commands.train.task import TrainingEvaluation
from levanter.html.format import percent
from levanter.html.line_chart import sparkline
from levanter.io.atomic import atomic_write
from levanter.io.progress import duration
from levanter.trainer.goodput import Activity, Goodput, GoodputFile, TimeAccount
from levanter.trainer.history import EvaluationPoint, History, Point
from levanter.trainer.loop import Pause
from levanter.trainer.report import StepReport
from levanter.trainer.train_state import TrainState

logger = logging.getLogger(__name__)

FILE = "report.html"
SAVE_INTERVAL = 30.0
"""Seconds between two writes of the records: what a process that is killed leaves uncounted."""
_SMALLEST_SHARE = 0.01
"""Activities with a smaller share are added up in the line for the terminal."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What is reported of a run at its end.

    Attributes:
        goodput: where its time went, over all attempts.
        points: of its steps.
        evaluations: between its steps.
        page: the report's file; None if it was not written.
    """

    goodput: Goodput
    points: Sequence[Point]
    evaluations: Sequence[EvaluationPoint]
    page: str | None = None

    @property
    def lines(self) -> list[str]:
        """Lines for the terminal: the loss curve, the time, the page."""
        # One loss is no curve.
        losses = [point.loss for point in self.points if point.loss is not None]
        lines = [f"loss {losses[0]:.4f} → {losses[-1]:.4f}  {sparkline(losses)}"] if len(losses) > 1 else []
        shares = {name: share for name, share in self.goodput.shares.items() if share >= _SMALLEST_SHARE}
        activities = [f"{percent(share)} {name}" for name, share in shares.items()]
        if (rest := 1 - sum(shares.values())) > 0.0005:
            activities.append(f"{percent(rest)} rest")
        attempts = "" if self.goodput.attempts == 1 else f" in {self.goodput.attempts} attempts"
        lines.append(f"time {duration(self.goodput.total)}{attempts}: {', '.join(activities)}")
        if self.page is not None:
            lines.append(f"report: {self.page}")
        return lines


class RunReport:
    """Collects what a run reports at its end; only the process that prints keeps files.

    Attributes:
        account: the time of this attempt.
    """

    def __init__(self, folder: Path | None, *, run_id: str, began: float | None):
        """Begins the report.

        Args:
            folder: of the run; None in a process that keeps none.
            run_id: heading of the page.
            began: Unix time at which the process began; None for now.
        """
        self.account = TimeAccount()
        self._folder, self._run_id = folder, run_id
        self._began = time.time() if began is None else began
        self._files: tuple[GoodputFile, History] | None = None
        # `began` is Unix time, so this one duration is not measured by the monotonic clock.
        self._saved = time.monotonic()
        self.account.add("start", time.time() - self._began)

    def begin_steps(self, *, first: int, stop: int, tokens_of: Callable[[int], int]) -> None:
        """Reads what earlier attempts have left.

        Args:
            first: number of the first step of this attempt.
            stop: number of steps of the whole run.
            tokens_of: step → its tokens.
        """
        if self._folder is not None:
            self._files = (
                GoodputFile(self._folder, self.account, began=self._began, first=first),
                History(self._folder, first=first, stop=stop, tokens_of=tokens_of),
            )

    def step(self, report: StepReport) -> None:
        """Adds a step: a listener of the training loop."""
        # The account first: the files take its seconds.
        self.account.step(report)
        if self._files is not None:
            for file in self._files:
                file.step(report)
            if time.monotonic() - self._saved >= SAVE_INTERVAL:
                self.save()

    def save(self) -> None:
        """Writes the records."""
        self._saved = time.monotonic()
        for file in self._files or ():
            file.save()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Encloses the training loop: the records are written however it ends."""
        try:
            yield
        finally:
            self.save()

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Encloses a compilation inside the training loop."""
        # The step that waits for a compilation has no rate.
        if self._files is not None:
            self._files[1].compiled()
        with self.account.compiling():
            yield

    def saving(self, pause: Pause) -> Pause:
        """The same pause, which saves states; the records are written before each, so that they contain its step."""
        return _ReportedPause(pause=pause, activity="saving", account=self.account, before=self.save)

    def evaluating(self, pause: Pause) -> Pause:
        """The same pause, which does other work between steps; the loss of an evaluation becomes a point."""

        def keep(taken: int) -> None:
            if self._files is not None and isinstance(pause, TrainingEvaluation) and pause.result is not None:
                self._files[1].evaluated(taken, pause.result.metrics())

        return _ReportedPause(pause=pause, activity="evaluation", account=self.account, after=keep)

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of a step: the goodput so far."""
        return {} if self._files is None else {"throughput/goodput": self._files[0].now().share}

    def finish(self, facts: Mapping[str, str]) -> RunSummary | None:
        """Writes records and page; None in a process that keeps none.

        Args:
            facts: of the run, for the page.
        """
        if self._files is None or self._folder is None:
            return None
        self.save()
        times, history = self._files
        summary = RunSummary(goodput=times.now(), points=history.points, evaluations=history.evaluations)
        path = str(self._folder / FILE)
        page = report_page(
            summary.goodput, summary.points, summary.evaluations, title=f"Run {self._run_id}", facts=facts
        )
        try:
            with atomic_write(path) as file:
                file.write(page.encode())
        except (OSError, ValueError) as error:
            # What the run was for is done, and its results are elsewhere.
            logger.warning("%s cannot be written: %s", path, error)
            return summary
        return RunSummary(goodput=summary.goodput, points=summary.points, evaluations=summary.evaluations, page=path)


@dataclass(frozen=True, kw_only=True)
class _ReportedPause:
    """A pause whose duration is added to an activity."""

    pause: Pause
    activity: Activity
    account: TimeAccount
    before: Callable[[], object] = lambda: None
    after: Callable[[int], object] = lambda _: None

    def due(self, taken: int) -> bool:
        return self.pause.due(taken)

    def __call__(self, taken: int, state: TrainState) -> None:
        with self.account.timed(self.activity):
            self.before()
            self.pause(taken, state)
            self.after(taken)
