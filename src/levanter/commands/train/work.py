"""`TrainWork`: what the plan of a training run contains besides its Programs. `Trained`: the result of a run."""

from dataclasses import dataclass
from typing import Any

from levanter.checkpoint import CheckpointRef
from levanter.commands.train.run_report import RunSummary
from levanter.commands.train.task import BetweenSteps, Result, TrainingTask
from levanter.commands.train.trained_run import TrainedRun
from levanter.compat.hf.peft import PeftAdapter, PeftPlan
from levanter.runplan import RunPlan
from levanter.trainer.frozen_identity import FrozenPart
from levanter.trainer.hooks import Throughput


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainWork(TrainedRun):
    """The resolved inputs of a training run that `execute` needs besides the plan's Programs.

    Attributes:
        task: the kind of training.
        between_steps: the work between steps, the task's first.
        begun: the adapters that it begins with; None for fresh ones.
        peft: the plan of the adapter export; None for none.
        frozen_part: how checkpoints identify the frozen part, without digests; None if everything is trained.
    """

    task: TrainingTask
    between_steps: tuple[BetweenSteps, ...]
    begun: PeftAdapter | None
    peft: PeftPlan | None
    frozen_part: FrozenPart | None


TrainPlan = RunPlan[TrainWork]
"""A training run, described."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The result of a run.

    Attributes:
        taken: steps taken, earlier attempts included.
        stop: steps of the complete run.
        preempted: whether a signal stopped it before that.
        loss: of its last step; None if no step was taken.
        checkpoint: the last complete checkpoint.
        exported: the Hugging Face export of the final state.
        evaluation: the last evaluation by the task.
        throughput: average, without the first step.
        seconds: duration from the first step to the last.
        report: its curves and where its time went; None in a process that does not print.
    """

    taken: int
    stop: int
    preempted: bool
    loss: float | None
    checkpoint: CheckpointRef | None
    exported: str | None
    evaluation: Result | None
    throughput: Throughput
    seconds: float
    report: RunSummary | None = None

    @property
    def summary(self) -> dict[str, Any]:
        """Summary values for trackers."""
        values = {"train/loss": self.loss, "throughput/tokens_per_second": self.throughput.tokens_per_second}
        if self.evaluation is not None:
            # `metrics()` has the names under which evaluations were logged during the run.
            values.update(self.evaluation.metrics())
        return {name: value for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        rate = self.throughput.tokens_per_second
        how = "stopped by a signal" if self.preempted else "done"
        lines = [
            f"{how} after {self.taken:,} of {self.stop:,} steps"
            + ("" if self.loss is None else f", loss {self.loss:.4f}")
            + ("" if rate is None else f", {rate:,.0f} tokens/s"),
            "no checkpoint" if self.checkpoint is None else f"checkpoint: {self.checkpoint.path}",
        ]
        if self.evaluation is not None:
            lines.append(self.evaluation.headline)
        if self.exported is not None:
            lines.append(f"Hugging Face export: {self.exported}")
        if self.report is not None:
            lines += self.report.lines
        return "\n".join(lines)
