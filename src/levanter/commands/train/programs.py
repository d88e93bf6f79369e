"""The Programs of a training run: its first state, its steps, its evaluation."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import haliax as hax
import jax
import numpy as np
import optax

from haliax_ext.load_plan import LoadPlan
from haliax_ext.planner import ShardingPlan
from haliax_ext.program import Program
from haliax_ext.rules import WeightRules
from levanter.commands.model.compiler import CompilerChoice
from levanter.commands.model.sharding import plan_activation_sharding
from levanter.commands.model.workloads import WATCHED, distinct_stages, program_name
from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train.dpo.evaluation import evaluate_pairs_program
from levanter.commands.train.dpo.reference_logprobs import reference_program
from levanter.commands.train.dpo.setup import Preferences
from levanter.commands.train.frozen import head_gradient_inputs
from levanter.commands.train.lm.evaluation import evaluate_program
from levanter.mesh import ResolvedMesh
from levanter.models.base import LmHeadModel
from levanter.models.lm_head.plan import HeadPlan, plan_head
from levanter.models.precision import Precision
from levanter.models.registry import LmConfig
from levanter.trainer.adapter_state import Adapted, init_base_program
from levanter.trainer.batch_plan import BatchPlan, BatchStage
from levanter.trainer.dpo import PreferenceObjective
from levanter.trainer.frozen_identity import digest_program
from levanter.trainer.loss import LmObjective
from levanter.trainer.reinit_rows import RenewedRows, unchanged
from levanter.trainer.state import StatePlan, init_frozen_program, init_optimizer_program, init_program
from levanter.trainer.step import StepRecipe, step_program
from levanter.trainer.train_state import TrainState
from levanter.trainer.trainable import Partition, bind
from levanter.trainer.watch import Watch


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedRun:
    """A training run in abstract form: the model, its state and its objective. All Programs derive from it.

    Attributes:
        config: as the user wrote it, completed by its checkpoint.
        model: the architecture, with the choices for this platform made.
        Vocab: rows of embedding and head.
        build: initializes the model from a key.
        transformation: the optimizer.
        precision: the dtype policy.
        resolved: mesh and mappings.
        state: the state carried from step to step, abstract.
        partition: which part of the model is trained.
        frozen: the rest of it, abstract; None if there is none.
        adapted: the adapters that are trained; None if parameters of the model are.
        state_plan: its placement.
        compiler: options for XLA.
        platform: of the devices.
        kind: the objective, before the configuration's settings are applied.
        pairs: the setup of preference training; None for training on text.
        rules: weight rules of what is loaded; None for the model's own.
        renewed: the rows of the checkpoint that are reinitialized; None for none.
    """

    config: TrainLmConfig
    model: LmConfig
    Vocab: hax.Axis
    build: Callable[[jax.Array], Any]
    transformation: optax.GradientTransformation
    precision: Precision
    resolved: ResolvedMesh
    state: TrainState
    partition: Partition
    frozen: LmHeadModel | None
    adapted: Adapted | None
    state_plan: StatePlan
    compiler: CompilerChoice
    platform: str
    kind: LmObjective = field(default_factory=LmObjective)
    pairs: Preferences | None = None
    rules: WeightRules | None = None
    renewed: RenewedRows | None = None

    @property
    def sequences(self) -> int:
        """Sequences in a row of a batch."""
        return 1 if self.pairs is None else 2

    @property
    def resident(self) -> ShardingPlan:
        """The placement of everything that stays on the devices."""
        plan = self.state_plan.resident
        return plan if self.pairs is None else self.pairs.with_reference(plan)

    @property
    def resident_bytes(self) -> dict[str, int]:
        """Bytes on a device of what stays there, by kind."""
        nbytes = self.state_plan.bytes_by_group
        return nbytes if self.pairs is None else {**nbytes, **self.pairs.resident_bytes}

    @property
    def second_load(self) -> LoadPlan | None:
        """The load plan of a second model; None for none."""
        return None if self.pairs is None or self.pairs.model is None else self.pairs.model.load

    @property
    def objective(self) -> LmObjective | PreferenceObjective:
        """The objective."""
        return self.of_text if self.pairs is None else self.pairs.objective

    @property
    def of_text(self) -> LmObjective:
        """The objective of text."""
        return replace(
            self.kind,
            segments=self.config.data.block_cross_document_attention,
            z_loss_weight=self.config.z_loss_weight,
            auxiliary_weights=self.model.auxiliary_weights,
        )

    def head(self, rows: int) -> HeadPlan:
        """The plan of the output head for a microbatch.

        Args:
            rows: of it, over all devices.
        """
        return plan_head(
            self.model,
            # A row of pairs is two sequences, chosen and rejected, so twice as many rows reach the head.
            batch=(self.resolved.batch_axis, rows * self.sequences),
            positions=self.config.positions,
            vocab=self.Vocab.size,
            mapping=self.resolved.mappings.compute,
            mesh=self.resolved.spec,
            dtype=np.dtype(self.precision.compute),
            platform=self.platform,
            requested_chunk=self.kind.chunk,
            # The loss of a pair depends on sums over both whole texts, so no chunk of the head knows its gradient yet.
            in_loop=self.pairs is None and self.kind.gradient_in_loop,
            learned=head_gradient_inputs(self.model, self.state.model),
        )

    def activations(self, rows: int) -> ShardingPlan:
        """The named activations of a microbatch.

        Args:
            rows: of it, over all devices.
        """
        return plan_activation_sharding(
            self.model,
            self.resolved,
            # As above: activations are those of sequences, not of pairs.
            rows=rows * self.sequences,
            positions=self.config.positions,
            Vocab=self.Vocab,
            precision=self.precision,
            chunk=self.head(rows).chunk,
        )


def first_programs(run: TrainedRun) -> list[Program]:
    """The Programs that create the first state and the frozen part, or the parts of them that are not loaded."""
    plan, partition, averaging = run.state_plan, run.partition, run.config.trainer.model_averaging
    if run.adapted is not None:
        base = init_base_program(plan, run.build, run.adapted.base_dtype(run.precision))
        # With a checkpoint the base is loaded by the load plan, and no Program initializes it.
        first = [] if run.config.pretrained is not None else [base]
        if run.adapted.config.initialize_from is None:
            first.append(run.adapted.init_program(plan, run.transformation, averaging, base=run.frozen))
        else:
            first.append(run.adapted.begin_program(run.state, plan, run.transformation, averaging))
    elif run.config.pretrained is not None:
        # Rows of `reinit_tokens` are replaced in the Program that takes the loaded parameters.
        renewed = unchanged if run.renewed is None else run.renewed
        first = [init_optimizer_program(run.state, plan, run.transformation, averaging, renewed)]
    else:
        first = [init_program(plan, run.build, run.transformation, run.precision, partition, averaging)]
        if run.frozen is not None:
            first.append(init_frozen_program(plan, run.build, run.precision, partition))
    # Checkpoints identify the frozen part by a digest of each array; this Program computes them on the devices.
    if run.frozen is not None:
        first.append(digest_program(run.frozen, plan))
    return [replace(program, compiler_options=run.compiler.default) for program in first]


def step_programs(run: TrainedRun, batches: tuple[BatchStage, ...]) -> list[Program]:
    """One train step per batch size; if histograms are watched, a second one of each with them."""
    watch = Watch.of(run.config.trainer.watch)
    # The cheap statistics are in every step. A second step with histograms is compiled only if some are watched.
    steps = [_step(run, stage, None if watch is None else watch.cheap) for stage in distinct_stages(batches)]
    if watch is not None and watch.histograms:
        steps += [_step(run, stage, watch, WATCHED) for stage in distinct_stages(batches)]
    return steps


def _recipe(run: TrainedRun, batches: BatchPlan, watch: Watch | None) -> StepRecipe[Any]:
    trainer, optimizer = run.config.trainer, run.config.optimizer
    return StepRecipe(
        # The head's chunk is chosen for this stage's microbatch; stages of a batch schedule may need different ones.
        objective=replace(run.objective, chunk=run.head(batches.microbatch).chunk),
        optimizer=run.transformation,
        schedule=optimizer.schedule(trainer.num_train_steps),
        precision=run.precision,
        accumulation=batches.accumulation,
        parameters=run.state_plan.parameters,
        # Pairs bind several models, so their placement has paths such as `policy.…`.
        model=run.state_plan.model if run.pairs is None else run.pairs.model_plan(run.state_plan),
        bind=bind if run.pairs is None else run.pairs.bind,
        skip_nonfinite=trainer.skip_nonfinite_steps > 0,
        averaging=trainer.model_averaging,
        curvature=optimizer.curvature,
        outliers=optimizer.outliers,
        watch=watch,
        # XLA for CPUs does not order a read of a donated array before its write; see `StepRecipe`.
        norms_first=run.platform == "cpu",
        # Only dropout of adapters needs random bits, and a step without it carries none.
        draws=run.adapted is not None and run.adapted.config.dropout > 0,
    )


def _step(run: TrainedRun, stage: BatchStage, watch: Watch | None, suffix: str = "") -> Program:
    # A separate reference is an input of the step; the base of adapters already is one, as `frozen`.
    second = None if run.pairs is None else run.pairs.resident
    return step_program(
        _recipe(run, stage.plan, watch),
        state=run.state,
        frozen=run.frozen,
        reference=None if second is None else second.module,
        reference_plan=None if second is None else second.plan,
        plan=run.state_plan,
        batch=run.objective.abstract_batch(
            # `placed_rows` includes the padding rows of a batch that does not divide over the devices.
            hax.Axis(run.resolved.batch_axis, stage.plan.placed_rows),
            hax.Axis("position", run.config.positions),
        ),
        mappings=run.resolved.mappings,
        name=program_name(stage) + suffix,
        compiler_options=run.compiler.working["train"],
    )


def evaluation_program(run: TrainedRun, largest: BatchPlan, *, accuracy: bool = False) -> Program:
    """The Program that scores the validation sets between two steps.

    Args:
        run: the training run.
        largest: the batch whose microbatch rows are used, unless the configuration sets those of evaluation.
        accuracy: whether it also returns which tokens were the most likely.
    """
    per_device = run.config.trainer.per_device_eval_parallelism
    # -1 means as many rows on a device as a training microbatch has, whose memory is known to suffice.
    rows = run.resolved.batch_ways * (largest.per_device if per_device == -1 else per_device)
    return evaluate_program(
        replace(run.of_text, chunk=run.head(rows).chunk),
        bind(run.state.model, run.frozen),
        run.state_plan,
        rows=rows,
        positions=run.config.positions,
        precision=run.precision,
        resolved=run.resolved,
        compiler_options=run.compiler.working["score"],
        accuracy=accuracy,
    )


def pair_programs(run: TrainedRun, largest: BatchPlan) -> list[Program]:
    """The Programs that score pairs: validation, and the reference's log-probabilities if they are stored.

    Args:
        run: the training run.
        largest: the batch whose microbatch rows are used, unless the configuration sets those of evaluation.
    """
    assert run.pairs is not None
    per_device = run.config.trainer.per_device_eval_parallelism
    # As in `evaluation_program`.
    rows = run.resolved.batch_ways * (largest.per_device if per_device == -1 else per_device)
    settings: dict[str, Any] = {
        "rows": rows,
        "positions": run.config.positions,
        "chunk": run.head(rows).chunk,
        "precision": run.precision,
        "resolved": run.resolved,
        "compiler_options": run.compiler.working["score"],
    }
    programs = [evaluate_pairs_program(run.pairs, run.state.model, run.frozen, run.state_plan, **settings)]
    if run.pairs.text is not None:
        programs.append(evaluation_program(run, largest))
    if run.pairs.stores is None:
        return programs
    # Stored log-probabilities need one more Program, which runs once and before the others.
    return [reference_program(run.pairs, *run.pairs.scored_once(run.frozen, run.state_plan), **settings), *programs]
