"""Checkpoints of our own: saved in the background, atomic, restored onto any mesh.

    with Checkpointer(base, keep=[(1000, None)], save_interval_seconds=900.0, keep_last_temporary=1) as checkpointer:
        for step in ...:
            if checkpointer.due(step):
                checkpointer.save(step, arrays, {"data": ...})

    ref = latest(base)
    arrays = restore(ref, planned_targets(plan, mesh))

The package knows leaf paths, arrays and shardings; their meaning is up to its callers.
"""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand

if TYPE_CHECKING:
    from levanter.checkpoint.checkpointer import Checkpointer as Checkpointer
    from levanter.checkpoint.checkpointer import count_kept as count_kept
    from levanter.checkpoint.discovery import checkpoint_at as checkpoint_at
    from levanter.checkpoint.discovery import find_checkpoints as find_checkpoints
    from levanter.checkpoint.discovery import latest as latest
    from levanter.checkpoint.errors import CheckpointMismatchError as CheckpointMismatchError
    from levanter.checkpoint.errors import CheckpointPeerError as CheckpointPeerError
    from levanter.checkpoint.errors import CheckpointSaveError as CheckpointSaveError
    from levanter.checkpoint.errors import MissingCheckpointError as MissingCheckpointError
    from levanter.checkpoint.errors import UnreadableCheckpointError as UnreadableCheckpointError
    from levanter.checkpoint.refs import CheckpointRef as CheckpointRef
    from levanter.checkpoint.refs import SavedLeaf as SavedLeaf
    from levanter.checkpoint.restore import restore as restore
    from levanter.checkpoint.restore_specs import RestoreTarget as RestoreTarget
    from levanter.checkpoint.restore_specs import planned_targets as planned_targets
    from levanter.checkpoint.restore_specs import used_shapes as used_shapes
    from levanter.checkpoint.save_monitor import SaveWatch as SaveWatch
    from levanter.checkpoint.source import CheckpointSource as CheckpointSource
    from levanter.checkpoint.source import same_names as same_names

export_on_demand(__name__)
