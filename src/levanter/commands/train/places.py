"""The folders of a training run: what it resumes from, and where it may write.

All of it is looked at before text is read or anything is computed.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from levanter.checkpoint import CheckpointRef, SaveWatch, checkpoint_at, latest
from levanter.commands.train.config import TrainLmConfig
from levanter.compat.hf.export import ExportPathError
from levanter.compat.hf.export_place import exports_in, is_whole
from levanter.io import Lease, Output, is_remote, join, leased
from levanter.io.paths import base_name, check_writable, filesystem
from levanter.processes.meeting import meeting
from levanter.trainer.parts import CheckpointDebugConfig

logger = logging.getLogger(__name__)

LEASE_SECONDS = 600.0
"""How long the others wait for process 0, which may look a minute for signs of life of a run before this one."""


class MissingResumeError(ValueError):
    """A run was told to resume, and there is nothing to resume from."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """The folders of one run.

    Attributes:
        checkpoints: of its checkpoints.
        temporary: of those that are deleted again, where they have a folder of their own.
        exports: of its Hugging Face exports; None for none.
    """

    checkpoints: str
    temporary: str | None
    exports: str | None

    @classmethod
    def of(cls, config: TrainLmConfig, run_id: str) -> "Places":
        """The folders that a configuration says."""
        written = config.trainer.checkpointer
        own = (run_id,) if written.append_run_id_to_base_path else ()
        return cls(
            checkpoints=join(written.base_path, *own),
            temporary=None if written.temporary_base_path is None else join(written.temporary_base_path, *own),
            exports=None if config.hf_save_path is None else join(config.hf_save_path, run_id),
        )

    @property
    def bases(self) -> tuple[str, ...]:
        """Where checkpoints are found."""
        return (self.checkpoints,) if self.temporary is None else (self.checkpoints, self.temporary)

    def own(self, ref: CheckpointRef) -> bool:
        """Whether a checkpoint is one of this run's."""
        return any(ref.path == join(base, base_name(ref.path)) for base in self.bases)

    def newest(self) -> CheckpointRef | None:
        """The last complete checkpoint.

        Raises:
            UnreadableCheckpointError: it is damaged.
        """
        return latest(*self.bases)

    def export(self, taken: int) -> str:
        """The folder of the export after so many steps."""
        assert self.exports is not None
        return join(self.exports, f"step-{taken}")

    def lacks_export(self, taken: int) -> bool:
        """Whether there is no export after so many steps."""
        return not is_whole(self.export(taken))


@contextmanager
def held_places(places: Places, run_id: str) -> Iterator[tuple[Lease, ...]]:
    """Holds the leases of the folders of checkpoints; process 0 does, the others wait for it.

    Exports have leases of their own, for as long as one is written.

    Raises:
        LeaseTakenError: another process writes there.
        LeaseError: nothing can be written there.
    """
    with ExitStack() as stack:
        held: list[Lease] = []

        def take() -> str:
            for base in dict.fromkeys(places.bases):
                advice = "give this run a folder of its own (trainer.id, trainer.checkpointer.base_path)"
                held.append(stack.enter_context(leased(base, what=f"training run {run_id}", advice=advice)))
            return "held"

        meeting().follow("the lease of the checkpoints", take, seconds=LEASE_SECONDS)
        yield tuple(held)


def find_resume(config: TrainLmConfig, places: Places) -> CheckpointRef | None:
    """The checkpoint that the run goes on behind; None where it begins.

    Its own comes first, then `trainer.load_checkpoint_path`, then `trainer.initialize_from`. With
    `trainer.load_checkpoint: false` only the last of them counts.

    Raises:
        MissingResumeError: `trainer.load_checkpoint: true`, and there is none.
        ValueError: a path that is given has none, or a checkpoint is damaged.
    """
    trainer = config.trainer
    found = places.newest()
    if trainer.load_checkpoint is False:
        if found is not None:
            logger.warning(
                "trainer.load_checkpoint is false: the run begins anew, in a folder that has the %s; without it, the "
                "next start goes on behind the highest step there is",
                found,
            )
    elif found is not None:
        return found
    elif trainer.load_checkpoint_path is not None:
        return checkpoint_at(trainer.load_checkpoint_path)
    if trainer.initialize_from is not None:
        return checkpoint_at(trainer.initialize_from)
    if trainer.load_checkpoint:
        raise MissingResumeError(
            f"trainer.load_checkpoint is true, but there is no complete checkpoint in {' or '.join(places.bases)}; "
            "give trainer.load_checkpoint_path, or the trainer.id of the run to resume"
        )
    return None


def refuse_taken_exports(places: Places, resumed: CheckpointRef | None) -> None:
    """Looks at where exports will go, before anything is computed.

    A run that goes on behind a checkpoint of its own replaces what its earlier attempt exported. Where there is an
    export, there is a checkpoint (it is saved first); an export that was killed half-way counts for nothing.

    Raises:
        ExportPathError: a run that begins would write where something is.
        ValueError: no installed package knows the URL's scheme.
    """
    if places.exports is None:
        return
    begins = resumed is None or not places.own(resumed)
    if begins and exports_in(places.exports):
        raise ExportPathError(
            places.exports,
            "there are exports of another run here",
            suggestion="give another hf_save_path or trainer.id, or move the folder away",
        )


def check_exports_writable(places: Places) -> None:
    """Writes and deletes a small file where exports will go, if that is elsewhere; one process does.

    Raises:
        ValueError: nothing can be written there.
    """
    if places.exports is None or not is_remote(places.exports):
        return
    try:
        filesystem(places.exports)
        check_writable(places.exports)
    except (OSError, ValueError) as error:
        raise ValueError(f"hf_save_path: {places.exports}: cannot be written ({error})") from error


def places_written(config: TrainLmConfig, run_id: str) -> tuple[Output, ...]:
    """Every folder that a run writes: of checkpoints (by all processes), of exports, and of its logs and profiles."""
    places = Places.of(config, run_id)
    found = [
        Output(key="trainer.log_dir", path=join(str(config.trainer.log_dir), run_id), kind="folder", everywhere=True),
        Output(key="trainer.checkpointer.base_path", path=places.checkpoints, kind="folder", everywhere=True),
    ]
    if places.temporary is not None:
        key = "trainer.checkpointer.temporary_base_path"
        found.append(Output(key=key, path=places.temporary, kind="folder", everywhere=True))
    if places.exports is not None:
        found.append(Output(key="hf_save_path", path=places.exports, kind="folder"))
    return tuple(found)


def what_is_left(config: TrainLmConfig, run_id: str) -> str:
    """What a run that was interrupted can go back to, in a line."""
    places = Places.of(config, run_id)
    try:
        ref = places.newest()
    except (OSError, ValueError) as error:
        return f"its checkpoints cannot be listed ({error})"
    if ref is None:
        return f"no checkpoint was saved in {' or '.join(places.bases)}"
    return f"the last checkpoint is of step {ref.step} ({ref.path}); trainer.id={run_id} goes on behind it"


def checkpoint_watch(debug: CheckpointDebugConfig) -> SaveWatch | None:
    """What saves report about themselves, as `trainer.checkpointer.debug` says.

    Raises:
        ValueError: an interval or a number in it is senseless.
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
