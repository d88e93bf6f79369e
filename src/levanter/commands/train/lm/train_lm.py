"""Trains a language model.

    python -m levanter.main.train_lm --config_path config/train/llama2_7b_v4-32.yaml

`describe` derives what a run will do from the config and the number of devices alone: the batch and how it is divided,
the placement of every parameter and of the optimizer state, the Programs (`init_state`, or `init_optimizer` after
loading weights; then `train_step`, one for each batch size of a schedule). `levanter.main.plan train_lm` compiles these
same Programs for a pod that you do not have.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import haliax as hax
import jax
import numpy as np

from haliax_ext.abstract import abstract, cast
from haliax_ext.program import Program
from haliax_ext.replica_slices import replica_slices_program
from haliax_ext.saving import saving_programs
from levanter.commands.cli.runner import run_config
from levanter.commands.model.sharding import plan_weight_loading, vocabulary_axis
from levanter.commands.model.workloads import training_workloads
from levanter.commands.train.adapters import frozen_base, open_initial_adapters, plan_peft_export, resolve_adapters
from levanter.commands.train.checks import group_checks, run_dir_checks
from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train.dpo.setup import find_preferences
from levanter.commands.train.frozen import frozen_part, head_notes, partition_notes, spared_flops
from levanter.commands.train.lm.lm_eval_hook import find_harness
from levanter.commands.train.monitoring import run_facts
from levanter.commands.train.programs import (
    TrainedRun,
    evaluation_program,
    first_programs,
    pair_programs,
    step_programs,
)
from levanter.commands.train.reinit_tokens import resolve_reinit_rows
from levanter.commands.train.resident_bytes import coresident_bytes
from levanter.commands.train.resolved import ResolvedTraining, resolve_training_config
from levanter.commands.train.run import execute
from levanter.commands.train.run_dirs import interrupted_message, run_outputs
from levanter.commands.train.samples import find_live_texts
from levanter.commands.train.task import BetweenSteps
from levanter.commands.train.work import Trained, TrainPlan, TrainWork
from levanter.compat.hf.export import plan_export
from levanter.compat.hf.peft import PeftPlan
from levanter.config import ExplicitKeys
from levanter.data import Tokenizer, has_chats
from levanter.models.base import LmHeadModel
from levanter.models.registry import LmConfig
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
    Workload,
)
from levanter.trainer.batch_plan import BatchPlan
from levanter.trainer.loss import LmObjective
from levanter.trainer.state import StatePlan, abstract_frozen, abstract_state, plan_state, without_ruled
from levanter.trainer.train_state import AVERAGE, OPTIMIZER
from levanter.trainer.trainable import Partition

NAME = "train_lm"


def describe(
    config: TrainLmConfig, target: Target, *, written: ExplicitKeys | None = None, objective: LmObjective | None = None
) -> TrainPlan:
    """Describes a training run for `target`; reads metadata only.

    Args:
        config: what is trained.
        target: the devices.
        written: the keys that the user wrote; None for a config made in Python.
        objective: a custom objective, from Python, on the same batches. Its segments, z-loss and auxiliary weights come
            from the configuration.

    Raises:
        ValueError: mesh, batch, schedule or precision cannot be resolved. What is wrong with the sharding is in the
            plan.
    """
    training = resolve_training_config(config, target, ExplicitKeys.in_python(config) if written is None else written)
    config, origin, model, vocab = training.config, training.origin, training.model, training.vocab
    batches, resolved, checks = training.batches, training.resolved, list(training.checks)
    trainer = config.trainer
    Vocab = vocabulary_axis(vocab, resolved)
    # The true size; `Vocab` is rounded up so that it divides over its shards.
    model = replace(model, vocab_size=vocab)
    if Vocab.size != vocab:
        rounded = f"{Vocab.size} rows of embedding and head, a multiple of their shards"
        checks.append(Check(name="vocabulary", status="note", message=rounded))
    for stage in batches:
        since = f"from step {stage.start}: " if len(batches) > 1 else ""
        checks.append(Check(name="batch", status="ok", message=f"{since}{stage.plan}"))

    run = _with_pairs(training, _trained(training, model, Vocab, target, objective or LmObjective()), target)
    checks += () if run.pairs is None else run.pairs.checks
    state_plan = run.state_plan
    part = frozen_part(trainer, state_plan, begun_from=config.pretrained or config.begun_from_checkpoint)
    checks += [*partition_notes(state_plan), *head_notes(state_plan), *group_checks(config.optimizer, run.state.model)]
    # The largest microbatch needs the most memory for the head and the activations.
    largest = max((stage.plan for stage in batches), key=lambda plan: plan.microbatch)
    checks.append(Check(name="output head", status="note", message=str(run.head(largest.microbatch))))
    load = None
    # A placement with errors has no byte ranges to read.
    if origin is not None and not state_plan.parameters.errors:
        load, load_checks = plan_weight_loading(origin, model, Vocab, state_plan.loaded, target, rules=run.rules)
        checks += load_checks
    programs = [*first_programs(run), *step_programs(run, batches), *_scoring(training, run, largest)]
    between_steps = find_between_steps(run, training.tokenizer, largest, target)
    for work in between_steps:
        checks += work.checks
        programs += work.programs
    # A precomputed reference runs before all others; the plan lists Programs in their order.
    if run.pairs is not None:
        programs = run.pairs.in_order(programs)
    checks += run_dir_checks(config, model, state_plan, part)
    peft = plan_peft_export(config, run.adapted, model, Vocab, state_plan)
    saving = _saving(config, model, Vocab, state_plan, target, peft)
    return RunPlan(
        entry_point=NAME,
        target=target,
        mesh=resolved.spec,
        checks=tuple(checks),
        sharding=run.resident,
        activations=run.activations(largest.microbatch),
        load=load,
        computing=tuple(programs),
        saving=saving,
        workloads=(*_workloads(training, run), *(workload for work in between_steps for workload in work.workloads)),
        notes=resolved.notes,
        resident_bytes=run.resident_bytes,
        coresident_bytes=coresident_bytes(state_plan, programs, saving, between_steps, run.pairs),
        second_load=run.second_load,
        searchable=_searchable(run, state_plan, Vocab),
        work=TrainWork(
            config=config,
            model=model,
            Vocab=Vocab,
            precision=training.precision,
            resolved=resolved,
            state=run.state,
            partition=run.partition,
            frozen=run.frozen,
            adapted=run.adapted,
            begun=open_initial_adapters(run.adapted, model, Vocab, abstract(lambda: run.build(jax.random.PRNGKey(0)))),
            peft=peft,
            frozen_part=part,
            state_plan=state_plan,
            batches=batches,
            origin=origin,
            tokenizer=training.tokenizer,
            validation=training.validation,
            pairs=run.pairs,
            between_steps=between_steps,
        ),
    )


def describe_full_finetune(config: TrainLmConfig, target: Target, *, written: ExplicitKeys | None = None) -> TrainPlan:
    """Describes the same run without its adapters, every weight trained; see `describe`."""
    written = ExplicitKeys.in_python(config) if written is None else written
    return describe(config.without_adapter, target, written=written)


def _trained(
    training: ResolvedTraining, model: LmConfig, Vocab: hax.Axis, target: Target, objective: LmObjective
) -> TrainedRun:
    """The abstract trained and frozen parts of the model, and their placement."""

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
    renewed = resolve_reinit_rows(
        training.config,
        abstract(example),
        tokenizer=training.tokenizer,
        vocab=training.vocab,
        partition=partition,
        adapted=adapted,
    )
    # Adapters own the copies of table and head, so they reinitialize their rows.
    if adapted is not None and renewed is not None:
        adapted = replace(adapted, renewed=renewed)
    if adapted is None:
        state = abstract_state(example, training.transformation, training.precision, partition, trainer.model_averaging)
        frozen = abstract_frozen(example, training.precision, partition)
    else:
        # A frozen base needs no float32 master copy: it is held in the compute dtype, or in int8.
        base = cast(abstract(example), adapted.base_dtype(training.precision))
        frozen, rules = frozen_base(training.config, adapted, training.origin, model, Vocab, base)
        state = adapted.abstract_state(training.transformation, trainer.model_averaging, base=frozen)
        # Overrides that place the factors (`adapter.placement`).
        mappings = adapted.placed(mappings, resolved.spec)
    hbm_bytes = trainer.mesh.hbm_bytes(target.hbm_bytes)
    return TrainedRun(
        config=training.config,
        model=model,
        Vocab=Vocab,
        build=build,
        transformation=training.transformation,
        precision=training.precision,
        resolved=resolved,
        state=state,
        partition=partition,
        frozen=frozen,
        adapted=adapted,
        state_plan=plan_state(
            state, mappings, resolved.spec, frozen=frozen, hbm_bytes=hbm_bytes, rules=objective.rules
        ),
        compiler=training.compiler,
        platform=target.platform,
        kind=objective,
        rules=rules,
        renewed=renewed,
    )


def _with_pairs(training: ResolvedTraining, run: TrainedRun, target: Target) -> TrainedRun:
    """The run, with its preference setup if it trains on pairs."""
    pairs = find_preferences(
        training.config,
        training.written,
        training.origin,
        vocab=(run.Vocab, training.vocab),
        precision=run.precision,
        resolved=run.resolved,
        target=target,
        hbm_bytes=run.state_plan.whole.hbm_bytes,
        base_bytes=run.state_plan.loaded.bytes_per_device,
    )
    return replace(run, pairs=pairs)


def _scoring(training: ResolvedTraining, run: TrainedRun, largest: BatchPlan) -> list[Program]:
    """The Programs that score between steps."""
    if run.pairs is not None:
        return pair_programs(run, largest)
    if training.validation is None:
        return []
    return [evaluation_program(run, largest, accuracy=has_chats(training.config.data))]


def find_between_steps(
    run: TrainedRun, tokenizer: Tokenizer | None, largest: BatchPlan, target: Target
) -> tuple[BetweenSteps, ...]:
    """The work between steps that keys of every training run request, in the order in which it is done.

    Args:
        run: the training run.
        tokenizer: of the data; None if it is not available here.
        largest: the batch whose microbatch rows are used, unless the configuration sets those of evaluation.
        target: the devices.
    """
    harness = find_harness(run, tokenizer, largest)
    task_length = harness.length if harness is not None and harness.tasks.generates else None
    # One engine serves the samples and the tasks.
    texts = find_live_texts(run, tokenizer, target, task_length=task_length)
    if harness is not None and texts is not None and task_length is not None:
        harness = replace(harness, generation=texts.generation)
    requested: tuple[BetweenSteps | None, ...] = (harness, texts)
    return tuple(work for work in requested if work is not None)


def _workloads(training: ResolvedTraining, run: TrainedRun) -> Iterator[Workload]:
    """The work of each step."""
    config = training.config
    return training_workloads(
        run.model,
        training.batches,
        training.vocab,
        positions=config.positions,
        steps=config.trainer.num_train_steps,
        spared=spared_flops(run.model, run.state.model, run.frozen, vocab=training.vocab),
        sequences=run.sequences,
        scored_besides=0.0 if run.pairs is None else run.pairs.scored_besides,
    )


def _saving(
    config: TrainLmConfig, model: LmConfig, Vocab: hax.Axis, state: StatePlan, target: Target, peft: PeftPlan | None
) -> tuple[Program, ...]:
    """The Programs of checkpoints and of exports."""
    parameters = state.parameters
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
    files = plan_export([planned.leaf for planned in parameters.leaves], model, Vocab, dtype=config.hf_save_dtype)
    return (*programs, *saving_programs(files.tensors, parameters, hosts=target.hosts))


def _searchable(run: TrainedRun, plan: StatePlan, Vocab: hax.Axis) -> Searchable | str:
    """The inputs of the layout search."""
    parameters, whole = plan.parameters, plan.whole
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
        frozen=plan.frozen,
        sizes={**sizes, "vocab": Vocab.size, "position": run.config.positions},
        tensor_axes=run.model.tensor_axes,
        layers=len(run.model.layers),
        windows=run.model.windows,
        summed=sum(bool(part.tensor_axes) for layer in run.model.layers for part in layer.parts),
        batch_axis=run.resolved.batch_axis,
        # A row of pairs is two sequences, and the search counts sequences.
        global_batch=rows * run.sequences,
        compute_bytes=np.dtype(run.precision.compute).itemsize,
        keys=lambda rows, _: {"trainer.per_device_parallelism": rows // run.sequences},
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


ENTRY_POINT = EntryPoint(
    name=NAME,
    config=TrainLmConfig,
    describe=describe,
    execute=execute,
    outputs=lambda plan, session: run_outputs(plan.work.config, session.run_id),
    finish=finish,
    facts=run_facts,
    interrupted_message=lambda plan, session: interrupted_message(plan.work.config, session.run_id),
    describe_full_finetune=describe_full_finetune,
)


def train(config: TrainLmConfig) -> Trained:
    """Trains on the available devices; prints the plan before and the outcome after."""
    done = run_config(ENTRY_POINT, config).result
    assert done is not None, "training is done by every process"
    return done


def main(config: TrainLmConfig, *, written: ExplicitKeys | None = None) -> int:
    """Trains; returns 75 if a signal stopped the run before its end and its state was saved."""
    return run_config(ENTRY_POINT, config, written=written).exit_code
