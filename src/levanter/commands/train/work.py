"""What is behind the plan of a training run, beside its Programs."""

from dataclasses import dataclass

import haliax as hax

from levanter.commands.model.origin import Origin
from levanter.commands.train.config import TrainLmConfig
from levanter.data import EvaluationData, Tokenizer
from levanter.mesh import ResolvedMesh
from levanter.models.base import LmHeadModel
from levanter.models.precision import Precision
from levanter.models.registry import LmConfig
from levanter.run import RunPlan
from levanter.trainer.batch_plan import BatchStage
from levanter.trainer.frozen import FrozenPart
from levanter.trainer.state import StatePlan, TrainState
from levanter.trainer.trainable import Partition


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
        partition: what of the model is trained.
        frozen: the rest of it, without memory; None where there is none.
        frozen_part: how checkpoints name it, digests apart.
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
    partition: Partition
    frozen: LmHeadModel | None
    frozen_part: FrozenPart | None
    state_plan: StatePlan
    batches: tuple[BatchStage, ...]
    origin: Origin | None
    tokenizer: Tokenizer | None
    validation: EvaluationData | None


TrainPlan = RunPlan[TrainWork]
"""A training run, described."""
