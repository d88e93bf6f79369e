"""What the plan of a training run carries besides its Programs."""

from dataclasses import dataclass

import haliax as hax

from levanter.commands.model.source import ModelSource
from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train.dpo.setup import Preferences
from levanter.commands.train.lm.lm_eval_hook import TrainingHarness
from levanter.compat.hf.peft import PeftAdapter, PeftPlan
from levanter.data import EvaluationData, Tokenizer
from levanter.mesh import ResolvedMesh
from levanter.models.base import LmHeadModel
from levanter.models.precision import Precision
from levanter.models.registry import LmConfig
from levanter.runplan import RunPlan
from levanter.trainer.adapter_state import Adapted
from levanter.trainer.batch_plan import BatchStage
from levanter.trainer.frozen_identity import FrozenPart
from levanter.trainer.state import StatePlan, TrainState
from levanter.trainer.trainable import Partition


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainWork:
    """What a training plan carries.

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
        peft: what is written of adapters; None for nothing.
        frozen_part: how checkpoints identify it, without digests.
        state_plan: its placement.
        batches: batch plans by first step.
        origin: where the first weights come from; None if they are initialized.
        tokenizer: text to ids; None if it is unavailable.
        validation: what is evaluated between steps; None for nothing.
        pairs: what pairs are learned from with; None where text is.
        harness: the tasks that are asked between steps; None for none.
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
    harness: TrainingHarness | None = None


TrainPlan = RunPlan[TrainWork]
"""A training run, described."""
