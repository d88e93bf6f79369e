"""Where restored arrays go, and whether a checkpoint has what is asked for.

A *target* is the shape, dtype and sharding an array is to have. The sharding is the caller's: it need not be the one
the array was saved under, nor on as many devices or processes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np

from haliax_ext.errors import nearest
from haliax_ext.planner import ShardingPlan
from levanter.checkpoint.errors import CheckpointMismatchError
from levanter.checkpoint.refs import CheckpointRef, SavedLeaf

Unexpected = Literal["error", "skip"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """What one array is to become."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: jax.sharding.Sharding


def planned_targets(plan: ShardingPlan, mesh: jax.sharding.Mesh) -> dict[str, Target]:
    """The targets of everything in a plan, on a mesh built from the plan's."""
    return {
        each.leaf.path: Target(
            shape=each.leaf.shape, dtype=each.leaf.dtype, sharding=plan.sharding(each.leaf.path, mesh)
        )
        for each in plan.leaves
    }


def saved_leaf(shape: tuple[int, ...], dtype: np.dtype) -> SavedLeaf:
    """A shape and a dtype as a checkpoint records them."""
    return SavedLeaf(shape=tuple(shape), dtype=np.dtype(dtype).name)


def check_targets(ref: CheckpointRef, targets: Mapping[str, Target], *, unexpected: Unexpected = "error") -> None:
    """Compares what is wanted with what was saved, before a byte of an array is read.

    Raises:
        CheckpointMismatchError: lists every leaf that is missing, unexpected, or of another shape or dtype.
    """
    wanted = {path: saved_leaf(target.shape, target.dtype) for path, target in targets.items()}
    found = list(_differences(ref.leaves, wanted, unexpected))
    if found:
        same = sum(wanted.get(path) == leaf for path, leaf in ref.leaves.items())
        raise CheckpointMismatchError(
            f"{ref.path}: this checkpoint is not of what is to be restored: {len(found)} difference"
            f"{'s' if len(found) > 1 else ''}, {same} of {len(ref.leaves)} leaves agree:\n  " + "\n  ".join(found)
        )


def _differences(
    saved: Mapping[str, SavedLeaf], wanted: Mapping[str, SavedLeaf], unexpected: Unexpected
) -> Iterator[str]:
    extra = sorted(saved.keys() - wanted.keys())
    for path in sorted(wanted.keys() - saved.keys()):
        close = nearest(path, extra) or nearest(path, saved)
        hint = f"; nearest in the checkpoint: {' or '.join(close)}" if close else ""
        yield f"missing     {path} {wanted[path]}: the checkpoint has no such leaf{hint}"
    if unexpected == "error":
        for path in extra:
            yield f"unexpected  {path} {saved[path]}: nothing takes this leaf of the checkpoint"
    for path in sorted(wanted.keys() & saved.keys()):
        if wanted[path].shape != saved[path].shape:
            yield f"shape       {path}: wanted {list(wanted[path].shape)}, the checkpoint has {list(saved[path].shape)}"
        if wanted[path].dtype != saved[path].dtype:
            yield f"dtype       {path}: wanted {wanted[path].dtype}, the checkpoint has {saved[path].dtype}"
