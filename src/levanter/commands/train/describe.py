"""Describes and registers any kind of training: `describe_training`, and the entry point of a command that trains."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np

from haliax_ext.abstract import abstract, cast, leaves
from haliax_ext.load_plan import LoadPlan
from haliax_ext.program import Program
from haliax_ext.replica_slices import replica_slices_program
from haliax_ext.saving import saving_programs
from levanter.commands.model.sharding import pattern_checks, plan_weight_loading, vocabulary_axis
from levanter.commands.model.workloads import training_workloads
from levanter.commands.train.adapters import frozen_base, open_initial_adapters, plan_peft_export, resolve_adapters
from levanter.commands.train.checks import group_checks, profiler_checks, run_dir_checks
from levanter.commands.train.lm.lm_eval_hook import find_harness
from levanter.commands.train.monitoring import run_facts
from levanter.commands.train.programs import coresident_bytes, first_programs, step_programs
from levanter.commands.train.resolved import resolve_training_config
from levanter.commands.train.run import execute
from levanter.commands.train.run_dirs import interrupted_message, run_outputs
from levanter.commands.train.samples import find_live_texts
from levanter.commands.train.saving import training_job
from levanter.commands.train.task import BetweenSteps, TrainingTask
from levanter.commands.train.trained_run import ResolvedTraining, TrainedRun
from levanter.commands.train.work import Trained, TrainPlan, TrainWork
from levanter.compat.hf.export import ExportPlan, plan_export
from levanter.compat.hf.peft import PeftPlan
from levanter.config import ExplicitKeys
from levanter.models.base import LmHeadModel
from levanter.models.param_groups import EMBEDDING, HEAD, parameter_group
from levanter.runplan import (
    OK,
    PREEMPTED,
    Check,
    EntryPoint,
    NonFiniteResultError,
    RunPlan,
    Searchable,
    Session,
    Target,
)
from levanter.trainer.adapter_state import Adapted
from levanter.trainer.batch_plan import BatchPlan
from levanter.trainer.frozen_part import frozen_part, head_notes, partition_notes, spared_flops
from levanter.trainer.objective import Objective
from levanter.trainer.reinit_rows import VOCAB, RenewedRows
from levanter.trainer.state import abstract_frozen, abstract_state, plan_state, without_ruled
from levanter.trainer.train_state import AVERAGE, OPTIMIZER
from levanter.trainer.trainable import Partition

C = TypeVar("C")

REINIT_TOKENS = "reinit_tokens"


def describe_training(task: TrainingTask, target: Target, *, written: ExplicitKeys, name: str) -> TrainPlan:
    """Describes a training run for `target`; reads metadata only.

    Args:
        task: what is trained.
        target: the devices.
        written: the keys that the user wrote.
        name: of the command.

    Raises:
        ValueError: mesh, batch, schedule or precision cannot be resolved. What is wrong with the sharding is in the
            plan.
    """
    training = resolve_training_config(task, target, written)
    config, origin, vocab, resolved = training.config, training.origin, training.vocab, training.resolved
    task, checks = replace(task, config=config), list(training.checks)
    Vocab = vocabulary_axis(vocab, resolved)
    model = training.model
    if Vocab.size != vocab:
        rounded = f"{Vocab.size} rows of embedding and head, a multiple of their shards"
        checks.append(Check(name="vocabulary", status="note", message=rounded))
    for stage in training.batches:
        since = f"from step {stage.start}: " if len(training.batches) > 1 else ""
        checks.append(Check(name="batch", status="ok", message=f"{since}{stage.plan}"))

    run = _trained(training, Vocab, target, task.objective(model))
    run = replace(run, models=task.find_models(run, target))
    checks += run.models.checks
    state_plan = run.state_plan
    part = frozen_part(config.trainer, state_plan, begun_from=config.pretrained or config.begun_from_checkpoint)
    parameters = [planned.leaf for planned in state_plan.parameters.leaves]
    checks += pattern_checks(config.trainer.mesh, resolved.spec, parameters)
    checks += [*partition_notes(state_plan), *head_notes(state_plan), *group_checks(config.optimizer, run.state.model)]
    checks += profiler_checks(config.trainer.profiler, target)
    # The largest microbatch needs the most memory for the head and the activations.
    largest = max((stage.plan for stage in run.batches), key=lambda plan: plan.microbatch)
    checks.append(Check(name="output head", status="note", message=str(run.head(largest.microbatch))))
    load = None
    # A placement with errors has no byte ranges to read.
    if origin is not None and not state_plan.parameters.errors:
        load, load_checks = plan_weight_loading(origin, model, Vocab, state_plan.loaded, target, rules=run.rules)
        checks += load_checks
    between_steps = (*task.between_steps(run, largest), *find_between_steps(run, largest, target))
    programs = (
        *task.programs_before_state(run, largest),
        *first_programs(run),
        *step_programs(run, run.batches),
        *(program for work in between_steps for program in work.programs),
    )
    checks += [check for work in between_steps for check in work.checks]
    checks += run_dir_checks(run, part, task.resume_keys)
    peft = plan_peft_export(run)
    saving = _saving(run, target, peft)
    return RunPlan(
        entry_point=name,
        target=target,
        mesh=resolved.spec,
        checks=tuple(checks),
        sharding=run.resident,
        activations=run.activations(largest.microbatch),
        load=load,
        computing=programs,
        saving=saving,
        workloads=(
            *training_workloads(
                model,
                run.batches,
                vocab,
                positions=config.positions,
                steps=config.trainer.num_train_steps,
                spared=spared_flops(model, run.state.model, run.frozen, vocab=vocab),
                sequences=run.objective.sequences,
                scored_besides=run.models.forward_passes,
            ),
            *(workload for work in between_steps for workload in work.workloads),
        ),
        job=training_job(run, load, target, exported=_exported_bytes(run, load, peft)),
        notes=resolved.notes,
        resident_bytes=run.resident_bytes,
        coresident_bytes=coresident_bytes(run, programs, saving, between_steps),
        second_load=None if run.models.reference is None else run.models.reference.load,
        searchable=_searchable(run),
        work=TrainWork(
            **vars(run),
            task=task,
            between_steps=between_steps,
            begun=open_initial_adapters(run),
            peft=peft,
            frozen_part=part,
        ),
    )


def find_between_steps(run: TrainedRun, largest: BatchPlan, target: Target) -> tuple[BetweenSteps, ...]:
    """The work between steps that keys of every training run request, in the order in which it is done.

    Args:
        run: the training run.
        largest: the batch whose microbatch rows are used, unless the configuration sets those of evaluation.
        target: the devices.
    """
    harness = find_harness(run, run.tokenizer, largest)
    task_length = harness.length if harness is not None and harness.scoring.tasks.generates else None
    # One engine serves the samples and the tasks.
    texts = find_live_texts(run, run.tokenizer, target, task_length=task_length)
    if harness is not None and texts is not None and task_length is not None:
        harness = replace(harness, generation=texts.generation)
    requested: tuple[BetweenSteps | None, ...] = (harness, texts)
    return tuple(work for work in requested if work is not None)


def _trained(training: ResolvedTraining, Vocab: hax.Axis, target: Target, objective: Objective) -> TrainedRun:
    """The abstract trained and frozen parts of the model, and their placement."""
    model = training.model

    def build(key: jax.Array) -> LmHeadModel:
        return model.build(Vocab, key=key)

    # Only traced by `abstract`: shapes and dtypes, no array. The seed does not matter.
    def example() -> LmHeadModel:
        return build(jax.random.PRNGKey(0))

    training = replace(training, transformation=without_ruled(training.transformation, objective.rules))
    trainer, resolved = training.config.trainer, training.resolved
    partition = Partition.of(trainer.trainable, abstract(example))
    # None unless `adapter:` is set; then all of the model's own parameters are frozen.
    adapted = resolve_adapters(training.config, model, Vocab, abstract(example))
    mappings, rules = resolved.mappings, None
    renewed = _reinit_rows(training, abstract(example), partition, adapted)
    # Adapters own the copies of table and head, so they reinitialize their rows.
    if adapted is not None and renewed is not None:
        adapted = replace(adapted, renewed=renewed)
    if adapted is None:
        state = abstract_state(example, training.transformation, training.precision, partition, trainer.model_averaging)
        frozen = abstract_frozen(example, training.precision, partition)
    else:
        # A frozen base needs no float32 master copy: it is held in the compute dtype, or in int8.
        base = cast(abstract(example), adapted.base_dtype(training.precision))
        frozen, rules = frozen_base(training, adapted, Vocab, base)
        state = adapted.abstract_state(training.transformation, trainer.model_averaging, base=frozen)
        # Overrides that place the factors (`adapter.placement`).
        mappings = adapted.placed(mappings, resolved.spec)
    hbm_bytes = trainer.mesh.hbm_bytes(target.hbm_bytes)
    return TrainedRun(
        **vars(training),
        Vocab=Vocab,
        build=build,
        state=state,
        partition=partition,
        frozen=frozen,
        adapted=adapted,
        state_plan=plan_state(
            state, mappings, resolved.spec, frozen=frozen, hbm_bytes=hbm_bytes, rules=objective.rules
        ),
        platform=target.platform,
        objective=objective,
        rules=rules,
        renewed=renewed,
    )


def _reinit_rows(
    training: ResolvedTraining, module: LmHeadModel, partition: Partition, adapted: Adapted | None
) -> RenewedRows | None:
    """The rows to reinitialize; None for none.

    Args:
        training: the run; without its tokenizer the ids of the tokens are unknown.
        module: the model, abstract.
        partition: which of the model's own parameters are trained.
        adapted: the adapters that are trained; None for none.

    Raises:
        ValueError: a string is not a single token, or its rows are frozen; lists all problems.
    """
    config, tokenizer = training.config, training.tokenizer
    tokens = config.reinit_tokens or ()
    if not isinstance(tokens, list | tuple) or not tokens:
        return None
    wanted = {EMBEDDING: config.reinit_embeddings, HEAD: config.reinit_lm_head}
    # Leaves with a vocabulary axis: the embedding table, and the head unless it is tied to the table.
    chosen = [leaf for leaf in leaves(module) if VOCAB in leaf.names and wanted.get(parameter_group(leaf), False)]
    problems: list[str] = []
    for leaf in chosen:
        # New rows are random. If they were frozen, no step would ever give them a meaning.
        if not partition.trains(leaf):
            problems.append(
                f"{REINIT_TOKENS}: {leaf.path} is frozen (trainer.trainable), and its new rows would stay random"
            )
        if adapted is not None and leaf.path not in adapted.whole:
            key = "reinit_embeddings" if parameter_group(leaf) == EMBEDDING else "reinit_lm_head"
            problems.append(
                f"{REINIT_TOKENS}: {leaf.path} is frozen while adapters are trained, so its new rows would stay "
                f"random; name it in adapter.modules_to_save, or leave it as it is with {key}: false"
            )
    # Without a tokenizer the plan still needs the number of rows; the ids then only stand in for it.
    ids = list(range(len(tokens)))
    if tokenizer is not None:
        encodings = [encoded.tolist() for encoded in tokenizer.encode_batch(list(tokens))]
        multi_token = [token for token, encoding in zip(tokens, encodings, strict=True) if len(encoding) != 1]
        if multi_token:
            problems.append(
                f"{REINIT_TOKENS}: {', '.join(map(repr, multi_token))}: no single token of {tokenizer.name}"
            )
        # An empty encoding has no first id; it is listed among the problems already.
        ids = [encoding[0] for encoding in encodings if encoding]
    if not chosen:
        problems.append(
            f"{REINIT_TOKENS}: reinit_embeddings and reinit_lm_head exclude every row, so nothing is reinitialized"
        )
    if problems:
        raise ValueError("\n".join(problems))
    return RenewedRows(paths=tuple(leaf.path for leaf in chosen), ids=tuple(ids), vocab=training.vocab)


def _saving(run: TrainedRun, target: Target, peft: PeftPlan | None) -> tuple[Program, ...]:
    """The Programs of checkpoints and of exports."""
    config, state, parameters = run.config, run.state_plan, run.state_plan.parameters
    # There is no gather to plan for an array without a valid placement; the errors are in the plan already.
    if parameters.errors or state.whole.errors:
        return ()
    # None if no array is replicated over devices.
    slicing = replica_slices_program(state.whole)
    programs = () if slicing is None else (slicing,)
    if peft is not None:
        return (*programs, *saving_programs(peft.tensors, parameters, hosts=target.hosts))
    if config.hf_save_path is None:
        return programs
    # A whole-model export gathers every parameter in the order of the files.
    return (*programs, *saving_programs(_model_files(run).tensors, parameters, hosts=target.hosts))


def _model_files(run: TrainedRun) -> ExportPlan:
    """The files of an export of the whole model."""
    parameters = [planned.leaf for planned in run.state_plan.parameters.leaves]
    return plan_export(parameters, run.model, run.Vocab, dtype=run.config.hf_save_dtype)


def _exported_bytes(run: TrainedRun, load: LoadPlan | None, peft: PeftPlan | None) -> int:
    """Bytes of the weights of one export: of the model, of the adapters, of the model with adapters merged into it."""
    config = run.config
    if config.hf_save_path is not None:
        return 0 if run.state_plan.parameters.errors else _model_files(run).nbytes
    nbytes = 0
    if config.peft_save_path is not None and peft is not None:
        nbytes += sum(tensor.nbytes for tensor in peft.tensors)
    if config.merged_hf_save_path is not None and load is not None:
        # Merged files have the tensors of the checkpoint, in its dtypes unless one is given.
        dtype = config.hf_save_dtype
        base = [planned.leaf for planned in load.sharding.leaves]
        converted = 0 if dtype is None else sum(math.prod(leaf.shape) for leaf in base) * jnp.dtype(dtype).itemsize
        nbytes += converted or load.source_bytes
    return nbytes


def _searchable(run: TrainedRun) -> Searchable | str:
    """The inputs of the layout search."""
    parameters, whole = run.state_plan.parameters, run.state_plan.whole
    rows, parameter_paths = run.config.trainer.train_batch_size, {planned.leaf.path for planned in parameters.leaves}
    if not isinstance(rows, int):
        return "trainer.train_batch_size is a schedule; search with a single size"
    sizes = {axis.name: axis.size for axis in run.model.axes.values()}
    # The search tries other meshes on these sizes, without building the model again.
    return Searchable(
        training=True,
        parameters=tuple(planned.leaf for planned in parameters.leaves),
        statistics=tuple(
            # Moments and averages, which the search places in addition to the parameters.
            planned.leaf
            for planned in whole.leaves
            if planned.leaf.path.startswith((OPTIMIZER, AVERAGE)) and planned.leaf.path not in parameter_paths
        ),
        frozen=run.state_plan.frozen,
        sizes={**sizes, "vocab": run.Vocab.size, "position": run.config.positions},
        tensor_axes=run.model.tensor_axes,
        layers=len(run.model.layers),
        windows=run.model.windows,
        summed=sum(bool(part.tensor_axes) for layer in run.model.layers for part in layer.parts),
        batch_axis=run.resolved.batch_axis,
        # A row may be several sequences, and the search counts sequences.
        global_batch=rows * run.objective.sequences,
        compute_bytes=np.dtype(run.precision.compute).itemsize,
        keys=lambda rows, _: {"trainer.per_device_parallelism": rows // run.objective.sequences},
        remat_key="model.gradient_checkpointing",
        overrides=run.config.trainer.mesh.overrides,
    )


def finish(plan: TrainPlan, done: Trained, session: Session) -> int:
    """Prints the result; returns 75 if a signal stopped the run before its end and its state was saved."""
    del plan
    session.tracker.log_summary(done.summary)
    if session.show:
        print(done, flush=True)
    if done.preempted:
        return PREEMPTED
    # With `crash_on_nan: false` a run continues to its end, and its failure is reported here.
    if done.loss is not None and not math.isfinite(done.loss):
        raise NonFiniteResultError(f"the loss of the last step is {done.loss}")
    if done.evaluation is not None and done.evaluation.not_finite:
        raise NonFiniteResultError(f"the validation loss of {', '.join(done.evaluation.not_finite)} is not finite")
    return OK


def training_entry_point(
    name: str, config: type[C], task: Callable[[C], TrainingTask]
) -> EntryPoint[C, TrainWork, Trained]:
    """The entry point of a command that trains.

    Args:
        name: the command's.
        config: the class of its configuration.
        task: a configuration → what is trained; its own configuration may be a translation of the command's.
    """

    def describe(config: C, target: Target, *, written: ExplicitKeys | None = None) -> TrainPlan:
        """Describes the training run; see `describe_training`."""
        # The keys are those of the command's own config: its translation also sets keys that the user did not write.
        written = ExplicitKeys.in_python(config) if written is None else written
        return describe_training(task(config), target, written=written, name=name)

    def describe_full_finetune(config: C, target: Target, *, written: ExplicitKeys | None = None) -> TrainPlan:
        """Describes the same run without adapters, every weight trained; see `describe`."""
        written = ExplicitKeys.in_python(config) if written is None else written
        adapted = task(config)
        whole = replace(adapted, config=adapted.config.without_adapter)
        return describe_training(whole, target, written=written, name=name)

    return EntryPoint(
        name=name,
        config=config,
        describe=describe,
        execute=execute,
        outputs=lambda plan, session: run_outputs(plan.work.config, session.run_id),
        finish=finish,
        facts=run_facts,
        interrupted_message=lambda plan, session: interrupted_message(plan.work.config, session.run_id),
        describe_full_finetune=describe_full_finetune,
    )
