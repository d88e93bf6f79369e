"""A training run in abstract form: its resolved configuration, its state, and the models beside the trained one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import haliax as hax
import jax
import numpy as np
import optax

from haliax_ext.abstract import abstract
from haliax_ext.load_plan import LoadPlan
from haliax_ext.placement import LeafPlan
from haliax_ext.planner import ShardingPlan
from haliax_ext.pytree import PyTree
from haliax_ext.rules import WeightRules
from levanter.commands.model.compiler import CompilerChoice
from levanter.commands.model.live_generation import LiveModel
from levanter.commands.model.sharding import plan_activation_sharding
from levanter.commands.model.source import ModelSource
from levanter.commands.train.config import TrainLmConfig
from levanter.config import ExplicitKeys
from levanter.data import EvaluationData, Tokenizer
from levanter.mesh import ResolvedMesh
from levanter.models.base import LmHeadModel
from levanter.models.lm_head.plan import HeadPlan, plan_head
from levanter.models.precision import Precision
from levanter.models.registry import LmConfig
from levanter.runplan import Check
from levanter.trainer.adapter_state import Adapted
from levanter.trainer.batch_plan import BatchPlan, BatchStage
from levanter.trainer.frozen_part import head_gradient_inputs
from levanter.trainer.objective import Objective
from levanter.trainer.reinit_rows import RenewedRows
from levanter.trainer.state import StatePlan
from levanter.trainer.train_state import REFERENCE, TrainState
from levanter.trainer.trainable import Partition, bind


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskRows:
    """What is known of a task's rows before any is read.

    Attributes:
        checks: lines of the plan: the sets, and what is wrong with them.
        validation: the sets of `data:` that are scored; None for none.
    """

    checks: tuple[Check, ...]
    validation: EvaluationData | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class ReferenceModel:
    """A second model, which the trained one is compared with.

    Attributes:
        origin: its source.
        module: the model in the compute dtype, abstract.
        plan: its placement.
        load: the bytes that each host reads; None if the plan has errors.
        checks: lines of the plan.
    """

    origin: ModelSource
    module: LmHeadModel
    plan: ShardingPlan
    load: LoadPlan | None
    checks: tuple[Check, ...] = field(default=(), repr=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskModels:
    """The models that an objective computes with: the trained one alone, or others as well.

    A task with more than a loaded model beside the trained one derives from this class.

    Attributes:
        reference: a second model, which is loaded; None for none.
        checks: lines of the plan.
    """

    reference: ReferenceModel | None = None
    checks: tuple[Check, ...] = field(default=(), repr=False)

    @property
    def resident(self) -> ReferenceModel | None:
        """The second model, if it stays on the devices during the run and is an input of every step."""
        return self.reference

    @property
    def bind(self) -> Callable[..., PyTree]:
        """The function from trained and other parameters to what the objective gets as its model.

        Its second argument is the frozen part; if there is a resident model, the pair of both.
        """
        return bind

    def model_plan(self, state: StatePlan) -> ShardingPlan:
        """The placement of the parameters of what `bind` returns, by their paths in it."""
        return state.model

    @property
    def forward_passes(self) -> float:
        """Forward passes of a step beside those of the trained model, in units of its forward pass."""
        return 0.0 if self.resident is None else 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class ResolvedTraining:
    """A run's resolved configuration, before any array is placed.

    Attributes:
        config: as the user wrote it, completed from its checkpoint.
        written: the keys that the user wrote.
        origin: the checkpoint that it begins from; None if weights are initialized.
        model: the architecture, with the choices for this platform made.
        vocab: size of the vocabulary.
        precision: the dtype policy.
        tokenizer: text to ids; None if it is unavailable.
        rows: what is known of the rows.
        resolved: mesh and mappings.
        batches: the stages of the batch size, by first step.
        transformation: the optimizer's.
        compiler: options for XLA.
        checks: those made so far.
    """

    config: TrainLmConfig
    written: ExplicitKeys
    origin: ModelSource | None
    model: LmConfig
    vocab: int
    precision: Precision
    tokenizer: Tokenizer | None
    rows: TaskRows
    resolved: ResolvedMesh
    batches: tuple[BatchStage, ...]
    transformation: optax.GradientTransformation
    compiler: CompilerChoice
    checks: tuple[Check, ...] = field(repr=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedRun(ResolvedTraining):
    """A training run: the model, its state and its objective. All Programs derive from it.

    Attributes:
        Vocab: rows of embedding and head, rounded up to a multiple of their shards.
        build: initializes the model from a key.
        state: the state carried from step to step, abstract.
        partition: which part of the model is trained.
        frozen: the rest of it, abstract; None if there is none.
        adapted: the adapters that are trained; None if parameters of the model are.
        state_plan: the placement of state and frozen part.
        platform: of the devices.
        objective: what a step minimizes.
        models: the models beside the trained one.
        rules: weight rules of what is loaded; None for the model's own.
        renewed: the rows of the checkpoint that are reinitialized; None for none.
    """

    Vocab: hax.Axis
    build: Callable[[jax.Array], LmHeadModel]
    state: TrainState
    partition: Partition
    frozen: LmHeadModel | None
    adapted: Adapted | None
    state_plan: StatePlan
    platform: str
    objective: Objective
    models: TaskModels = field(default_factory=TaskModels)
    rules: WeightRules | None = None
    renewed: RenewedRows | None = None

    @property
    def resident(self) -> ShardingPlan:
        """The placement of everything that stays on the devices; that of a second model has paths under its name."""
        plan, second = self.state_plan.resident, self.models.resident
        if second is None:
            return plan
        moved = (under(REFERENCE, planned) for planned in second.plan.leaves)
        errors = (
            # Errors only: notes about the second model are among its own checks.
            replace(planned, path=f"{REFERENCE}.{planned.path}")
            for planned in second.plan.findings
            if planned.error is not None
        )
        return replace(plan, leaves=(*plan.leaves, *moved), findings=(*plan.findings, *errors))

    @property
    def resident_bytes(self) -> Mapping[str, int]:
        """Bytes on a device of what stays there, by kind."""
        nbytes, second = self.state_plan.bytes_by_group, self.models.resident
        return nbytes if second is None else {**nbytes, REFERENCE: second.plan.bytes_per_device}

    def head(self, rows: int) -> HeadPlan:
        """The plan of the output head for a microbatch.

        Args:
            rows: of it, over all devices.
        """
        return plan_head(
            self.model,
            # A row may be several sequences (chosen and rejected), all of which reach the head.
            batch=(self.resolved.batch_axis, rows * self.objective.sequences),
            positions=self.config.positions,
            vocab=self.Vocab.size,
            mapping=self.resolved.mappings.compute,
            mesh=self.resolved.spec,
            dtype=np.dtype(self.precision.compute),
            platform=self.platform,
            requested_chunk=self.objective.chunk,
            in_loop=self.objective.gradient_in_loop,
            learned=head_gradient_inputs(self.model, self.state.model),
        )

    @property
    def live_model(self) -> LiveModel:
        """The model as text is generated from it between steps."""
        return LiveModel(
            config=self.model,
            Vocab=self.Vocab,
            build=lambda: abstract(lambda: self.build(jax.random.PRNGKey(0))),
            trained=self.state.model,
            frozen=self.frozen,
            sharding=self.state_plan.model,
            mesh=self.config.trainer.mesh,
            resolved=self.resolved,
            precision=self.precision,
            compiler=self.compiler,
        )

    def activations(self, rows: int) -> ShardingPlan:
        """The named activations of a microbatch.

        Args:
            rows: of it, over all devices.
        """
        return plan_activation_sharding(
            self.model,
            self.resolved,
            # As above: activations are those of sequences.
            rows=rows * self.objective.sequences,
            positions=self.config.positions,
            Vocab=self.Vocab,
            precision=self.precision,
            chunk=self.head(rows).chunk,
        )

    def evaluation_rows(self, largest: BatchPlan) -> int:
        """Rows of an evaluation's batch, over all devices.

        Args:
            largest: the batch whose microbatch rows are used, unless the configuration sets those of evaluation.
        """
        per_device = self.config.trainer.per_device_eval_parallelism
        # -1 means as many rows on a device as a training microbatch has, whose memory is known to suffice.
        return self.resolved.batch_ways * (largest.per_device if per_device == -1 else per_device)


def under(name: str, planned: LeafPlan) -> LeafPlan:
    """A leaf's plan with `name` as a prefix of its path."""
    return replace(planned, leaf=replace(planned.leaf, path=f"{name}.{planned.leaf.path}"))
