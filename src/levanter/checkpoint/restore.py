"""`restore`: a checkpoint's arrays onto the devices that are there now."""

from collections.abc import Mapping

import jax

from levanter.checkpoint.array_reads import read_arrays
from levanter.checkpoint.refs import CheckpointRef
from levanter.checkpoint.restore_specs import RestoreTarget, Unexpected, check_targets


def restore(
    ref: CheckpointRef, targets: Mapping[str, RestoreTarget], *, unexpected: Unexpected = "error"
) -> dict[str, jax.Array]:
    """Reads a checkpoint, every array straight into its target's sharding.

    Each process reads the ranges of the files that its own devices need; the values are those that were saved, bit
    for bit, on whatever mesh.

    Args:
        ref: the checkpoint.
        targets: every array that is wanted, by path.
        unexpected: whether leaves of the checkpoint that no target takes are an error, or left out (to take the
            model from a checkpoint of a whole training state).

    Raises:
        CheckpointMismatchError: lists every leaf that is missing, unexpected, or of another shape or dtype; nothing
            has been read.
        UnreadableCheckpointError: files of the checkpoint are missing or damaged.
    """
    check_targets(ref, targets, unexpected=unexpected)
    return read_arrays(ref, targets)
