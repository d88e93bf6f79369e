"""Executes a described training run: data, first state, steps, checkpoints, exports.

Problems of the input are reported as early as possible: folders and checkpoints first, then the text, then weights,
then steps. A run that finds its own checkpoint resumes from it. The batch and the random bits of a step depend only on
the configuration and the step's number, so its losses are bit for bit those of an uninterrupted run.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path

from jax.sharding import Mesh

from haliax_ext.program import Program
from haliax_ext.pytree import PyTree
from levanter.checkpoint import CheckpointRef
from levanter.commands.cli.signals import raise_if_interrupted
from levanter.commands.model.workloads import stage_program
from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train.config_diff import judge
from levanter.commands.train.initial_state import checked_frozen, initial_state
from levanter.commands.train.monitoring import build_instruments, build_nan_guard, report_facts
from levanter.commands.train.reference_model import load_reference_model
from levanter.commands.train.run_dirs import (
    RunDirs,
    check_exports_writable,
    find_resume,
    lease_run_dirs,
    refuse_existing_exports,
)
from levanter.commands.train.run_report import RunReport
from levanter.commands.train.saving import Saver, build_checkpointer, last_checkpoint
from levanter.commands.train.task import TASK, Running, TrainingEvaluation, TrainingRows
from levanter.commands.train.work import Trained, TrainPlan, TrainWork
from levanter.distributed.agreement import ONE_FOR_ALL_SECONDS, agreed_stop, process_0_first, require_same
from levanter.distributed.compile_barrier import jit_together
from levanter.io import Lease, Progress
from levanter.runplan import Session
from levanter.trainer.hooks import ShowProgress, StepSize
from levanter.trainer.loop import Loop, Step, stop_signal
from levanter.trainer.train_state import TrainState

logger = logging.getLogger(__name__)


def execute(plan: TrainPlan, mesh: Mesh | None, session: Session | None = None) -> Trained:
    """Trains; nothing runs that is not in `plan`.

    Raises:
        ValueError: problems for the user: data, checkpoints, export paths, a loss that is not a number.
    """
    assert mesh is not None, "training runs on devices"
    session = Session(run_id=plan.work.config.trainer.id or Session().run_id) if session is None else session
    if session.show:
        print(f"run {session.run_id}: if it is interrupted, trainer.id={session.run_id} continues it", flush=True)
    report = _report(plan, session)
    dirs = RunDirs.of(plan.work.config, session.run_id)
    # Before anything is inspected: another run may still be writing.
    with lease_run_dirs(dirs, session.run_id) as leases:
        with report.account.timed("data preparation"):
            running = _prepare(plan, mesh, session, dirs)
        return _train(running, leases, report)


def _train(running: Running, leases: Sequence[Lease], report: RunReport) -> Trained:
    """Trains in folders whose leases this run holds."""
    plan, session, dirs = running.plan, running.session, running.dirs
    work: TrainWork = plan.work
    task, first, stop = work.task, running.first, running.stop
    # Signals only request a stop in this block, however often they arrive: the last save happens in it too.
    with build_checkpointer(plan, dirs, leases) as checkpointer, stop_signal() as stopping:
        with report.account.timed("loading"):
            running, state = _load(running)
            started = task.start(running)
        saver = Saver(running, checkpointer, started.metadata)
        saver.make_up_export(state)
        # The pauses must not keep the state, so `running` itself does not have it.
        pauses = [planned.start(replace(running, state=state)) for planned in work.between_steps]
        between = [pause for pause in pauses if pause is not None]
        sizes = _sizes(plan)
        report.begin_steps(first=first, stop=stop, tokens_of=lambda step: sizes(step).tokens)
        observed = build_instruments(running, sizes, lambda step: {**started.numbers(step), **report.metrics})
        # First, so that a profile ends before the hooks that pause the run after its last step.
        profile = [] if observed.profile is None else [observed.profile]
        losses: deque[float] = deque(maxlen=1)
        began = time.monotonic()
        remaining = running.tokens(max(stop, first)) - running.tokens(first)
        with Progress("training", total=remaining, unit="tokens", show=session.show) as progress:
            loop = Loop(
                step_of=_steps(running, observed.watched, report.compiling),
                listeners=[
                    observed.watchdog,
                    report.step,
                    observed.track,
                    ShowProgress(progress=progress, size_of=sizes, steps=stop),
                    lambda numbers: losses.append(numbers.loss),
                    *started.listeners,
                ],
                pauses=[*profile, *map(report.saving, saver.pauses), *map(report.evaluating, between)],
                guard=build_nan_guard(plan, lambda: last_checkpoint(checkpointer, running.resumed)),
                around_pauses=observed.watchdog.resting,
                watched=observed.watched,
                stopping=agreed_stop(stopping),
            )
            with closing(started.batches(first, stop)) as batches, observed.running(first), report.kept():
                ended = loop.run(state, batches, first=first)
        seconds = time.monotonic() - began
        with report.account.timed("saving"):
            exported = saver.the_end(ended)
        checkpoint = checkpointer.newest or running.resumed
        return Trained(
            taken=ended.taken,
            stop=stop,
            preempted=ended.preempted,
            loss=losses[-1] if losses else None,
            checkpoint=checkpoint,
            exported=exported,
            evaluation=next((pause.result for pause in between if isinstance(pause, TrainingEvaluation)), None),
            throughput=observed.track.throughput,
            seconds=seconds,
            report=report.finish(report_facts(plan, checkpoint=checkpoint, exported=exported)),
        )


def _report(plan: TrainPlan, session: Session) -> RunReport:
    """The report of a run, which the process that prints keeps in its folder of logs."""
    folder = Path(plan.work.config.trainer.log_dir) / session.run_id if session.show else None
    return RunReport(folder, run_id=session.run_id, began=session.began)


def _load(running: Running) -> tuple[Running, TrainState]:
    """The run with the models beside its state, and the state before its first step."""
    work: TrainWork = running.plan.work
    running = replace(running, earlier=work.task.before_state(running))
    state, frozen = initial_state(running)
    second = None if work.models.resident is None else load_reference_model(work.models.resident, running)
    part = checked_frozen(running, frozen)
    return replace(running, frozen=frozen, reference=second, frozen_part=part), state


def _prepare(plan: TrainPlan, mesh: Mesh, session: Session, dirs: RunDirs) -> Running:
    """Checks folders and checkpoints, then the rows; problems are reported before a weight is read."""
    work: TrainWork = plan.work
    task, config = work.task, work.config
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
        rows = task.build_rows(work, show=session.show)
    require_same(
        "the training data",
        f"sha256 {rows.fingerprint[:16]}…",
        advice="the files and the tokenizer must be the same on all hosts, and so must the token stores",
        # Hosts with local disks tokenize after process 0.
        seconds=ONE_FOR_ALL_SECONDS,
    )
    stop = last_step(config, rows)
    for line in rows.report(stop):
        logger.info("data: %s", line)
    running = Running(plan=plan, run=work, mesh=mesh, session=session, dirs=dirs, resumed=resumed, rows=rows, stop=stop)
    if resumed is not None:
        logger.info("resuming from the %s", resumed)
        # Changes that must not be were refused by `judge`; what it returns is reported only.
        for line in judge(resumed, config, work.model, task.resume_keys):
            logger.warning("resume: %s", line)
        _compare_rows(resumed, rows)
        recorded = resumed.metadata.get(TASK)
        task.check_resumed(running, recorded if isinstance(recorded, Mapping) else {})
    return running


def last_step(config: TrainLmConfig, rows: TrainingRows) -> int:
    """The number of steps: as configured, or fewer if the rows end before."""
    # The schedule ends the run, unless the data (`stop_strategy`) or `epoch` end it earlier.
    limits = [config.trainer.num_train_steps]
    if rows.steps is not None:
        limits.append(rows.steps)
    if config.epoch:
        limits.append(rows.steps_of_epochs(config.epoch))
    return min(limits)


def _compare_rows(resumed: CheckpointRef, rows: TrainingRows) -> None:
    """Warns if the run continues elsewhere in the data than it stopped."""
    # After a changed batch schedule the same step lies at another row; data may be skipped or repeated.
    saved_rows, now = resumed.metadata.get("rows_drawn"), rows.schedule.first_draw(resumed.step)
    if saved_rows != now:
        logger.warning(
            "the checkpoint of step %d was saved after %s rows of data; with this batch schedule the run continues "
            "after %d rows",
            resumed.step,
            saved_rows,
            now,
        )


def _steps(
    running: Running, watched: Callable[[int], bool], compiling: Callable[[], AbstractContextManager[object]]
) -> Callable[[int], Step[PyTree]]:
    """Step number → the compiled step, with the frozen part and a second model bound to it.

    Args:
        running: the run.
        watched: step → whether its watched numbers are fetched.
        compiling: a context for each compilation.
    """
    # Several stages and watched steps share Programs; each is compiled once, when its first step comes.
    jitted: dict[str, Step[PyTree]] = {}
    second = running.run.models.resident
    others = (running.frozen,) if second is None else (running.frozen, running.reference)

    def jit_step(program: Program) -> Step[PyTree]:
        step = jit_together(program, running.mesh, around=compiling)
        # The inputs of the Program in order: state, frozen part, second model, batch.
        return lambda state, batch: step(state, *others, batch)

    def select_step(step: int) -> Step[PyTree]:
        # An interrupt that a library swallowed on the way here still ends the run.
        raise_if_interrupted()
        program = stage_program(running.plan, running.run.batches, step, watched=watched(step))
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
        tokens = plan.work.objective.sequences * stage.plan.tokens
        return StepSize(rows=stage.plan.rows, tokens=tokens, flops=full, flops_causal=causal)

    return step_size
