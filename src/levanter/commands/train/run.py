"""Executes a described training run: data, first state, steps, checkpoints, exports.

Problems of the input are reported as early as possible: folders and checkpoints first, then the text, then weights,
then steps. A run that finds its own checkpoint resumes from it. The batch and the random bits of a step depend only on
the configuration and the step's number, so its losses are bit for bit those of an uninterrupted run.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
from jax.sharding import Mesh

from haliax_ext.program import Program
from levanter.checkpoint import CheckpointRef
from levanter.commands.cli.signals import raise_if_interrupted
from levanter.commands.model.workloads import stage_program
from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train.config_diff import judge
from levanter.commands.train.dpo.evaluation import EvaluatePairs
from levanter.commands.train.dpo.run import (
    first_loss_checked,
    loaded_reference,
    pair_evaluation,
    step_logprobs,
    stored_logprobs,
    validation_logprobs,
)
from levanter.commands.train.dpo.setup import data_formats
from levanter.commands.train.initial_state import checked_frozen, initial_state
from levanter.commands.train.lm.evaluation import PROGRAM, Evaluate, validation_rows
from levanter.commands.train.monitoring import build_instruments, build_nan_guard
from levanter.commands.train.run_dirs import (
    RunDirs,
    check_exports_writable,
    find_resume,
    lease_run_dirs,
    refuse_existing_exports,
)
from levanter.commands.train.saving import PreparedRun, Saver, build_checkpointer, last_checkpoint
from levanter.commands.train.task import Running
from levanter.commands.train.work import Trained, TrainPlan, TrainWork
from levanter.data import BuildProgress, TrainingData, build_training
from levanter.distributed.barrier import ONE_FOR_ALL_SECONDS, agreed_stop, process_0_first, require_same
from levanter.distributed.compile_barrier import jit_together
from levanter.io import Lease, Progress
from levanter.models.base import LmHeadModel
from levanter.runplan import Session
from levanter.trainer.device_batches import placed_batches
from levanter.trainer.hooks import ShowProgress, StepSize
from levanter.trainer.loop import Loop, Pause, Step, stop_signal

logger = logging.getLogger(__name__)


def execute(plan: TrainPlan, mesh: Mesh | None, session: Session | None = None) -> Trained:
    """Trains; nothing runs that is not in `plan`.

    Raises:
        ValueError: problems for the user: data, checkpoints, export paths, a loss that is not a number.
    """
    assert mesh is not None, "training runs on devices"
    session = Session(run_id=plan.work.config.trainer.id or Session().run_id) if session is None else session
    if session.show:
        print(f"run {session.run_id}: trainer.id={session.run_id} resumes from its last checkpoint", flush=True)
    dirs = RunDirs.of(plan.work.config, session.run_id)
    # Before anything is inspected: another run may still be writing.
    with lease_run_dirs(dirs, session.run_id) as leases:
        return _train(plan, mesh, session, dirs, leases)


def _train(plan: TrainPlan, mesh: Mesh, session: Session, dirs: RunDirs, leases: Sequence[Lease]) -> Trained:
    """Trains in folders whose leases this run holds."""
    prepared = _prepare(plan, session, dirs)
    first, stop = prepared.first, prepared.stop
    # Signals only request a stop in this block, however often they arrive: the last save happens in it too.
    with build_checkpointer(plan, dirs, leases) as checkpointer, stop_signal() as stopping:
        logprobs = stored_logprobs(plan, mesh, prepared.data, show=session.show)
        state, frozen = initial_state(plan, mesh, prepared.resumed, show=session.show)
        reference = loaded_reference(plan, mesh, show=session.show)
        part = checked_frozen(plan, mesh, frozen, prepared.resumed)
        if not logprobs:
            logprobs = validation_logprobs(plan, mesh, prepared.data, frozen, reference, part, show=session.show)
        saver = Saver(
            plan=plan,
            session=session,
            prepared=prepared,
            mesh=mesh,
            checkpointer=checkpointer,
            frozen=frozen,
            part=part,
        )
        saver.make_up_export(state)
        evaluate = _evaluation(plan, mesh, prepared.data, session, frozen, reference, logprobs, last=stop)
        if prepared.first == 0 and evaluate is not None and getattr(plan.work.config, "run_initial_eval", False):
            evaluate(0, state)
        observed = build_instruments(
            plan,
            mesh,
            session,
            size_of=_sizes(plan),
            steps=stop,
            tokens=prepared.tokens(first),
        )
        # First, so that a profile ends before the hooks that pause the run after its last step.
        profile = [] if observed.profile is None else [observed.profile]
        running = Running(plan=plan, mesh=mesh, session=session, stop=stop, frozen=frozen, first=first, state=state)
        between = (evaluate, *(part.start(running) for part in plan.work.between_steps))
        pauses: list[Pause] = [*profile, *saver.pauses, *(pause for pause in between if pause is not None)]
        losses: deque[float] = deque(maxlen=1)
        began = time.monotonic()
        remaining = prepared.tokens(max(stop, first)) - prepared.tokens(first)
        with Progress("training", total=remaining, unit="tokens", show=session.show) as progress:
            loop = Loop(
                step_of=_steps(plan, mesh, (frozen,) if reference is None else (frozen, reference), observed.watched),
                listeners=[
                    observed.watchdog,
                    observed.track,
                    ShowProgress(progress=progress, size_of=_sizes(plan), steps=stop),
                    lambda report: losses.append(report.loss),
                    *([] if plan.work.pairs is None else [first_loss_checked(plan.work.pairs, plan.work.precision)]),
                ],
                pauses=pauses,
                guard=build_nan_guard(plan, lambda: last_checkpoint(checkpointer, prepared.resumed)),
                around_pauses=observed.watchdog.resting,
                watched=observed.watched,
                stopping=agreed_stop(stopping),
            )
            batches = placed_batches(
                prepared.data,
                lambda step: stage_program(plan, plan.work.batches, step).input("batch"),
                mesh,
                first=first,
                stop=stop,
                reference=step_logprobs(plan, prepared.data, logprobs),
                seen=observed.balance,
            )
            with closing(batches), observed.running(first):
                ended = loop.run(state, batches, first=first)
        seconds = time.monotonic() - began
        exported = saver.the_end(ended)
        return Trained(
            taken=ended.taken,
            stop=stop,
            preempted=ended.preempted,
            loss=losses[-1] if losses else None,
            checkpoint=checkpointer.newest or prepared.resumed,
            exported=exported,
            evaluation=None if evaluate is None else evaluate.result,
            throughput=observed.track.throughput,
            seconds=seconds,
        )


def _prepare(plan: TrainPlan, session: Session, dirs: RunDirs) -> PreparedRun:
    """Checks folders and checkpoints, then the data; problems are reported before a weight is read."""
    work, config = plan.work, plan.work.config
    resumed = find_resume(config, dirs)
    # Hosts that do not share storage would start at different steps and wait for each other in the first collective.
    require_same(
        "the checkpoint to resume from",
        "none" if resumed is None else f"step {resumed.step} ({resumed.path})",
        advice="trainer.checkpointer.base_path must be storage that all hosts see",
    )
    refuse_existing_exports(dirs, resumed)
    if session.show:
        # One process writes exports (the one that prints), so one test is enough.
        check_exports_writable(dirs)
    # Process 0 tokenizes while the others wait, so that hosts with shared storage read one finished store.
    with process_0_first("preparing data", seconds=ONE_FOR_ALL_SECONDS):
        data = _data(work, show=session.show)
    require_same(
        "the training data",
        f"{len(data.sets)} sets, sha256 {data.fingerprint[:16]}…",
        advice="the files and the tokenizer must be the same on all hosts, and so must the token stores",
        # Hosts with local disks tokenize after process 0.
        seconds=ONE_FOR_ALL_SECONDS,
    )
    stop = last_step(config, data)
    for line in (*data.describe(stop), *data.notes):
        logger.info("data: %s", line)
    for sample in data.samples:
        logger.info("data: %s", sample)
    if resumed is not None:
        logger.info("resuming from the %s", resumed)
        # Changes that must not be were refused by `judge`; what it returns is reported only.
        for line in judge(resumed, config, work.model):
            logger.warning("resume: %s", line)
        _compare_data(resumed, data)
    return PreparedRun(dirs=dirs, resumed=resumed, data=data, stop=stop)


def last_step(config: TrainLmConfig, data: TrainingData) -> int:
    """The number of steps: as configured, or fewer if the data ends before."""
    # The schedule ends the run, unless the data (`stop_strategy`) or `epoch` end it earlier.
    limits = [config.trainer.num_train_steps]
    if data.steps is not None:
        limits.append(data.steps)
    if config.epoch:
        limits.append(data.steps_of_epochs(config.epoch))
    return min(limits)


def _data(work: TrainWork, *, show: bool) -> TrainingData:
    config = work.config
    assert work.tokenizer is not None, "a plan without its tokenizer must not run: RunPlan.check() comes first"
    with Progress("tokenizing", total=None, unit="tokens", show=show, lazy=True) as progress:

        def report_progress(step: BuildProgress) -> None:
            progress.advance_to(step.tokens, note=f"{step.fraction:.0%}")

        return build_training(
            config.data,
            work.tokenizer,
            positions=config.positions,
            # The batch schedule is part of the data's order: rows are drawn batch by batch.
            batch_sizes=[(stage.start, stage.plan.rows) for stage in work.batches],
            seed=config.trainer.seed if config.data_seed is None else config.data_seed,
            vocab_size=work.model.vocab_size,
            on_progress=report_progress,
            formats=data_formats(config),
            # Only preference runs have this key.
            last_held_out=getattr(config, "validation_split_fraction", None) or 0.0,
        )


def _evaluation(
    plan: TrainPlan,
    mesh: Mesh,
    data: TrainingData,
    session: Session,
    frozen: LmHeadModel | None,
    reference: LmHeadModel | None,
    reference_logprobs: Mapping[str, np.ndarray],
    *,
    last: int,
) -> Evaluate | EvaluatePairs | None:
    work: TrainWork = plan.work
    if work.pairs is not None:
        return pair_evaluation(plan, work.pairs, mesh, data, session, frozen, reference, reference_logprobs, last=last)
    if work.validation is None:
        return None
    assert work.tokenizer is not None and work.model.vocab_size is not None
    trainer = work.config.trainer
    return Evaluate(
        program=plan.program(PROGRAM),
        frozen=frozen,
        mesh=mesh,
        sequences=validation_rows(
            work.config.data, work.validation, data, work.tokenizer, vocab_size=work.model.vocab_size
        ),
        tracker=session.tracker,
        every=trainer.steps_per_eval,
        last=last,
        max_batches=trainer.max_eval_batches,
        show=session.show,
    )


def _compare_data(resumed: CheckpointRef, data: TrainingData) -> None:
    """Warns if the run continues elsewhere in the data than it stopped."""
    # After a changed batch schedule the same step lies at another row; data may be skipped or repeated.
    saved_rows, rows = resumed.metadata.get("rows_drawn"), data.schedule.first_draw(resumed.step)
    if saved_rows != rows:
        logger.warning(
            "the checkpoint of step %d was saved after %s rows of data; with this batch schedule the run continues "
            "after %d rows",
            resumed.step,
            saved_rows,
            rows,
        )


def _steps(
    plan: TrainPlan, mesh: Mesh, extra_inputs: Sequence[LmHeadModel | None], watched: Callable[[int], bool]
) -> Callable[[int], Step[Any]]:
    """Step number → the compiled step, with the frozen part and a reference bound to it."""
    # Several stages and watched steps share Programs; each is compiled once, when its first step comes.
    jitted: dict[str, Step[Any]] = {}

    def jit_step(program: Program) -> Step[Any]:
        step = jit_together(program, mesh)
        # The inputs of the Program in order: state, frozen part, reference, batch.
        return lambda state, batch: step(state, *extra_inputs, batch)

    def select_step(step: int) -> Step[Any]:
        # An interrupt that a library swallowed on the way here still ends the run.
        raise_if_interrupted()
        program = stage_program(plan, plan.work.batches, step, watched=watched(step))
        if program.name not in jitted:
            jitted[program.name] = jit_step(program)
        return jitted[program.name]

    return select_step


def _sizes(plan: TrainPlan) -> Callable[[int], StepSize]:
    """The work of each step."""
    flops = {workload.program: (workload.flops_full, workload.flops_causal) for workload in plan.workloads}

    def step_size(step: int) -> StepSize:
        # Stages are ordered by first step; the last one that has started is in force.
        stage = [stage for stage in plan.work.batches if stage.start <= step][-1]
        # FLOPs are those of the stage's plain step; histograms are not counted as work of the model.
        name = stage_program(plan, plan.work.batches, step).name
        full, causal = flops[name]
        sequences = 1 if plan.work.pairs is None else 2
        return StepSize(rows=stage.plan.rows, tokens=sequences * stage.plan.tokens, flops=full, flops_causal=causal)

    return step_size
