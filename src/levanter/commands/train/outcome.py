"""How a training run ended."""

from dataclasses import dataclass
from typing import Any

from levanter.checkpoint import CheckpointRef
from levanter.commands.train.dpo.evaluation import PairResult
from levanter.eval.perplexity import EvalResult
from levanter.trainer.hooks import Throughput


@dataclass(frozen=True, kw_only=True)
class Trained:
    """How a run ended.

    Attributes:
        taken: steps taken, earlier attempts included.
        stop: steps that were to be taken.
        preempted: whether it was told to stop before that.
        loss: of its last step; None if no step was taken.
        checkpoint: the last complete checkpoint.
        exported: the Hugging Face export of the final state.
        evaluation: the last evaluation.
        throughput: average, without the first step.
        seconds: from the first step to the last.
    """

    taken: int
    stop: int
    preempted: bool
    loss: float | None
    checkpoint: CheckpointRef | None
    exported: str | None
    evaluation: EvalResult | PairResult | None
    throughput: Throughput
    seconds: float

    @property
    def summary(self) -> dict[str, Any]:
        """Summary values for trackers."""
        found = {"train/loss": self.loss, "throughput/tokens_per_second": self.throughput.tokens_per_second}
        if self.evaluation is not None:
            found.update(self.evaluation.metrics())
        return {name: value for name, value in found.items() if value is not None}

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
            lines.append(
                str(self.evaluation)
                if isinstance(self.evaluation, PairResult)
                else f"validation loss {self.evaluation.overall.micro.loss:.4f} nats per token"
            )
        if self.exported is not None:
            lines.append(f"Hugging Face export: {self.exported}")
        return "\n".join(lines)
