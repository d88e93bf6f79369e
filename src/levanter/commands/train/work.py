"""What is behind the plan of a training run, beside its Programs."""

from dataclasses import dataclass

import haliax as hax

from levanter.commands.model.origin import Origin
from levanter.commands.train.config import TrainLmConfig
from levanter.data import EvaluationData, Tokenizer
from levanter.mesh import ResolvedMesh
from levanter.models.precision import Precision
from levanter.models.registry import LmConfig
from levanter.run import RunPlan
from levanter.trainer.batch_plan import BatchStage
from levanter.trainer.state import StatePlan, TrainState


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainWork:
    """What is behind a training plan.

    Attributes:
        config: as the user wrote it.
        model: the architecture, with the choices for this platform made.
        Vocab: rows of the embedding, rounded up to what the mesh divides.
        precision: the dtype policy.
        resolved: mesh and mappings.
        state: what is carried from step to step, without memory.
        state_plan: where it lies.
        batches: batch plans by first step.
        origin: where the first weights come from; None where they are made.
        tokenizer: text to ids; None where it is not here.
        validation: what is evaluated between steps; None for nothing.
    """

    config: TrainLmConfig
    model: LmConfig
    Vocab: hax.Axis
    precision: Precision
    resolved: ResolvedMesh
    state: TrainState
    state_plan: StatePlan
    batches: tuple[BatchStage, ...]
    origin: Origin | None
    tokenizer: Tokenizer | None
    validation: EvaluationData | None


TrainPlan = RunPlan[TrainWork]
"""A training run, described."""
