"""What `train_lm` does once it is described: data, first state, steps, checkpoints, exports.

Whatever is wrong with the input is said as early as it can be known: folders and checkpoints first, then the text, then
weights, then steps. A run that finds a checkpoint of its own goes on behind it; since any step's batch and random bits
follow from the configuration and the step, its losses are those of a run that was never stopped, bit for bit.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from haliax_ext.abstract import with_arrays
from haliax_ext.loading import load
from levanter.checkpoint import Checkpointer, CheckpointRef, used_shapes
from levanter.commands.model.saved_model import model_metadata
from levanter.commands.model.workloads import stage_program
from levanter.commands.shell.sameness import require_same_weights
from levanter.commands.train.evaluation import PROGRAM, Evaluate, validation_rows
from levanter.commands.train.first import begun_from, restored
from levanter.commands.train.instruments import guard_of, instruments
from levanter.commands.train.places import (
    Places,
    check_exports_writable,
    checkpoint_watch,
    find_resume,
    refuse_taken_exports,
)
from levanter.compat.hf.export import Beside, export
from levanter.compat.hf.tokenizer import FastTokenizer
from levanter.config import plain
from levanter.data import BuildProgress, TrainingData, build_training
from levanter.eval.perplexity import EvalResult
from levanter.io import Progress
from levanter.processes.barrier import agreed, agreed_stop, barrier, process_0_first, require_same
from levanter.processes.together import jit_together
from levanter.run import RunPlan
from levanter.tracker import Tracker
from levanter.trainer.batches import placed_batches
from levanter.trainer.hooks import Every, SaveCheckpoint, ShowProgress, StepSize, Throughput
from levanter.trainer.loop import Loop, Pause, Step, stop_signal
from levanter.trainer.state import TrainState

if TYPE_CHECKING:
    from levanter.commands.train.train_lm import TrainLmConfig, TrainWork

logger = logging.getLogger(__name__)

DATA_SECONDS = 24 * 3600.0
"""How long processes wait for the one that tokenizes; they are told within seconds where it is gone."""
EXPORT_SECONDS = DATA_SECONDS
"""And for the one that writes an export, perhaps to a bucket."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """How a run ended.

    Attributes:
        taken: steps taken, earlier attempts included.
        stop: steps that were to be taken.
        preempted: whether it was told to stop before.
        loss: of its last step; None where no step was taken.
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
        """Single values for trackers."""
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
            lines.append(f"validation loss {self.evaluation.overall.micro.loss:.4f} nats a token")
        if self.exported is not None:
            lines.append(f"Hugging Face export: {self.exported}")
        return "\n".join(lines)


def execute(plan: RunPlan, mesh: Mesh, *, run_id: str, tracker: Tracker) -> Trained:
    """Trains; nothing runs that is not in `plan`.

    Raises:
        ValueError: what the user must know: data, checkpoints, export paths, a loss that is not a number.
    """
    work: TrainWork = plan.work
    config, show = work.config, jax.process_index() == 0
    places = Places.of(config, run_id)
    resumed = find_resume(config, places)
    require_same(
        "the checkpoint to resume from",
        "none" if resumed is None else f"step {resumed.step} ({resumed.path})",
        advice="trainer.checkpointer.base_path must be storage that all hosts see",
    )
    first = 0 if resumed is None else resumed.step
    refuse_taken_exports(places, resumed)
    if show:
        check_exports_writable(places)
    with process_0_first("preparing data", seconds=DATA_SECONDS):
        data = _data(work, show=show)
    require_same(
        "the training data",
        f"{len(data.sets)} sets, sha256 {data.fingerprint[:16]}…",
        advice="the files and the tokenizer must be the same on all hosts, and so must the token stores",
        # Hosts with disks of their own tokenize behind process 0.
        seconds=DATA_SECONDS,
    )
    stop = last_step(config, data)
    for line in (*data.describe(stop), *data.notes):
        logger.info("data: %s", line)
    if resumed is not None:
        logger.info("resuming from the %s", resumed)
        _compare_data(resumed, data)
    # Whoever is told to end twice still saves before it does.
    with _checkpointer(plan, places) as checkpointer, stop_signal() as stopping:
        state = first_state(plan, mesh, resumed, show=show)
        save = SaveCheckpoint(
            checkpointer=checkpointer,
            metadata=lambda taken: {
                "run_id": run_id,
                "rows_drawn": data.schedule.first_draw(taken),
                "config": plain(config),
                "jax": jax.__version__,
                **model_metadata(work.model, tokenizer=config.data.tokenizer),
            },
        )

        def export_now(taken: int, state: TrainState) -> str:
            return _export(work, state, places.export(taken), show=show)

        def save_and_export(taken: int, state: TrainState) -> None:
            # An export takes a while. So that an attempt that is killed in it goes on behind it, and so that where
            # there are exports there is a checkpoint, the run is saved first.
            save.save(taken, state)
            checkpointer.wait()
            export_now(taken, state)

        pauses: list[Pause] = [save]
        if places.exports is not None:
            exports = Every(steps=config.hf_save_steps, action=save_and_export, until=stop)
            pauses.append(exports)
            # The attempt before may have been killed behind the checkpoint and before its export was whole. Process 0
            # writes exports, perhaps onto a disk of its own: it says whether one is missing.
            if first and exports.due(first) and agreed("its export", str(places.lacks_export(first))) == "True":
                export_now(first, state)
        evaluate = _evaluation(plan, mesh, data, tracker=tracker, last=stop, show=show)
        if evaluate is not None:
            pauses.append(evaluate)
        size_of = _sizes(plan)
        tokens_before = data.schedule.first_draw(first) * data.positions
        observed = instruments(
            plan, mesh, tracker=tracker, run_id=run_id, size_of=size_of, steps=stop, tokens=tokens_before
        )
        track = observed.track
        if observed.profile is not None:
            # First, so that a profile ends before what pauses the run behind its last step.
            pauses.insert(0, observed.profile)
        losses: deque[float] = deque(maxlen=1)
        began = time.monotonic()
        left = data.schedule.first_draw(max(stop, first)) * data.positions - tokens_before
        with Progress("training", total=left, unit="tokens", show=show) as progress:
            loop = Loop(
                step_of=_steps(plan, mesh, observed.watched),
                listeners=[
                    observed.watchdog,
                    track,
                    ShowProgress(progress=progress, size_of=size_of, steps=stop),
                    lambda report: losses.append(report.loss),
                ],
                pauses=pauses,
                guard=guard_of(plan, lambda: _last(checkpointer, resumed)),
                around_pauses=observed.watchdog.resting,
                watched=observed.watched,
                stopping=agreed_stop(stopping),
            )
            batches = placed_batches(
                data, lambda step: stage_program(plan, work.batches, step).inputs[1], mesh, first=first, stop=stop
            )
            with closing(batches), observed.running(first):
                ended = loop.run(state, batches, first=first)
        seconds = time.monotonic() - began
        if ended.taken > first or resumed is None:
            save.save(ended.taken, ended.state, force=not ended.preempted)
            checkpointer.wait()
        exported = None
        if places.exports is not None and not ended.preempted:
            exported = export_now(ended.taken, ended.state)
        return Trained(
            taken=ended.taken,
            stop=stop,
            preempted=ended.preempted,
            loss=losses[-1] if losses else None,
            checkpoint=checkpointer.newest or resumed,
            exported=exported,
            evaluation=None if evaluate is None else evaluate.result,
            throughput=track.throughput,
            seconds=seconds,
        )


def last_step(config: "TrainLmConfig", data: TrainingData) -> int:
    """How many steps the run takes: those asked for, or as many as the data is enough for."""
    limits = [config.trainer.num_train_steps]
    if data.steps is not None:
        limits.append(data.steps)
    if config.epoch:
        limits.append(data.steps_of_epochs(config.epoch))
    return min(limits)


def first_state(plan: RunPlan, mesh: Mesh, resumed: CheckpointRef | None, *, show: bool) -> TrainState:
    """The state before the run's first step: from its checkpoint, from weights, or made from the seed.

    Raises:
        CheckpointMismatchError: a checkpoint of something else; lists the leaves that differ.
    """
    work: TrainWork = plan.work
    config = work.config
    if resumed is not None:
        return restored(plan, mesh, resumed)
    key = jax.random.PRNGKey(config.trainer.seed)
    if config.reference is not None:
        assert plan.load is not None and work.origin is not None and work.origin.checkpoint is not None
        require_same_weights(work.origin.checkpoint.source)
        barrier("loading weights")
        total = plan.load.bytes_by_host[jax.process_index() if plan.load.num_hosts > 1 else 0]
        with Progress("loading weights", total=total, unit="bytes", show=show) as progress:
            loaded = load(
                plan.load,
                work.state_plan.parameters,
                work.origin.checkpoint.source,
                mesh,
                jit=jit_together,
                progress=lambda at: progress.advance_to(at.bytes_done, note=at.path),
            )
        return jit_together(plan.program("init_optimizer"), mesh)(with_arrays(work.state.model, loaded.arrays), key)
    return begun_from(plan, mesh, jit_together(plan.program("init_state"), mesh)(key))


def _data(work: "TrainWork", *, show: bool) -> TrainingData:
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
    plan: RunPlan, mesh: Mesh, data: TrainingData, *, tracker: Tracker, last: int, show: bool
) -> Evaluate | None:
    work: TrainWork = plan.work
    if work.validation is None:
        return None
    assert work.tokenizer is not None and work.model.vocab_size is not None
    trainer = work.config.trainer
    return Evaluate(
        program=plan.program(PROGRAM),
        mesh=mesh,
        sequences=validation_rows(
            work.config.data, work.validation, data, work.tokenizer, vocab_size=work.model.vocab_size
        ),
        tracker=tracker,
        every=trainer.steps_per_eval,
        last=last,
        max_batches=trainer.max_eval_batches,
        show=show,
    )


def _compare_data(resumed: CheckpointRef, data: TrainingData) -> None:
    """Says so where the run goes on elsewhere in the data than it stopped."""
    there, here = resumed.metadata.get("rows_drawn"), data.schedule.first_draw(resumed.step)
    if there != here:
        logger.warning(
            "the checkpoint of step %d was saved after %s rows of data; with this batch schedule the run goes on "
            "behind %d rows",
            resumed.step,
            there,
            here,
        )


def _checkpointer(plan: RunPlan, places: Places) -> Checkpointer:
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
        used=used_shapes((each.leaf for each in plan.sharding.leaves), {"vocab": vocab}),
        watch=checkpoint_watch(written.debug),
    )


def _last(checkpointer: Checkpointer, resumed: CheckpointRef | None) -> str:
    """What a run that failed can go back to."""
    checkpointer.wait()
    ref = checkpointer.newest or resumed
    return (
        "no checkpoint was saved before" if ref is None else f"the last checkpoint is of step {ref.step} ({ref.path})"
    )


def _steps(plan: RunPlan, mesh: Mesh, watched: Callable[[int], bool]) -> Callable[[int], Step]:
    """The compiled step of every step."""
    jitted: dict[str, Step] = {}

    def step_of(step: int) -> Step:
        program = stage_program(plan, plan.work.batches, step, watched=watched(step))
        if program.name not in jitted:
            jitted[program.name] = jit_together(program, mesh)
        return jitted[program.name]

    return step_of


def _sizes(plan: RunPlan) -> Callable[[int], StepSize]:
    """How much each step does."""
    flops = {each.program: (each.flops_full, each.flops_causal) for each in plan.workloads}

    def size_of(step: int) -> StepSize:
        stage = [stage for stage in plan.work.batches if stage.start <= step][-1]
        name = stage_program(plan, plan.work.batches, step).name
        full, causal = flops[name]
        return StepSize(rows=stage.plan.rows, tokens=stage.plan.tokens, flops=full, flops_causal=causal)

    return size_of


def _export(work: "TrainWork", state: TrainState, folder: str, *, show: bool) -> str:
    tokenizer = work.tokenizer if isinstance(work.tokenizer, FastTokenizer) else None
    barrier("exporting")
    with Progress(f"exporting to {folder}", total=None, unit="bytes", show=show) as progress:

        def tell(done: int, total: int) -> None:
            progress.meter.total = total
            progress.advance_to(done)

        export(
            state.model,
            work.model,
            folder,
            beside=Beside(tokenizer=tokenizer, eos_ids=tuple(work.config.hf_generation_eos_token_ids or ())),
            dtype=work.config.hf_save_dtype,
            overwrite=True,
            progress=tell,
        )
    # Process 0 has still written when the others had nothing left to bring to it.
    barrier("exported", seconds=EXPORT_SECONDS)
    return folder
