"""The folders of a training run: checkpoints to resume from, and outputs.

All of them are checked before text is read or anything is computed.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from levanter.checkpoint import CheckpointRef, SaveWatch, checkpoint_at, latest
from levanter.commands.train.config import TrainLmConfig
from levanter.compat.hf.export import ExportPathError
from levanter.compat.hf.export_dir import exports_in, is_complete
from levanter.distributed.process_group import process_group
from levanter.io import Lease, Output, is_remote, join, leased
from levanter.io.paths import base_name, check_writable, filesystem
from levanter.trainer.config_blocks import CheckpointDebugConfig

logger = logging.getLogger(__name__)

EXPORT_KEYS = ("hf_save_path", "peft_save_path", "merged_hf_save_path")
"""Keys that name the folders of exports."""

LEASE_SECONDS = 600.0
"""How long other processes wait for process 0, which may observe an earlier run's lease for a minute."""


class MissingResumeError(ValueError):
    """The configuration requires a run to resume, and there is no checkpoint to resume from."""


@dataclass(frozen=True, kw_only=True)
class RunDirs:
    """The folders of one run.

    Attributes:
        checkpoints: of its checkpoints.
        temporary: of temporary checkpoints, if they have a folder of their own.
        exports: of its Hugging Face exports, or of its adapters as peft reads them; None for none.
        merged: of merged models, where adapters are saved too; None for none.
    """

    checkpoints: str
    temporary: str | None
    exports: str | None
    merged: str | None = None

    @classmethod
    def of(cls, config: TrainLmConfig, run_id: str) -> "RunDirs":
        """The folders of a configuration."""
        checkpointer = config.trainer.checkpointer
        subfolder = (run_id,) if checkpointer.append_run_id_to_base_path else ()
        return cls(
            checkpoints=join(checkpointer.base_path, *subfolder),
            temporary=None
            if checkpointer.temporary_base_path is None
            else join(checkpointer.temporary_base_path, *subfolder),
            exports=None if config.exports is None else join(config.exports, run_id),
            merged=None if config.merged is None else join(config.merged, run_id),
        )

    @property
    def bases(self) -> tuple[str, ...]:
        """The folders that are searched for checkpoints."""
        return (self.checkpoints,) if self.temporary is None else (self.checkpoints, self.temporary)

    def contains(self, ref: CheckpointRef) -> bool:
        """Whether a checkpoint is one of this run's."""
        # By path, not by contents: a copy of a checkpoint elsewhere is another run's.
        return any(ref.path == join(base, base_name(ref.path)) for base in self.bases)

    def newest(self) -> CheckpointRef | None:
        """The last complete checkpoint.

        Raises:
            UnreadableCheckpointError: it is damaged.
        """
        # Permanent and temporary checkpoints are compared by step, whichever folder they are in.
        return latest(*self.bases)

    def export(self, taken: int) -> str:
        """The folder of the export after a number of steps."""
        assert self.exports is not None
        return join(self.exports, f"step-{taken}")

    def lacks_export(self, taken: int) -> bool:
        """Whether there is no export after a number of steps."""
        # Both folders must be complete where two are configured.
        return not all(is_complete(join(folder, f"step-{taken}")) for folder in self.exported)

    @property
    def exported(self) -> tuple[str, ...]:
        """The folders of all exports."""
        return tuple(folder for folder in (self.exports, self.merged) if folder is not None)


@contextmanager
def lease_run_dirs(dirs: RunDirs, run_id: str) -> Iterator[tuple[Lease, ...]]:
    """Holds the leases of the checkpoint folders; process 0 takes them, the others wait for it.

    Exports have leases of their own, held while one is written.

    Raises:
        LeaseTakenError: another process writes there.
        LeaseError: the folder is not writable.
    """
    with ExitStack() as stack:
        leases: list[Lease] = []

        def take() -> str:
            # Both keys may name one folder, which can be leased only once.
            for base in dict.fromkeys(dirs.bases):
                advice = "give this run its own folder (trainer.id, trainer.checkpointer.base_path)"
                leases.append(stack.enter_context(leased(base, what=f"training run {run_id}", advice=advice)))
            return "held"

        process_group().follow("the lease of the checkpoints", take, seconds=LEASE_SECONDS)
        yield tuple(leases)


def find_resume(config: TrainLmConfig, dirs: RunDirs) -> CheckpointRef | None:
    """The checkpoint that the run resumes from; None if it begins.

    Its own comes first, then `trainer.load_checkpoint_path`, then `trainer.initialize_from`. With
    `trainer.load_checkpoint: false` only the last counts.

    Raises:
        MissingResumeError: `trainer.load_checkpoint: true`, and there is none.
        ValueError: a given path has none, or a checkpoint is damaged.
    """
    trainer = config.trainer
    # Looked up even if it is not used: a run that starts over warns about what it leaves behind.
    newest = dirs.newest()
    if trainer.load_checkpoint is False:
        if newest is not None:
            logger.warning(
                "trainer.load_checkpoint is false: the run starts over, in a folder that has the %s; without this "
                "key, the next start resumes from the highest step in it",
                newest,
            )
    elif newest is not None:
        return newest
    elif trainer.load_checkpoint_path is not None:
        return checkpoint_at(trainer.load_checkpoint_path)
    # Reached without a checkpoint of its own, or with `load_checkpoint: false`.
    if trainer.initialize_from is not None:
        return checkpoint_at(trainer.initialize_from)
    if trainer.load_checkpoint:
        raise MissingResumeError(
            f"trainer.load_checkpoint is true, but there is no complete checkpoint in {' or '.join(dirs.bases)}; "
            "set trainer.load_checkpoint_path, or the trainer.id of the run to resume"
        )
    return None


def refuse_existing_exports(dirs: RunDirs, resumed: CheckpointRef | None) -> None:
    """Checks where exports will go, before anything is computed.

    A run that resumes from a checkpoint of its own replaces what its earlier attempt exported. An export implies a
    checkpoint (which is saved first); an export that was killed midway counts for nothing.

    Raises:
        ExportPathError: a new run would write to a folder that exists.
        ValueError: no installed package handles the URL's scheme.
    """
    # An earlier attempt of this run may have exported; its folders are replaced.
    begins = resumed is None or not dirs.contains(resumed)
    for folder in dirs.exported:
        if begins and exports_in(folder):
            raise ExportPathError(
                folder,
                "contains exports of another run",
                suggestion="set another hf_save_path or trainer.id, or move the folder away",
            )


def check_exports_writable(dirs: RunDirs) -> None:
    """Writes and deletes a small file where exports will go, if that is elsewhere; one process does.

    Raises:
        ValueError: the folder is not writable.
    """
    # A local folder is created when it is needed. Object storage shows a missing permission only when something is
    # written.
    for folder in filter(is_remote, dirs.exported):
        try:
            filesystem(folder)
            check_writable(folder)
        except (OSError, ValueError) as error:
            raise ValueError(f"hf_save_path: {folder}: cannot be written ({error})") from error


def run_outputs(config: TrainLmConfig, run_id: str) -> tuple[Output, ...]:
    """Every folder that a run writes: for checkpoints (by all processes), exports, logs and profiles."""
    dirs = RunDirs.of(config, run_id)
    outputs = [
        Output(key="trainer.log_dir", path=join(str(config.trainer.log_dir), run_id), kind="folder", everywhere=True),
        Output(key="trainer.checkpointer.base_path", path=dirs.checkpoints, kind="folder", everywhere=True),
    ]
    if dirs.temporary is not None:
        key = "trainer.checkpointer.temporary_base_path"
        outputs.append(Output(key=key, path=dirs.temporary, kind="folder", everywhere=True))
    if dirs.exports is not None:
        key = next(key for key in EXPORT_KEYS if getattr(config, key) is not None)
        outputs.append(Output(key=key, path=dirs.exports, kind="folder"))
    if dirs.merged is not None:
        outputs.append(Output(key="merged_hf_save_path", path=dirs.merged, kind="folder"))
    return tuple(outputs)


def interrupted_message(config: TrainLmConfig, run_id: str) -> str:
    """A line that names the checkpoint from which an interrupted run can resume."""
    dirs = RunDirs.of(config, run_id)
    # This runs while the process ends: a listing that fails must not hide the reason for which it ends.
    try:
        ref = dirs.newest()
    except (OSError, ValueError) as error:
        return f"its checkpoints cannot be listed ({error})"
    if ref is None:
        return f"no checkpoint was saved in {' or '.join(dirs.bases)}"
    return f"the last checkpoint is of step {ref.step} ({ref.path}); trainer.id={run_id} resumes from it"


def checkpoint_watch(debug: CheckpointDebugConfig) -> SaveWatch | None:
    """The monitoring of saves that `trainer.checkpointer.debug` configures; None if it is off.

    Raises:
        ValueError: an interval or a number in it is invalid.
    """
    if not debug.enabled:
        return None
    try:
        return SaveWatch(
            interval=debug.log_interval,
            stacks_after=debug.dump_stacks_after,
            frames=debug.tracemalloc_frames,
            top=debug.top_allocations,
            collect=debug.force_gc_before_serialize,
            flush=debug.flush_logs,
        )
    except ValueError as error:
        raise ValueError(f"trainer.checkpointer.debug: {error}") from error
