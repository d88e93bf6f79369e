"""The state that a run begins with, where it comes from a checkpoint of ours.

A run *goes on* behind a checkpoint (its own, `trainer.load_checkpoint_path`, `trainer.initialize_from`): everything is
restored, the step included, so data and schedule go on where they stopped. A run that *begins* from a checkpoint is at
step 0, at the beginning of its data and of its schedule. `initialize_from_checkpoint_path` brings the parameters and
the optimizer's statistics, `initialize_model_from_checkpoint_path` the parameters alone.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from haliax_ext.abstract import leaves, with_arrays
from levanter.checkpoint import (
    CheckpointMismatchError,
    CheckpointRef,
    RestoreTarget,
    checkpoint_at,
    planned_targets,
    restore,
)
from levanter.commands.train.work import TrainPlan, TrainWork
from levanter.trainer.state import MODEL, OPTIMIZER, TrainState

logger = logging.getLogger(__name__)


def restored(plan: TrainPlan, mesh: Mesh, ref: CheckpointRef) -> TrainState:
    """The whole state of a checkpoint, on whatever mesh.

    Raises:
        CheckpointMismatchError: a checkpoint of something else; lists the leaves that differ.
    """
    return with_arrays(plan.work.state, restore(ref, _targets(plan, mesh)))


def begun_from(plan: TrainPlan, mesh: Mesh, fresh: TrainState) -> TrainState:
    """A fresh state with what the configuration takes of a checkpoint.

    Args:
        plan: the run.
        mesh: its devices.
        fresh: made from the seed.

    Raises:
        CheckpointMismatchError: a checkpoint of something else; lists the leaves that differ.
    """
    config = plan.work.config
    if config.initialize_model_from_checkpoint_path is not None:
        ref = checkpoint_at(config.initialize_model_from_checkpoint_path)
        return replace(fresh, model=_taken(plan, mesh, ref, fresh.model, MODEL))
    if config.initialize_from_checkpoint_path is not None:
        ref = checkpoint_at(config.initialize_from_checkpoint_path)
        try:
            model = _taken(plan, mesh, ref, fresh.model, MODEL)
            optimizer = _taken(plan, mesh, ref, fresh.optimizer, OPTIMIZER)
        except CheckpointMismatchError as error:
            raise CheckpointMismatchError(
                f"{error}\n  → initialize_model_from_checkpoint_path takes the parameters alone"
            ) from error
        return replace(fresh, model=model, optimizer=_rewound(optimizer, fresh.optimizer))
    return fresh


def _taken(plan: TrainPlan, mesh: Mesh, ref: CheckpointRef, fresh: Any, part: str) -> Any:
    """A part of the state as a checkpoint has it."""
    prefix = f"{part}."
    wanted = {path: target for path, target in _targets(plan, mesh).items() if path.startswith(prefix)}
    if plan.work.config.trainer.allow_partial_checkpoint:
        for path in sorted(wanted.keys() - ref.leaves.keys()):
            logger.warning("%s: %s is not in it and is initialized", ref.path, path)
        wanted = {path: target for path, target in wanted.items() if path in ref.leaves}
    others = {path for path in ref.leaves if not path.startswith(prefix)}
    part_of = replace(ref, leaves={path: leaf for path, leaf in ref.leaves.items() if path not in others})
    found = {path.removeprefix(prefix): x for path, x in restore(part_of, wanted).items()}
    logger.info("%s from the %s", "parameters" if part == MODEL else "optimizer statistics", ref)
    own = {leaf.path: x for leaf, x in zip(leaves(fresh), jax.tree.leaves(fresh), strict=True)}
    return with_arrays(fresh, {**own, **found})


def _rewound(optimizer: Any, fresh: Any) -> Any:
    """Optimizer statistics with the schedule at its beginning; the count of Adam's averages stays."""

    def is_schedule(node: Any) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    return jax.tree.map(lambda old, new: new if is_schedule(old) else old, optimizer, fresh, is_leaf=is_schedule)


def _targets(plan: TrainPlan, mesh: Mesh) -> Mapping[str, RestoreTarget]:
    work: TrainWork = plan.work
    assert work.model.vocab_size is not None
    return planned_targets(plan.sharding, mesh, true_sizes={"vocab": work.model.vocab_size})
