"""`TrainWork`: what the plan of a training run contains besides its Programs. `Trained`: the result of a run."""

from dataclasses import dataclass
from typing import Any

import haliax as hax

from levanter.checkpoint import CheckpointRef
from levanter.commands.model.source import ModelSource
from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train.dpo.evaluation import PairResult
from levanter.commands.train.dpo.setup import Preferences
from levanter.commands.train.task import BetweenSteps
from levanter.compat.hf.peft import PeftAdapter, PeftPlan
from levanter.data import EvaluationData, Tokenizer
from levanter.eval.perplexity import EvalResult
from levanter.mesh import ResolvedMesh
from levanter.models.base import LmHeadModel
from levanter.models.precision import Precision
from levanter.models.registry import LmConfig
from levanter.runplan import RunPlan
from levanter.trainer.adapter_state import Adapted
from levanter.trainer.batch_plan import BatchStage
from levanter.trainer.frozen_identity import FrozenPart
from levanter.trainer.hooks import Throughput
from levanter.trainer.state import StatePlan
from levanter.trainer.train_state import TrainState
from levanter.trainer.trainable import Partition


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainWork:
    """The resolved inputs of a training run that `execute` needs besides the plan's Programs.

    Attributes:
        config: as the user wrote it.
        model: the architecture, with the choices for this platform made.
        Vocab: rows of the embedding, rounded up to a multiple of their shards.
        precision: the dtype policy.
        resolved: mesh and mappings.
        state: the state carried from step to step, abstract.
        partition: which part of the model is trained.
        frozen: the rest of it, abstract; None if there is none.
        adapted: the adapters that are trained; None if parameters of the model are.
        begun: the adapters that it begins with; None for fresh ones.
        peft: the plan of the adapter export; None for none.
        frozen_part: how checkpoints identify it, without digests.
        state_plan: its placement.
        batches: batch plans by first step.
        origin: the source of the first weights; None if they are initialized.
        tokenizer: text to ids; None if it is unavailable.
        validation: the validation sets; None for none.
        pairs: the setup of preference training; None for training on text.
        between_steps: the work between steps, apart from evaluations on validation sets.
    """

    config: TrainLmConfig
    model: LmConfig
    Vocab: hax.Axis
    precision: Precision
    resolved: ResolvedMesh
    state: TrainState
    partition: Partition
    frozen: LmHeadModel | None
    adapted: Adapted | None
    begun: PeftAdapter | None
    peft: PeftPlan | None
    frozen_part: FrozenPart | None
    state_plan: StatePlan
    batches: tuple[BatchStage, ...]
    origin: ModelSource | None
    tokenizer: Tokenizer | None
    validation: EvaluationData | None
    pairs: Preferences | None = None
    between_steps: tuple[BetweenSteps, ...] = ()


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
        evaluation: the last evaluation.
        throughput: average, without the first step.
        seconds: duration from the first step to the last.
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
            lines.append(
                str(self.evaluation)
                if isinstance(self.evaluation, PairResult)
                else f"validation loss {self.evaluation.overall.micro.loss:.4f} nats per token"
            )
        if self.exported is not None:
            lines.append(f"Hugging Face export: {self.exported}")
        return "\n".join(lines)
