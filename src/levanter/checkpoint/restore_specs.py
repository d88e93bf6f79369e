"""The targets of restored arrays, and the comparison of a checkpoint with them.

A *target* is the shape, dtype and sharding an array is to have. The sharding is the caller's: it need not be the one
the array was saved under, nor on as many devices or processes. Neither need the shape be, where some of it is padding:
a mesh that shards the vocabulary rounds it up, and another mesh rounds it up to another number.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np

from haliax_ext.abstract import Leaf
from haliax_ext.errors import nearest
from haliax_ext.planner import ShardingPlan
from levanter.checkpoint.errors import CheckpointMismatchError
from levanter.checkpoint.refs import CheckpointRef, SavedLeaf

Unexpected = Literal["error", "skip"]


@dataclass(frozen=True, kw_only=True)
class RestoreTarget:
    """The shape, dtype and sharding that one restored array is to have.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        sharding: its sharding.
        used: the shape without padding; beyond it, elements that the checkpoint lacks are zero. None: no padding.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: jax.sharding.Sharding
    used: tuple[int, ...] | None = None


def planned_targets(
    plan: ShardingPlan, mesh: jax.sharding.Mesh, *, true_sizes: Mapping[str, int] | None = None
) -> dict[str, RestoreTarget]:
    """The targets of everything in a plan, on a mesh built from the plan's.

    Args:
        plan: the sharding of every array.
        mesh: the devices.
        true_sizes: of axes that are rounded up in the plan's leaves.
    """
    used = used_shapes((target.leaf for target in plan.leaves), true_sizes or {})
    return {
        target.leaf.path: RestoreTarget(
            shape=target.leaf.shape,
            dtype=target.leaf.dtype,
            sharding=plan.sharding(target.leaf.path, mesh),
            used=used.get(target.leaf.path),
        )
        for target in plan.leaves
    }


def used_shapes(leaves: Iterable[Leaf], true_sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """For each leaf with an axis that may be rounded up, its shape without what was added."""
    return {
        leaf.path: tuple(true_sizes.get(name, size) for name, size in leaf.axes)
        for leaf in leaves
        if any(name in true_sizes for name, _ in leaf.axes)
    }


def saved_leaf(shape: tuple[int, ...], dtype: np.dtype, *, used: tuple[int, ...] | None = None) -> SavedLeaf:
    """A shape and a dtype as a checkpoint records them."""
    return SavedLeaf(shape=tuple(shape), dtype=np.dtype(dtype).name, used=used)


def check_targets(
    ref: CheckpointRef, targets: Mapping[str, RestoreTarget], *, unexpected: Unexpected = "error"
) -> None:
    """Compares what is wanted with what was saved, before a byte of an array is read.

    Raises:
        CheckpointMismatchError: lists every leaf that is missing, unexpected, or of another shape or dtype.
    """
    expected = {path: saved_leaf(target.shape, target.dtype, used=target.used) for path, target in targets.items()}
    check_leaves(ref, expected, unexpected=unexpected)


def check_leaves(
    ref: CheckpointRef,
    wanted: Mapping[str, SavedLeaf],
    *,
    unexpected: Unexpected = "error",
    within: tuple[str, ...] = ("",),
) -> None:
    """Compares what is wanted with what was saved, without a device.

    Args:
        ref: the checkpoint.
        wanted: every leaf that is wanted, by path.
        unexpected: as in `restore`.
        within: prefixes of the paths that are compared; other leaves of the checkpoint are ignored.

    Raises:
        CheckpointMismatchError: lists every leaf that is missing, unexpected, or of another shape or dtype.
    """
    # Only leaves below the given prefixes count: a model can be taken from a whole training state.
    saved = {path: leaf for path, leaf in ref.leaves.items() if path.startswith(within)}
    differences = list(_differences(saved, wanted, unexpected))
    if differences:
        num_equal = sum(path in wanted and _agree(leaf, wanted[path]) for path, leaf in saved.items())
        raise CheckpointMismatchError(
            f"{ref.path}: this checkpoint does not match what is to be restored: {len(differences)} difference"
            f"{'s' if len(differences) > 1 else ''}, {num_equal} of {len(saved)} leaves agree:\n  "
            + "\n  ".join(differences)
        )


def _differences(
    saved: Mapping[str, SavedLeaf], wanted: Mapping[str, SavedLeaf], unexpected: Unexpected
) -> Iterator[str]:
    extra = sorted(saved.keys() - wanted.keys())
    for path in sorted(wanted.keys() - saved.keys()):
        # A leaf that is missing is often one of the unexpected ones under another name.
        close = nearest(path, extra) or nearest(path, saved)
        hint = f"; nearest in the checkpoint: {' or '.join(close)}" if close else ""
        yield f"missing     {path} {wanted[path]}: the checkpoint has no such leaf{hint}"
    if unexpected == "error":
        for path in extra:
            yield f"unexpected  {path} {saved[path]}: the checkpoint's leaf is not wanted"
    for path in sorted(wanted.keys() & saved.keys()):
        if not _fits(saved[path], wanted[path]):
            yield f"shape       {path}: wanted {list(wanted[path].meant)}, the checkpoint has {list(saved[path].meant)}"
        if wanted[path].dtype != saved[path].dtype:
            yield f"dtype       {path}: wanted {wanted[path].dtype}, the checkpoint has {saved[path].dtype}"


def _fits(saved: SavedLeaf, wanted: SavedLeaf) -> bool:
    """Whether the shapes without padding are equal; where one does not record padding, also the stored shapes count."""
    if saved.used is not None and wanted.used is not None:
        return saved.used == wanted.used
    # Checkpoints that record no padding can only be compared as they are stored.
    return saved.shape == wanted.shape or saved.meant == wanted.meant


def _agree(saved: SavedLeaf, wanted: SavedLeaf) -> bool:
    return _fits(saved, wanted) and saved.dtype == wanted.dtype
