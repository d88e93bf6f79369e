"""The errors of checkpoints, each with a message that a user can act on."""


class MissingCheckpointError(FileNotFoundError, ValueError):
    """A path holds no complete checkpoint."""


class UnreadableCheckpointError(OSError, ValueError):
    """A checkpoint exists and cannot be read: damaged, or written by another program."""


class CheckpointMismatchError(ValueError):
    """A checkpoint holds other arrays than the run needs; the message lists every difference."""


class CheckpointSaveError(OSError, ValueError):
    """A checkpoint could not be written; those that were complete before are intact."""


class CheckpointPeerError(CheckpointSaveError, TimeoutError):
    """Another process of the run did not take part in a save in time."""

    exit_code = 5
