"""What `train_lm` does once it is described: data, first state, steps, checkpoints, exports.

Whatever is wrong with the input is reported as early as possible: folders and checkpoints first, then the text, then
weights, then steps. A run that finds a checkpoint of its own resumes from it; since the batch and the random bits of
any step follow from the configuration and the step, its losses are those of an uninterrupted run, bit for bit.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from haliax_ext.parts import PARTS
from haliax_ext.program import Program
from levanter.checkpoint import Checkpointer, CheckpointRef, used_shapes
from levanter.commands.model.saved_model import model_metadata
from levanter.commands.model.workloads import stage_program
from levanter.commands.shell.interrupts import raise_if_interrupted
from levanter.commands.train.changes import judge
from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train.evaluation import PROGRAM, Evaluate, validation_rows
from levanter.commands.train.first import checked_frozen, first_state
from levanter.commands.train.instruments import guard_of, instruments
from levanter.commands.train.places import (
    Places,
    check_exports_writable,
    checkpoint_watch,
    find_resume,
    held_places,
    refuse_taken_exports,
)
from levanter.commands.train.work import TrainPlan, TrainWork
from levanter.compat.hf.export import Beside, export
from levanter.compat.hf.tokenizer import FastTokenizer
from levanter.config import plain
from levanter.data import BuildProgress, TrainingData, build_training
from levanter.eval.perplexity import EvalResult
from levanter.io import Lease, Progress
from levanter.models.base import LmHeadModel
from levanter.processes.barrier import agreed, agreed_stop, barrier, process_0_first, require_same
from levanter.processes.together import jit_together
from levanter.run import Session
from levanter.trainer.batches import placed_batches
from levanter.trainer.frozen import FrozenPart
from levanter.trainer.hooks import Every, SaveCheckpoint, ShowProgress, StepSize, Throughput
from levanter.trainer.loop import Ended, Loop, Pause, Step, stop_signal
from levanter.trainer.loss import LmBatch
from levanter.trainer.state import TrainState
from levanter.trainer.trainable import bind

logger = logging.getLogger(__name__)

DATA_SECONDS = 24 * 3600.0
"""How long processes wait for the one that tokenizes; they learn within seconds if it is lost."""
EXPORT_SECONDS = DATA_SECONDS
"""And for the one that writes an export, perhaps to a bucket."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """How a run ended.

    Attributes:
        taken: steps taken, earlier attempts included.
        stop: steps that were to be taken.
        preempted: whether it was told to stop before that.
        loss: of its last step; None if no step was taken.
        checkpoint: the last complete checkpoint.
        exported: the Hugging Face export of the final state.
        evaluation: the last evaluation.
        throughput: average, without the first step.
        seconds: from the first step to the last.
    """

    taken: int
    stop: int
    preempted: bool
    loss: float | None
    checkpoint: CheckpointRef | None
    exported: str | None
    evaluation: EvalResult | None
    throughput: Throughput
    seconds: float

    @property
    def summary(self) -> dict[str, Any]:
        """Summary values for trackers."""
        found = {"train/loss": self.loss, "throughput/tokens_per_second": self.throughput.tokens_per_second}
        if self.evaluation is not None:
            found.update(self.evaluation.metrics())
        return {name: value for name, value in found.items() if value is not None}

    def __str__(self) -> str:
        rate = self.throughput.tokens_per_second
        how = "stopped by a signal" if self.preempted else "done"
        lines = [
            f"{how} after {self.taken:,} of {self.stop:,} steps"
            + ("" if self.loss is None else f", loss {self.loss:.4f}")
            + ("" if rate is None else f", {rate:,.0f} tokens/s"),
            "no checkpoint" if self.checkpoint is None else f"checkpoint: {self.checkpoint.path}",
        ]
        if self.evaluation is not None:
            lines.append(f"validation loss {self.evaluation.overall.micro.loss:.4f} nats per token")
        if self.exported is not None:
            lines.append(f"Hugging Face export: {self.exported}")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Prepared:
    """What is known before a weight is read.

    Attributes:
        places: the run's folders.
        resumed: the checkpoint it resumes from; None if it begins.
        data: its training data.
        stop: the step after its last.
    """

    places: Places
    resumed: CheckpointRef | None
    data: TrainingData
    stop: int

    @property
    def first(self) -> int:
        """The first step that is taken."""
        return 0 if self.resumed is None else self.resumed.step

    def tokens(self, step: int) -> int:
        """Tokens of all steps before one."""
        return self.data.schedule.first_draw(step) * self.data.positions


def execute(plan: TrainPlan, mesh: Mesh | None, session: Session | None = None) -> Trained:
    """Trains; nothing runs that is not in `plan`.

    Raises:
        ValueError: problems for the user: data, checkpoints, export paths, a loss that is not a number.
    """
    assert mesh is not None, "training runs on devices"
    session = Session(run_id=plan.work.config.trainer.id or Session().run_id) if session is None else session
    if session.show:
        print(f"run {session.run_id}: trainer.id={session.run_id} resumes from its last checkpoint", flush=True)
    places = Places.of(plan.work.config, session.run_id)
    # Before anything is inspected: another run may still be writing.
    with held_places(places, session.run_id) as leases:
        return _train(plan, mesh, session, places, leases)


def _train(plan: TrainPlan, mesh: Mesh, session: Session, places: Places, leases: Sequence[Lease]) -> Trained:
    """Trains in folders whose leases this run holds."""
    prepared = _prepare(plan, session, places)
    first, stop = prepared.first, prepared.stop
    # A run that is told to stop twice still saves first.
    with _checkpointer(plan, places, leases) as checkpointer, stop_signal() as stopping:
        state, frozen = first_state(plan, mesh, prepared.resumed, show=session.show)
        part = checked_frozen(plan, mesh, frozen, prepared.resumed)
        keep = _Keep(
            plan=plan,
            session=session,
            prepared=prepared,
            mesh=mesh,
            checkpointer=checkpointer,
            frozen=frozen,
            part=part,
        )
        keep.make_up_export(state)
        evaluate = _evaluation(plan, mesh, prepared.data, session, frozen, last=stop)
        observed = instruments(
            plan,
            mesh,
            session,
            size_of=_sizes(plan),
            steps=stop,
            tokens=prepared.tokens(first),
        )
        # First, so that a profile ends before the hooks that pause the run after its last step.
        profile = [] if observed.profile is None else [observed.profile]
        pauses: list[Pause] = [*profile, *keep.pauses, *([] if evaluate is None else [evaluate])]
        losses: deque[float] = deque(maxlen=1)
        began = time.monotonic()
        left = prepared.tokens(max(stop, first)) - prepared.tokens(first)
        with Progress("training", total=left, unit="tokens", show=session.show) as progress:
            loop = Loop(
                step_of=_steps(plan, mesh, frozen, observed.watched),
                listeners=[
                    observed.watchdog,
                    observed.track,
                    ShowProgress(progress=progress, size_of=_sizes(plan), steps=stop),
                    lambda report: losses.append(report.loss),
                ],
                pauses=pauses,
                guard=guard_of(plan, lambda: _last(checkpointer, prepared.resumed)),
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
            )
            with closing(batches), observed.running(first):
                ended = loop.run(state, batches, first=first)
        seconds = time.monotonic() - began
        exported = keep.the_end(ended)
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


def _prepare(plan: TrainPlan, session: Session, places: Places) -> _Prepared:
    """Checks folders and checkpoints, then the data; problems are reported before a weight is read."""
    work, config = plan.work, plan.work.config
    resumed = find_resume(config, places)
    require_same(
        "the checkpoint to resume from",
        "none" if resumed is None else f"step {resumed.step} ({resumed.path})",
        advice="trainer.checkpointer.base_path must be storage that all hosts see",
    )
    refuse_taken_exports(places, resumed)
    if session.show:
        check_exports_writable(places)
    with process_0_first("preparing data", seconds=DATA_SECONDS):
        data = _data(work, show=session.show)
    require_same(
        "the training data",
        f"{len(data.sets)} sets, sha256 {data.fingerprint[:16]}…",
        advice="the files and the tokenizer must be the same on all hosts, and so must the token stores",
        # Hosts with local disks tokenize after process 0.
        seconds=DATA_SECONDS,
    )
    stop = last_step(config, data)
    for line in (*data.describe(stop), *data.notes):
        logger.info("data: %s", line)
    if resumed is not None:
        logger.info("resuming from the %s", resumed)
        for line in judge(resumed, config, work.model):
            logger.warning("resume: %s", line)
        _compare_data(resumed, data)
    return _Prepared(places=places, resumed=resumed, data=data, stop=stop)


class _Keep:
    """What a run saves of its states: checkpoints, and exports after them."""

    def __init__(
        self,
        *,
        plan: TrainPlan,
        session: Session,
        prepared: _Prepared,
        mesh: Mesh,
        checkpointer: Checkpointer,
        frozen: LmHeadModel | None,
        part: FrozenPart | None,
    ):
        self._work, self._show, self._frozen = plan.work, session.show, frozen
        self._prepared, self._checkpointer = prepared, checkpointer
        config = plan.work.config
        parts = next((each for each in plan.saving if each.name == PARTS), None)
        self._save = SaveCheckpoint(
            checkpointer=checkpointer,
            parts=None if parts is None else jit_together(parts, mesh),
            parted=frozenset() if parts is None else frozenset(parts.input("arrays").value),
            metadata=lambda taken: {
                "run_id": session.run_id,
                "rows_drawn": prepared.data.schedule.first_draw(taken),
                "config": plain(config),
                "jax": jax.__version__,
                **model_metadata(plan.work.model, tokenizer=config.data.tokenizer),
                **({} if part is None else part.metadata),
            },
        )
        self._exports = None
        if prepared.places.exports is not None:
            self._exports = Every(steps=config.hf_save_steps, action=self._save_and_export, until=prepared.stop)

    @property
    def pauses(self) -> list[Pause]:
        """What happens between two steps."""
        return [self._save] if self._exports is None else [self._save, self._exports]

    def make_up_export(self, state: TrainState) -> None:
        """Exports the state that the run resumes from, if the earlier attempt should have and did not.

        It may have been killed after the checkpoint and before its export was complete. Process 0 writes exports,
        perhaps to a local disk: it decides whether one is missing.
        """
        first = self._prepared.first
        if self._exports is None or not first or not self._exports.due(first):
            return
        if agreed("its export", str(self._prepared.places.lacks_export(first))) == "True":
            self._export(first, state)

    def the_end(self, ended: Ended) -> str | None:
        """Saves the last state and exports it; returns the export's path, None for none."""
        if ended.taken > self._prepared.first or self._prepared.resumed is None:
            self._save.save(ended.taken, ended.state, force=not ended.preempted)
            self._checkpointer.wait()
        if self._exports is None or ended.preempted:
            return None
        return self._export(ended.taken, ended.state)

    def _save_and_export(self, taken: int, state: TrainState) -> None:
        # An export takes a while. The run is saved first, so that an attempt that is killed meanwhile resumes here, and
        # so that an export always implies a checkpoint.
        self._save.save(taken, state)
        self._checkpointer.wait()
        self._export(taken, state)

    def _export(self, taken: int, state: TrainState) -> str:
        model = bind(state.judged, self._frozen)
        return _export(self._work, model, self._prepared.places.export(taken), show=self._show)


def last_step(config: TrainLmConfig, data: TrainingData) -> int:
    """How many steps the run takes: as configured, or as many as the data lasts for."""
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

        def tell(step: BuildProgress) -> None:
            progress.advance_to(step.tokens, note=f"{step.fraction:.0%}")

        return build_training(
            config.data,
            work.tokenizer,
            positions=config.positions,
            batch_sizes=[(stage.start, stage.plan.rows) for stage in work.batches],
            seed=config.trainer.seed if config.data_seed is None else config.data_seed,
            vocab_size=work.model.vocab_size,
            on_progress=tell,
        )


def _evaluation(
    plan: TrainPlan, mesh: Mesh, data: TrainingData, session: Session, frozen: LmHeadModel | None, *, last: int
) -> Evaluate | None:
    work: TrainWork = plan.work
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
    there, here = resumed.metadata.get("rows_drawn"), data.schedule.first_draw(resumed.step)
    if there != here:
        logger.warning(
            "the checkpoint of step %d was saved after %s rows of data; with this batch schedule the run continues "
            "after %d rows",
            resumed.step,
            there,
            here,
        )


def _checkpointer(plan: TrainPlan, places: Places, leases: Sequence[Lease]) -> Checkpointer:
    work: TrainWork = plan.work
    written, vocab = work.config.trainer.checkpointer, work.model.vocab_size
    assert vocab is not None
    return Checkpointer(
        places.checkpoints,
        keep=[(interval.every, interval.until) for interval in written.keep],
        save_interval_seconds=None if written.save_interval is None else written.save_interval.total_seconds(),
        keep_last_temporary=written.keep_last_temporary_checkpoints,
        temporary_base=places.temporary,
        delete_old_temporary=written.delete_old_temp_checkpoints,
        used=used_shapes((each.leaf for each in work.state_plan.whole.leaves), {"vocab": vocab}),
        watch=checkpoint_watch(written.debug),
        leases=leases,
    )


def _last(checkpointer: Checkpointer, resumed: CheckpointRef | None) -> str:
    """What a failed run can resume from."""
    checkpointer.wait()
    ref = checkpointer.newest or resumed
    return (
        "no checkpoint was saved before" if ref is None else f"the last checkpoint is of step {ref.step} ({ref.path})"
    )


def _steps(
    plan: TrainPlan, mesh: Mesh, frozen: LmHeadModel | None, watched: Callable[[int], bool]
) -> Callable[[int], Step[LmBatch]]:
    """The compiled step for every step, with the frozen part."""
    jitted: dict[str, Step[LmBatch]] = {}

    def made(program: Program) -> Step[LmBatch]:
        step = jit_together(program, mesh)
        return lambda state, batch: step(state, frozen, batch)

    def step_of(step: int) -> Step[LmBatch]:
        # An interrupt that a library swallowed on the way here still ends the run.
        raise_if_interrupted()
        program = stage_program(plan, plan.work.batches, step, watched=watched(step))
        if program.name not in jitted:
            jitted[program.name] = made(program)
        return jitted[program.name]

    return step_of


def _sizes(plan: TrainPlan) -> Callable[[int], StepSize]:
    """The work of each step."""
    flops = {each.program: (each.flops_full, each.flops_causal) for each in plan.workloads}

    def size_of(step: int) -> StepSize:
        stage = [stage for stage in plan.work.batches if stage.start <= step][-1]
        name = stage_program(plan, plan.work.batches, step).name
        full, causal = flops[name]
        return StepSize(rows=stage.plan.rows, tokens=stage.plan.tokens, flops=full, flops_causal=causal)

    return size_of


def _export(work: TrainWork, model: LmHeadModel, folder: str, *, show: bool) -> str:
    tokenizer = work.tokenizer if isinstance(work.tokenizer, FastTokenizer) else None
    barrier("exporting")
    with Progress(f"exporting to {folder}", total=None, unit="bytes", show=show) as progress:

        def tell(done: int, total: int) -> None:
            progress.meter.total = total
            progress.advance_to(done)

        export(
            model,
            work.model,
            folder,
            beside=Beside(tokenizer=tokenizer, eos_ids=tuple(work.config.hf_generation_eos_token_ids or ())),
            dtype=work.config.hf_save_dtype,
            overwrite=True,
            progress=tell,
        )
    # Process 0 was still writing when the others had nothing left to send.
    barrier("exported", seconds=EXPORT_SECONDS)
    return folder
