"""The folders of a training run: what it resumes from, and where it may write.

All of it is looked at before text is read or anything is computed.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from levanter.checkpoint import CheckpointRef, checkpoint_at, find_checkpoints
from levanter.compat.hf.export import ExportPathError
from levanter.io import exists, is_remote, join

if TYPE_CHECKING:
    from levanter.main.train_lm import TrainLmConfig


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
    def of(cls, config: "TrainLmConfig", run_id: str) -> "Places":
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

    def newest(self) -> CheckpointRef | None:
        """The last complete checkpoint."""
        found = find_checkpoints(*self.bases)
        return found[-1] if found else None

    def export(self, taken: int) -> str:
        """The folder of the export after so many steps."""
        assert self.exports is not None
        return join(self.exports, f"step-{taken}")


def find_resume(config: "TrainLmConfig", places: Places) -> CheckpointRef | None:
    """The checkpoint that the run goes on behind; None where it begins.

    Raises:
        MissingResumeError: `trainer.load_checkpoint: true`, and there is none.
        ValueError: `trainer.load_checkpoint_path` has none, or a checkpoint is damaged.
    """
    trainer = config.trainer
    if trainer.load_checkpoint is False:
        return None
    found = places.newest()
    if found is not None:
        return found
    if trainer.load_checkpoint_path is not None:
        return checkpoint_at(trainer.load_checkpoint_path)
    if trainer.load_checkpoint:
        raise MissingResumeError(
            f"trainer.load_checkpoint is true, but there is no complete checkpoint in {' or '.join(places.bases)}; "
            "give trainer.load_checkpoint_path, or the trainer.id of the run to resume"
        )
    return None


def refuse_taken_exports(config: "TrainLmConfig", places: Places, resumed: CheckpointRef | None) -> None:
    """Looks at where exports will go, before anything is computed.

    A run that resumes replaces what its earlier attempt exported.

    Raises:
        ExportPathError: a run that begins would write where something is.
        ValueError: the path is not on a disk of this machine.
    """
    if places.exports is None:
        return
    if is_remote(places.exports):
        raise ValueError(f"hf_save_path: {config.hf_save_path}: exports go to a local path; copy the folder afterwards")
    if resumed is None and exists(places.exports):
        raise ExportPathError(
            places.exports,
            "there are exports of another run here",
            suggestion="give another hf_save_path or trainer.id, or move the folder away",
        )
