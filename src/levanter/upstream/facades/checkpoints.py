"""Functions of earlier generations that find checkpoints."""

from levanter.checkpoint import checkpoint_at, latest
from levanter.checkpoint.errors import MissingCheckpointError


def latest_checkpoint_path(base_path: str, *more: str) -> str:
    """The folder of the newest complete checkpoint below some bases.

    Raises:
        MissingCheckpointError: no checkpoint is complete.
    """
    checkpoint = latest(base_path, *more)
    if checkpoint is None:
        raise MissingCheckpointError(f"no checkpoint at {base_path}")
    return checkpoint.path


def discover_latest_checkpoint(base_path: str, *more: str) -> str | None:
    """The folder of the newest complete checkpoint below some bases; None if there is none."""
    checkpoint = latest(base_path, *more)
    return None if checkpoint is None else checkpoint.path


def is_checkpoint_path(path: str) -> bool:
    """Whether a checkpoint is at a path, or below it."""
    try:
        checkpoint_at(path)
    except MissingCheckpointError:
        return latest(path) is not None
    return True
