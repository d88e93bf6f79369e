"""Saves the states of a training run: checkpoints, and an export after each."""

from collections.abc import Callable, Mapping, Sequence

import jax

from haliax_ext.load_plan import LoadPlan
from haliax_ext.replica_slices import PROGRAM_NAME
from levanter.checkpoint import Checkpointer, CheckpointRef, count_kept, used_shapes
from levanter.commands.model.saved_model import model_metadata
from levanter.commands.train.adapters import save_adapters
from levanter.commands.train.run_dirs import RunDirs, checkpoint_watch
from levanter.commands.train.task import TASK, Running
from levanter.commands.train.trained_run import TrainedRun
from levanter.commands.train.work import TrainPlan, TrainWork
from levanter.compat.hf.export import ExportExtras, export
from levanter.compat.hf.tokenizer import FastTokenizer
from levanter.config import plain
from levanter.distributed.agreement import ONE_FOR_ALL_SECONDS, agreed, barrier
from levanter.distributed.compile_barrier import jit_together
from levanter.io import Lease, Progress
from levanter.models.base import LmHeadModel
from levanter.runplan import Target, TrainingJob
from levanter.trainer.hooks import Every, SaveCheckpoint
from levanter.trainer.loop import Ended, Pause
from levanter.trainer.train_state import TrainState
from levanter.trainer.trainable import bind


class Saver:
    """Saves checkpoints and exports of a run's states, at the steps that the configuration names."""

    def __init__(
        self, running: Running, checkpointer: Checkpointer, task_metadata: Callable[[int], Mapping[str, object]]
    ):
        work: TrainWork = running.plan.work
        self._work, self._running, self._checkpointer = work, running, checkpointer
        config, plan, part = work.config, running.plan, running.frozen_part
        # Exists only if some arrays are replicated: it slices them, so that each device with a copy stores a part.
        slicing = next((program for program in plan.saving if program.name == PROGRAM_NAME), None)
        self._save = SaveCheckpoint(
            checkpointer=checkpointer,
            slice_replicas=None if slicing is None else jit_together(slicing, running.mesh),
            sliced_paths=frozenset() if slicing is None else frozenset(slicing.input("arrays").value),
            metadata=lambda taken: {
                # Called with every save: `taken` differs, everything else is that of the run.
                "run_id": running.session.run_id,
                "rows_drawn": running.rows.schedule.first_draw(taken),
                "config": plain(config),
                "jax": jax.__version__,
                **model_metadata(work.model, tokenizer=config.data.tokenizer),
                **({} if part is None else part.metadata),
                **({TASK: recorded} if (recorded := task_metadata(taken)) else {}),
            },
        )
        self._exports = None
        # The last step is exported by `the_end`, so the periodic export stops before it.
        if running.dirs.exports is not None:
            self._exports = Every(steps=config.hf_save_steps, action=self._save_and_export, until=running.stop)

    @property
    def pauses(self) -> list[Pause]:
        """The hooks that run between two steps."""
        return [self._save] if self._exports is None else [self._save, self._exports]

    def make_up_export(self, state: TrainState) -> None:
        """Exports the state that the run resumes from, if the earlier attempt should have and did not.

        It may have been killed after the checkpoint and before its export was complete. Process 0 writes exports,
        perhaps to a local disk: it decides whether one is missing.
        """
        first = self._running.first
        # At step 0 there is nothing that an earlier attempt could have exported.
        if self._exports is None or not first or not self._exports.due(first):
            return
        # All processes take part in an export, so all must follow process 0's answer.
        if agreed("its export", str(self._running.dirs.lacks_export(first))) == "True":
            self._export(first, state)

    def the_end(self, ended: Ended) -> str | None:
        """Saves the last state and exports it; returns the export's path, None for none."""
        # A resumed run that took no step would only write the same checkpoint again.
        if ended.taken > self._running.first or self._running.resumed is None:
            # The last checkpoint is kept for good; after a signal it may be a temporary one.
            self._save.save(ended.taken, ended.state, force=not ended.preempted)
            self._checkpointer.wait()
        # After a signal the time is short; the resumed run makes up for the export.
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
        if self._work.peft is not None:
            return save_adapters(self._running, state, taken)
        # Exports are of the average of the parameters, where the run keeps one.
        model = bind(state.eval_params, self._running.frozen)
        return _export(self._work, model, self._running.dirs.export(taken), show=self._running.session.show)


def build_checkpointer(plan: TrainPlan, dirs: RunDirs, leases: Sequence[Lease]) -> Checkpointer:
    """The writer of the run's checkpoints, with the configured intervals, in folders whose leases it holds."""
    work: TrainWork = plan.work
    written, vocab = work.config.trainer.checkpointer, work.model.vocab_size
    assert vocab is not None
    return Checkpointer(
        dirs.checkpoints,
        keep=[(interval.every, interval.until) for interval in written.keep],
        save_interval_seconds=None if written.save_interval is None else written.save_interval.total_seconds(),
        keep_last_temporary=written.keep_last_temporary_checkpoints,
        temporary_base=dirs.temporary,
        delete_old_temporary=written.delete_old_temp_checkpoints,
        used=used_shapes((planned.leaf for planned in work.state_plan.whole.leaves), {"vocab": vocab}),
        watch=checkpoint_watch(written.debug),
        leases=leases,
    )


def training_job(run: TrainedRun, load: LoadPlan | None, target: Target, *, exported: int) -> TrainingJob:
    """What the cost of a run depends on besides its Programs: its steps, and the bytes that it saves and restores.

    Args:
        run: the training run.
        load: the weights that are read when it begins; None for none.
        target: the devices.
        exported: bytes of one export.
    """
    trainer, whole, second = run.config.trainer, run.state_plan.whole, run.models.resident
    saved, steps = trainer.checkpointer, trainer.num_train_steps
    nbytes = sum(planned.leaf.nbytes for planned in whole.leaves)
    on_a_host = whole.bytes_per_device * (target.devices // target.hosts)
    # Frozen weights are in no checkpoint, so they are read again (`initial_state.py`); so is a second model.
    again = [load if run.frozen is not None else None, None if second is None else second.load]
    keep = [(interval.every, interval.until) for interval in saved.keep]
    # With several intervals, the longest: an interruption loses at most as many steps.
    spacing = [every for every, _ in keep if every <= steps]
    exports = 0
    if any((run.config.hf_save_path, run.config.peft_save_path, run.config.merged_hf_save_path)):
        exports = -(-steps // run.config.hf_save_steps)
    return TrainingJob(
        steps=steps,
        default_steps="trainer.num_train_steps" not in run.written,
        checkpoint_bytes=nbytes,
        # A host reads an array that several of its devices hold once.
        restored_host_bytes=min(nbytes, on_a_host),
        reread_host_bytes=sum(max(plan.bytes_by_host, default=0) for plan in again if plan is not None),
        permanent_checkpoints=count_kept(steps, keep),
        permanent_every=max(spacing, default=None),
        save_seconds=None if saved.save_interval is None else saved.save_interval.total_seconds(),
        temporary_checkpoints=saved.keep_last_temporary_checkpoints,
        exports=exports,
        export_bytes=exported,
    )


def last_checkpoint(checkpointer: Checkpointer, resumed: CheckpointRef | None) -> str:
    """A line that names the checkpoint from which a failed run can resume."""
    checkpointer.wait()
    ref = checkpointer.newest or resumed
    return (
        "no checkpoint was saved before" if ref is None else f"the last checkpoint is of step {ref.step} ({ref.path})"
    )


def _export(work: TrainWork, model: LmHeadModel, folder: str, *, show: bool) -> str:
    tokenizer = work.tokenizer if isinstance(work.tokenizer, FastTokenizer) else None
    barrier("exporting")
    with Progress(f"exporting to {folder}", total=None, unit="bytes", show=show) as progress:

        def report_progress(done: int, total: int) -> None:
            progress.meter.total = total
            progress.advance_to(done)

        export(
            model,
            work.model,
            folder,
            extras=ExportExtras(tokenizer=tokenizer, eos_ids=tuple(work.config.hf_generation_eos_token_ids or ())),
            dtype=work.config.hf_save_dtype,
            overwrite=True,
            progress=report_progress,
        )
    # Process 0 was still writing when the others had nothing left to send.
    barrier("exported", seconds=ONE_FOR_ALL_SECONDS)
    return folder
