"""What hangs on the loop: trackers and progress listen to every step, checkpoints and exports pause it.

Metric names are upstream's (`train/loss`, `throughput/tokens_per_second`, `optim/learning_rate`, `grad/norm/total`),
logged under the step's number from 0. A rate is that of one step; the first step's time is its compilation, so no rate
is logged for it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from haliax_ext.abstract import leaves
from levanter.checkpoint import Checkpointer
from levanter.io import Progress
from levanter.tracker import Tracker
from levanter.trainer.loop import StepReport
from levanter.trainer.state import TrainState


@dataclass(frozen=True, kw_only=True)
class StepSize:
    """How much a step does.

    Attributes:
        rows: sequences.
        tokens: tokens.
        flops: model FLOPs over all devices, attention over every pair of positions.
    """

    rows: int
    tokens: int
    flops: float


@dataclass(kw_only=True)
class Throughput:
    """Tokens and steps since a listener began, without the first step, which compiles."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0

    @property
    def tokens_per_second(self) -> float | None:
        """The average; None before the second step."""
        return self.tokens / self.seconds if self.seconds > 0 else None


@dataclass(kw_only=True)
class Track:
    """Logs every step to the run's tracker.

    Attributes:
        tracker: where to.
        size_of: how much a step does, by its number.
        steps: of the whole run.
        tokens: tokens of all steps before.
        throughput: average so far.
    """

    tracker: Tracker
    size_of: Callable[[int], StepSize]
    steps: int
    tokens: int = 0
    throughput: Throughput = field(default_factory=Throughput)
    _first: bool = True

    def __call__(self, report: StepReport) -> None:
        """Logs one step."""
        size = self.size_of(report.step)
        self.tokens += size.tokens
        self.tracker.log(self._metrics(report, size), step=report.step)

    def _metrics(self, report: StepReport, size: StepSize) -> Mapping[str, Any]:
        found: dict[str, Any] = {
            "train/loss": report.loss,
            "optim/learning_rate": report.learning_rate,
            "grad/norm/total": report.grad_norm,
            "params/norm/total": report.parameter_norm,
            "updates/norm/total": report.update_norm,
            "global_step": report.step,
            "run_progress": report.taken / self.steps,
            "throughput/duration": report.seconds,
            "throughput/loading_time": report.waited,
            "throughput/total_tokens": self.tokens,
        }
        first, self._first = self._first, False
        if first or report.seconds <= 0:
            return found
        self.throughput.tokens += size.tokens
        self.throughput.seconds += report.seconds
        self.throughput.steps += 1
        found["throughput/examples_per_second"] = size.rows / report.seconds
        found["throughput/tokens_per_second"] = size.tokens / report.seconds
        found["throughput/gflops_per_second"] = size.flops / report.seconds / 1e9
        return found


@dataclass(kw_only=True)
class ShowProgress:
    """Moves the bar: tokens, tokens a second, time left; step and loss beside it.

    Attributes:
        progress: counts the tokens that are left to train on.
        size_of: how much a step does, by its number.
        steps: of the whole run.
    """

    progress: Progress
    size_of: Callable[[int], StepSize]
    steps: int

    def __call__(self, report: StepReport) -> None:
        """Counts one step."""
        note = f"step {report.taken:,} of {self.steps:,}, loss {report.loss:.4f}"
        self.progress.advance(self.size_of(report.step).tokens, note=note)


@dataclass(frozen=True, kw_only=True)
class SaveCheckpoint:
    """Saves the run where the checkpointer says so.

    Attributes:
        checkpointer: decides and saves.
        metadata: steps taken → what is saved beside the arrays.
    """

    checkpointer: Checkpointer
    metadata: Callable[[int], Mapping[str, Any]]

    def due(self, taken: int) -> bool:
        """Whether it is time, by step or by clock."""
        return self.checkpointer.due(taken)

    def __call__(self, taken: int, state: TrainState) -> None:
        """Begins to save; the files are written behind the next steps."""
        self.save(taken, state)

    def save(self, taken: int, state: TrainState, *, force: bool = False) -> None:
        """Begins to save, for ever if `force`."""
        self.checkpointer.save(taken, state_arrays(state), self.metadata(taken), force=force)


@dataclass(frozen=True, kw_only=True)
class Every:
    """Does something every so many steps.

    Attributes:
        steps: how many.
        action: told the steps taken and the state.
        until: from this step on no more; the run's end is its own business.
    """

    steps: int
    action: Callable[[int, TrainState], object]
    until: int

    def due(self, taken: int) -> bool:
        """Whether it is time."""
        return taken % self.steps == 0 and taken < self.until

    def __call__(self, taken: int, state: TrainState) -> None:
        """Does it."""
        self.action(taken, state)


def state_arrays(state: TrainState) -> dict[str, jax.Array]:
    """Every array of a state by its path, as a checkpoint holds them."""
    return {leaf.path: x for leaf, x in zip(leaves(state), jax.tree.leaves(state), strict=True)}
