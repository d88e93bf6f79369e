"""Trains a language model.

    python -m levanter.main.train_lm --config_path config/train/llama2_7b_v4-32.yaml

`describe` says what a run will do from the config and the number of devices alone: the batch and how it is divided,
where every parameter and every optimizer statistic lies, the Programs (`init_state`, or `init_optimizer` behind weights
that are read; then `train_step`, one for each batch size of a schedule). `levanter.main.plan train_lm` compiles
these same Programs for a pod that is not there.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import haliax as hax
import jax

from haliax_ext.activations import plan_activations
from haliax_ext.expected import ExpectedSource
from haliax_ext.load_plan import LoadPlan
from haliax_ext.load_strategy import plan_loading
from haliax_ext.program import Program
from haliax_ext.rules import WeightMismatchError
from levanter.commands.model.defaults import default_notes
from levanter.commands.model.layers import layer_checks
from levanter.commands.model.not_carried import not_carried
from levanter.commands.model.origin import Origin, find_tokenizer, vocabulary
from levanter.commands.model.pretrained import vocabulary_rows
from levanter.commands.model.workloads import WATCHED, distinct, program_name, training_workloads
from levanter.commands.shell.local import configure_jax, local_target, run_id
from levanter.commands.shell.sameness import require_same_config
from levanter.commands.train.checks import attempted, data_checks, place_checks, refuse_all
from levanter.commands.train.evaluation import evaluate_program, find_validation
from levanter.commands.train.instruments import run_facts
from levanter.commands.train.origin import beginning, completed
from levanter.commands.train.places import what_is_left
from levanter.commands.train.run import Trained, execute
from levanter.data import EvaluationData, LmDataConfig, Tokenizer
from levanter.hardware import compiler_options
from levanter.mesh import ModelAxes, ResolvedMesh, local_devices, mesh_report, require_accelerator, resolve
from levanter.models import LlamaConfig
from levanter.models.activations import transformer_activations
from levanter.models.axes import ALIASES, KNOWN_AXES
from levanter.models.precision import Precision
from levanter.models.registry import LmConfig
from levanter.models.scoring import planned_chunk
from levanter.optim import AdamConfig, OptimizerConfig
from levanter.run import OK, PREEMPTED, Check, PlanOptions, RunPlan, Target
from levanter.tracker import start_trackers
from levanter.trainer.batch_plan import BatchPlan, BatchStage, plan_batches
from levanter.trainer.config import TrainerConfig
from levanter.trainer.loss import LmBatch, LmObjective
from levanter.trainer.state import (
    StatePlan,
    TrainState,
    abstract_state,
    init_optimizer_program,
    init_program,
    plan_state,
)
from levanter.trainer.step import StepRecipe, step_program
from levanter.trainer.watch import Watch


@dataclass(frozen=True, kw_only=True)
class TrainLmConfig:
    """What `train_lm` trains, on what, and where.

    Attributes:
        data: the data sets and their weights.
        trainer: devices, mesh, batch, precision, trackers, checkpoints.
        model: the architecture.
        optimizer: optimizer and learning rate.
        train_seq_len: tokens in a row; default `model.max_seq_len`.
        initialize_from_hf: a Hugging Face checkpoint to begin from; true for the model's reference checkpoint.
        use_hf_model_config: whether that checkpoint's architecture replaces `model`.
        hf_checkpoint: both in one word: a Hugging Face checkpoint to begin from, with its architecture and tokenizer.
        initialize_from_checkpoint_path: a checkpoint of ours to begin from: parameters and optimizer statistics.
        initialize_model_from_checkpoint_path: a checkpoint of ours to begin from: parameters only.
        z_loss_weight: weight of the squared log-normalizer in the loss.
        data_seed: seed of the data's order; default `trainer.seed`.
        epoch: passes over the data; 0 for as many as the steps take.
        pad_tokenizer_to_match_model: whether a tokenizer with fewer ids than the model is accepted.
        hf_save_path, hf_save_steps, hf_save_dtype, hf_upload, hf_generation_eos_token_ids: the Hugging Face export.
        adapter, peft_save_path, peft_hf_upload, merged_hf_save_path, merged_hf_upload: low-rank adapters.
        eval_harness, eval_harness_steps, labeled_eval, log_entropy: what is evaluated during training.
        plan: what planning is told that a run would find out by itself.
    """

    data: LmDataConfig = field(default_factory=LmDataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    model: LmConfig = field(default_factory=LlamaConfig)
    optimizer: OptimizerConfig = field(default_factory=AdamConfig)
    train_seq_len: int | None = None
    initialize_from_hf: bool | str = False
    use_hf_model_config: bool = False
    hf_checkpoint: str | None = None
    initialize_from_checkpoint_path: str | None = None
    initialize_model_from_checkpoint_path: str | None = None
    z_loss_weight: float = 0.0
    data_seed: int | None = None
    epoch: int = 0
    pad_tokenizer_to_match_model: bool = False
    hf_save_path: str | None = None
    hf_save_steps: int = 10_000
    hf_save_dtype: str | None = None
    hf_upload: bool | str | None = None
    hf_generation_eos_token_ids: list[int] | None = None
    adapter: dict[str, Any] | None = None
    peft_save_path: str | None = None
    peft_hf_upload: str | None = None
    merged_hf_save_path: str | None = None
    merged_hf_upload: str | None = None
    eval_harness: dict[str, Any] | None = None
    eval_harness_steps: int = 10_000
    labeled_eval: dict[str, Any] | None = None
    log_entropy: bool = False
    plan: PlanOptions = field(default_factory=PlanOptions)

    def __post_init__(self) -> None:
        problems = []
        begins = {
            "hf_checkpoint": self.hf_checkpoint,
            "initialize_from_hf": self.initialize_from_hf,
            "initialize_from_checkpoint_path": self.initialize_from_checkpoint_path,
            "initialize_model_from_checkpoint_path": self.initialize_model_from_checkpoint_path,
            "trainer.initialize_from": self.trainer.initialize_from,
        }
        given = [name for name, value in begins.items() if value]
        if len(given) > 1:
            problems.append(f"{' and '.join(given)}: {len(given)} of them begin the run; keep one")
        if self.use_hf_model_config and not (self.initialize_from_hf or self.hf_checkpoint):
            problems.append("use_hf_model_config: needs initialize_from_hf, which names the checkpoint")
        if self.initialize_from_hf is True and self.model.reference_checkpoint is None:
            problems.append("initialize_from_hf: true stands for model.reference_checkpoint, which is null; name one")
        if self.train_seq_len is not None and self.train_seq_len < 2:
            problems.append(f"train_seq_len must be at least 2 (a token and the next), got {self.train_seq_len}")
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def reference(self) -> str | None:
        """The Hugging Face checkpoint that the run begins from."""
        named = self.hf_checkpoint or self.initialize_from_hf
        return self.model.reference_checkpoint if named is True else named or None

    @property
    def takes_architecture(self) -> bool:
        """Whether the checkpoint's architecture replaces `model`."""
        return self.use_hf_model_config or self.hf_checkpoint is not None

    @property
    def positions(self) -> int:
        """Tokens in a row."""
        return self.train_seq_len or self.model.max_seq_len


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
        bytes_by_group: bytes on a device of what stays there, by kind.
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
    bytes_by_group: dict[str, int]
    origin: Origin | None
    tokenizer: Tokenizer | None
    validation: EvaluationData | None


def describe(config: TrainLmConfig, target: Target) -> RunPlan:
    """Describes a training run for `target`; reads metadata only.

    Raises:
        ValueError: mesh, batch, schedule or precision cannot be resolved. What is wrong with the sharding is in the
            plan.
    """
    origin = beginning(config)
    config = completed(config, origin)
    trainer, positions = config.trainer, config.positions
    precision = Precision.parse(trainer.mp)
    checks = [*(() if origin is None else origin.checks), *not_carried(config)]
    checks += [] if config.takes_architecture else default_notes(config.model)
    architecture = config.model if origin is None else origin.architecture
    kernels_at = len(checks)
    checks += layer_checks(architecture)
    checks.append(Check(name="precision", status="ok", message=str(precision)))
    vocab, tokenizer, vocab_checks = _vocabulary(config, architecture)
    checks += data_checks(config.data, tokenizer, vocab_size=vocab)
    validation, validation_checks = find_validation(config.data)
    known = {check.message for check in checks}
    checks += [check for check in validation_checks if check.message not in known]
    problems: list[ValueError] = []
    resolved = attempted(problems, lambda: _resolved(config, architecture, vocab, target))
    batches = attempted(problems, lambda: () if resolved is None else _batches(config, resolved))
    transformation = attempted(problems, lambda: config.optimizer.build(trainer.num_train_steps))
    refuse_all(checks, problems)
    assert resolved is not None and batches is not None and transformation is not None
    model, reasons = architecture.for_platform(
        target.platform, compute_dtype=precision.compute, length=positions, parts=resolved.position_ways
    )
    checks[kernels_at:kernels_at] = [Check(name="kernels", status="ok", message=reason) for reason in reasons]
    checks += [
        Check(name="schedule", status="note", message=line)
        for line in config.optimizer.adjusted(trainer.num_train_steps)
    ]
    Vocab = hax.Axis("vocab", vocabulary_rows(vocab, resolved))
    model = replace(model, vocab_size=vocab)
    checks += vocab_checks
    if Vocab.size != vocab:
        rounded = f"{Vocab.size} rows of embedding and head, a multiple of what the mesh cuts"
        checks.append(Check(name="vocabulary", status="note", message=rounded))
    for stage in batches:
        since = f"from step {stage.start}: " if len(batches) > 1 else ""
        checks.append(Check(name="batch", status="ok", message=f"{since}{stage.plan}"))

    def build(key: jax.Array) -> Any:
        return model.build(Vocab, key=key)

    state = abstract_state(lambda: build(jax.random.PRNGKey(0)), transformation, precision)
    state_plan = plan_state(state, resolved.mappings, resolved.spec, hbm_bytes=trainer.mesh.hbm_bytes(target.hbm_bytes))
    largest = max((stage.plan for stage in batches), key=lambda plan: plan.microbatch)
    activations = plan_activations(
        transformer_activations(
            model,
            batch=(resolved.batch_axis, largest.microbatch),
            positions=positions,
            vocab=Vocab.size,
            chunk=planned_chunk(
                model,
                batch=(resolved.batch_axis, largest.microbatch),
                vocab=Vocab.size,
                mapping=resolved.mappings.compute,
                mesh=resolved.spec,
            ),
            dtype=precision.compute,
        ),
        resolved.mappings,
        resolved.spec,
    )
    load = None
    if origin is not None and not state_plan.parameters.errors:
        load, load_checks = _load_plan(origin, model, Vocab, state_plan, target)
        checks += load_checks
    if config.reference is None:
        first = init_program(state_plan, build, transformation, precision)
    else:
        first = init_optimizer_program(state, state_plan, transformation)
    options = compiler_options(target.platform, target.kind)
    first = replace(first, compiler_options=options)

    objective = LmObjective(
        segments=config.data.block_cross_document_attention,
        z_loss_weight=config.z_loss_weight,
        auxiliary_weights=model.auxiliary_weights,
    )

    def recipe(batches: BatchPlan, watch: Watch | None) -> StepRecipe[LmBatch]:
        return StepRecipe(
            objective=objective,
            optimizer=transformation,
            schedule=config.optimizer.schedule(trainer.num_train_steps),
            precision=precision,
            accumulation=batches.accumulation,
            parameters=state_plan.parameters,
            skip_nonfinite=trainer.skip_nonfinite_steps > 0,
            outliers=config.optimizer.outliers,
            watch=watch,
        )

    def step(stage: BatchStage, watch: Watch | None, suffix: str = "") -> Program:
        return step_program(
            recipe(stage.plan, watch),
            state=state,
            plan=state_plan,
            batch=objective.abstract_batch(
                hax.Axis(resolved.batch_axis, stage.plan.placed_rows), hax.Axis("position", positions)
            ),
            mappings=resolved.mappings,
            name=program_name(stage) + suffix,
            compiler_options=options,
        )

    watch = Watch.of(trainer.watch)
    steps = [step(stage, None if watch is None else watch.cheap) for stage in distinct(batches)]
    if watch is not None and watch.histograms:
        steps += [step(stage, watch, WATCHED) for stage in distinct(batches)]
    checks += place_checks(config, model, state_plan)
    evaluations = []
    if validation is not None:
        per_device = trainer.per_device_eval_parallelism
        evaluations.append(
            evaluate_program(
                objective,
                state.model,
                state_plan,
                rows=resolved.batch_ways * (largest.per_device if per_device == -1 else per_device),
                positions=positions,
                precision=precision,
                resolved=resolved,
                compiler_options=options,
            )
        )
    return RunPlan(
        entry_point="train_lm",
        target=target,
        mesh=resolved.spec,
        checks=tuple(checks),
        sharding=state_plan.whole,
        activations=activations,
        load=load,
        programs=(first, *steps, *evaluations),
        workloads=tuple(training_workloads(model, batches, vocab, positions=positions, steps=trainer.num_train_steps)),
        notes=resolved.notes,
        work=TrainWork(
            config=config,
            model=model,
            Vocab=Vocab,
            precision=precision,
            resolved=resolved,
            state=state,
            state_plan=state_plan,
            batches=batches,
            bytes_by_group=state_plan.bytes_by_group,
            origin=origin,
            tokenizer=tokenizer,
            validation=validation,
        ),
    )


def _resolved(config: TrainLmConfig, model: LmConfig, vocab: int, target: Target) -> ResolvedMesh:
    """The mesh and the mappings."""
    axes = ModelAxes(
        sizes={**{a.name: a.size for a in model.axes.values()}, "vocab": vocab, "position": config.positions},
        known=KNOWN_AXES,
        aliases=ALIASES,
    )
    return resolve(config.trainer.mesh, axes, devices=target.devices, granules=target.granules)


def _batches(config: TrainLmConfig, resolved: ResolvedMesh) -> tuple[BatchStage, ...]:
    """How each batch is divided."""
    return plan_batches(
        config.trainer.train_batch_size,
        per_device=config.trainer.per_device_parallelism,
        ways=resolved.batch_ways,
        positions=config.positions,
        allow_padding=config.trainer.allow_nondivisible_batch_size,
        mesh=str(resolved.spec),
    )


def _vocabulary(config: TrainLmConfig, model: LmConfig) -> tuple[int, Tokenizer | None, tuple[Check, ...]]:
    """How many ids there are, the tokenizer where it is here, and what was looked at to know it."""
    name = config.data.tokenizer
    if model.vocab_size is None and config.data.vocab_size is not None:
        model = replace(model, vocab_size=config.data.vocab_size)
    found, tokenizer = find_tokenizer(name, origin=None, size=model.vocab_size)
    size, how = vocabulary(model, tokenizer=found, names=(name, model.tokenizer))
    return size, found, (tokenizer, Check(name="vocabulary", status="ok", message=f"{size} ids, {how}"))


def _load_plan(
    origin: Origin, model: LmConfig, Vocab: hax.Axis, plan: StatePlan, target: Target
) -> tuple[LoadPlan | None, list[Check]]:
    rules = model.weight_rules(Vocab)
    leaves = [leaf_plan.leaf for leaf_plan in plan.parameters.leaves]
    expected = ExpectedSource.of(rules, leaves, dtype=origin.stored)
    try:
        return plan_loading(
            plan.parameters,
            rules,
            expected if origin.checkpoint is None else origin.checkpoint.source,
            hosts=target.host_layout(plan.parameters.mesh),
        ), []
    except WeightMismatchError as error:
        return None, [Check(name="weights", status="error", message=str(error), error=error)]


def train(config: TrainLmConfig) -> Trained:
    """Trains on the devices that are here; prints the plan before and what came of it behind."""
    configure_jax(config.trainer)
    found = local_devices(config.trainer.mesh)
    require_accelerator(wanted=config.trainer.require_accelerator, found=found)
    id_ = run_id(config.trainer)
    config = replace(config, trainer=replace(config.trainer, id=id_))
    plan = describe(config, local_target(found))
    show = jax.process_index() == 0
    if show:
        print(mesh_report(plan.mesh, found, mappings=plan.sharding.mappings, bytes_per_device=plan.work.bytes_by_group))
        print(plan.report())
    plan.check()
    require_same_config(config)
    if show:
        print(f"run {id_}: trainer.id={id_} goes on behind its last checkpoint", flush=True)
    tracker = start_trackers(config.trainer.trackers, run_id=id_, process_index=jax.process_index())
    try:
        tracker.log_hyperparameters(run_facts(plan))
        try:
            done = execute(plan, plan.mesh.build(found.devices), run_id=id_, tracker=tracker)
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(what_is_left(config, id_)) from stop
        tracker.log_summary(done.summary)
    finally:
        tracker.finish()
    if show:
        print(done)
    return done


def main(config: TrainLmConfig) -> int:
    """Trains; 75 where the run was told to stop before its end and saved itself."""
    return PREEMPTED if train(config).preempted else OK
