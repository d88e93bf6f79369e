"""The first state of a run: restored, loaded, or initialized.

A run *resumes* from a checkpoint (its own, `trainer.load_checkpoint_path`, `trainer.initialize_from`): everything is
restored, the step included, so data and schedule continue where they stopped. A run that *begins* from a checkpoint is
at step 0, at the start of its data and of its schedule. `initialize_from_checkpoint_path` restores the parameters and
the optimizer state, `initialize_model_from_checkpoint_path` only the parameters.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import optax

from haliax_ext.abstract import leaves, with_arrays
from haliax_ext.loading import LoadedArrays
from haliax_ext.planner import ShardingPlan
from levanter.checkpoint import (
    CheckpointMismatchError,
    CheckpointRef,
    RestoreTarget,
    SavedLeaf,
    checkpoint_at,
    planned_targets,
    restore,
)
from levanter.commands.model.sharding import load_weights
from levanter.commands.train.adapters import load_initial_adapters
from levanter.commands.train.task import Running
from levanter.commands.train.work import TrainWork
from levanter.models.base import LmHeadModel
from levanter.trainer.adapter_state import INIT, INIT_BASE
from levanter.trainer.averaging import ParameterAverage
from levanter.trainer.frozen_identity import DIGEST, FrozenPart, check_digests, check_partition, on_host, under_model
from levanter.trainer.train_state import FROZEN, MODEL, OPTIMIZER, TrainState
from levanter.trainer.trainable import bind

logger = logging.getLogger(__name__)


def initial_state(running: Running) -> tuple[TrainState, LmHeadModel | None]:
    """The state before the first step (restored, from loaded weights, or from the seed), and the frozen part.

    The frozen part is in no checkpoint of the run: it is read from its original source.

    Raises:
        CheckpointMismatchError: the checkpoint does not match; lists the leaves that differ.
    """
    work: TrainWork = running.plan.work
    config, resumed = work.config, running.resumed
    if resumed is not None:
        # Compares patterns and origins before any weight is read; digests can only be compared once the weights are
        # there.
        check_partition(resumed, work.frozen_part)
        # All parameters are in the checkpoint, so it alone gives the state.
        if work.frozen is None:
            return restore_state(running, resumed), None
    key = jax.random.PRNGKey(config.trainer.seed)
    if work.adapted is not None:
        # No checkpoint of the run contains the base, so it is loaded or initialized again on every start.
        base = adapted_model(running, key)
        if resumed is not None:
            return restore_state(running, resumed), base
        if work.begun is not None:
            return running.jit(INIT)(key, load_initial_adapters(work, running.mesh)), base
        # Whole copies (`modules_to_save`) start as the base's own arrays; INIT takes them only if there are some.
        copied = work.adapted.copied(base)
        return running.jit(INIT)(key, *(() if copied is None else (copied,))), base
    if config.pretrained is not None:
        # One pass over the files loads both parts; each of them takes its own paths from it.
        loaded = _load(running, work.state_plan.parameters)
        frozen = with_arrays(work.frozen, loaded.arrays)
        if resumed is not None:
            # Drops the loaded arrays of the trained part before the checkpoint's are allocated; `frozen` keeps its own
            # alive.
            del loaded
            return restore_state(running, resumed), frozen
        trained = with_arrays(work.state.model, loaded.arrays)
        return running.jit("init_optimizer")(trained, key), frozen
    # The frozen part from the same seed is the same in every attempt, so it needs no checkpoint.
    frozen = None if work.frozen is None else running.jit("init_frozen")(key)
    if resumed is not None:
        assert frozen is not None
        frozen = initial_frozen_part(running, frozen)
        return restore_state(running, resumed), frozen
    return initialize_from_checkpoint(running, running.jit("init_state")(key), frozen)


def adapted_model(running: Running, key: jax.Array) -> LmHeadModel:
    """The base model of the adapters: loaded, from one of our checkpoints, or initialized from the seed.

    Raises:
        CheckpointMismatchError: the checkpoint does not match; lists the leaves that differ.
    """
    run = running.run
    assert run.frozen is not None
    if run.config.pretrained is None:
        return initial_frozen_part(running, running.jit(INIT_BASE)(key))
    return with_arrays(run.frozen, _load(running, run.state_plan.loaded).arrays)


def _load(running: Running, placement: ShardingPlan) -> LoadedArrays:
    """The weights of the Hugging Face checkpoint that the run begins from."""
    load, origin = running.plan.load, running.run.origin
    assert load is not None and origin is not None and origin.checkpoint is not None
    return load_weights(
        load,
        placement,
        origin.checkpoint.source,
        running.mesh,
        show=running.session.show,
        allow_nonfinite=running.run.config.trainer.allow_nonfinite,
    )


def checked_frozen(running: Running, frozen: LmHeadModel | None) -> FrozenPart | None:
    """The identity of the frozen part in the run's checkpoints, with digests; None if nothing is frozen.

    Raises:
        CheckpointMismatchError: the run resumes from a checkpoint that was trained with another frozen part.
    """
    work: TrainWork = running.plan.work
    if frozen is None or work.frozen_part is None:
        return None
    part = replace(work.frozen_part, digests=on_host(running.jit(DIGEST)(frozen)))
    if running.resumed is not None:
        check_digests(running.resumed, part)
    return part


def restore_state(running: Running, ref: CheckpointRef) -> TrainState:
    """The complete state of a checkpoint, on any mesh.

    Raises:
        CheckpointMismatchError: the checkpoint does not match; lists the leaves that differ.
    """
    targets = _targets(running)
    # Targets cover the frozen part too, which the run's own checkpoints do not have.
    wanted = {leaf.path: targets[leaf.path] for leaf in leaves(running.run.state)}
    return with_arrays(running.run.state, restore(ref, wanted))


def initialize_from_checkpoint(
    running: Running, fresh: TrainState, frozen: LmHeadModel | None
) -> tuple[TrainState, LmHeadModel | None]:
    """A fresh state and the frozen part, updated with the parts that the configuration takes from a checkpoint.

    Args:
        running: the run.
        fresh: initialized from the seed.
        frozen: initialized from the seed.

    Raises:
        CheckpointMismatchError: the checkpoint does not match; lists the leaves that differ.
    """
    work = running.run
    # The other checkpoint may have split the model differently. The whole model is restored and then split anew.
    config, whole = work.config, bind(fresh.model, frozen)
    if config.initialize_model_from_checkpoint_path is not None:
        ref = checkpoint_at(config.initialize_model_from_checkpoint_path)
        trained, frozen = work.partition.split(_restore_part(running, ref, whole, MODEL))
        return replace(fresh, model=trained, average=_initial_average(running, ref, fresh, whole)), frozen
    if config.initialize_from_checkpoint_path is not None:
        ref = checkpoint_at(config.initialize_from_checkpoint_path)
        try:
            trained, frozen = work.partition.split(_restore_part(running, ref, whole, MODEL))
            optimizer = _restore_part(running, ref, fresh.optimizer, OPTIMIZER)
        except CheckpointMismatchError as error:
            # The optimizer state matches only the same optimizer over the same trained leaves; parameters alone often
            # fit.
            raise CheckpointMismatchError(
                f"{error}\n  → use initialize_model_from_checkpoint_path to take only the parameters"
            ) from error
        average = _initial_average(running, ref, fresh, whole)
        # The moments stay, the learning rate starts at step 0 of the new schedule.
        rewound = _reset_schedule(optimizer, fresh.optimizer)
        return replace(fresh, model=trained, optimizer=rewound, average=average), frozen
    return fresh, frozen


def _initial_average(
    running: Running, ref: CheckpointRef, fresh: TrainState, whole: LmHeadModel
) -> ParameterAverage | None:
    """The average of a run that begins with a checkpoint's parameters: a copy of these."""
    if fresh.average is None:
        return None
    # Checkpoints of another run may have another average or none, so the average starts as the current parameters.
    return replace(fresh.average, parameters=running.run.partition.split(_restore_part(running, ref, whole, MODEL))[0])


def initial_frozen_part(running: Running, frozen: LmHeadModel) -> LmHeadModel:
    """The frozen part as the run began with it: initialized from the seed, or from the checkpoint that it began from.

    Args:
        running: the run.
        frozen: initialized from the seed.
    """
    begun = running.run.config.begun_from_checkpoint
    if begun is None:
        return frozen
    ref = checkpoint_at(begun)
    # Without the checkpoint's trained leaves, which `restore` would refuse as unexpected.
    return _restore_part(running, replace(ref, leaves=_frozen_leaves(ref, frozen)), frozen, MODEL)


def _frozen_leaves(ref: CheckpointRef, frozen: LmHeadModel) -> dict[str, SavedLeaf]:
    """The frozen arrays of a checkpoint."""
    wanted = {under_model(leaf.path) for leaf in leaves(frozen)}
    return {path: leaf for path, leaf in ref.leaves.items() if path in wanted}


def _restore_part(running: Running, ref: CheckpointRef, fresh: Any, part: str) -> Any:
    """A part of the state, or the complete model, restored from a checkpoint."""
    prefix = f"{part}."
    targets = _targets(running)
    wanted = {path: targets[path] for path in (f"{prefix}{leaf.path}" for leaf in leaves(fresh))}
    if running.run.config.trainer.allow_partial_checkpoint:
        # A missing leaf keeps its fresh value, with a warning for each.
        for path in sorted(wanted.keys() - ref.leaves.keys()):
            logger.warning("%s: does not contain %s, which is initialized", ref.path, path)
        wanted = {path: target for path, target in wanted.items() if path in ref.leaves}
    # `restore` refuses leaves that no target takes, so the other parts of the state are hidden from it.
    others = {path for path in ref.leaves if not path.startswith(prefix)}
    part_of = replace(ref, leaves={path: leaf for path, leaf in ref.leaves.items() if path not in others})
    restored_arrays = {path.removeprefix(prefix): x for path, x in restore(part_of, wanted).items()}
    logger.info("%s from the %s", "parameters" if part == MODEL else "optimizer state", ref)
    # Fresh values first, so that restored ones replace them.
    initial = {leaf.path: x for leaf, x in zip(leaves(fresh), jax.tree.leaves(fresh), strict=True)}
    return with_arrays(fresh, {**initial, **restored_arrays})


def _reset_schedule(optimizer: Any, fresh: Any) -> Any:
    """The optimizer state with its schedule reset; the step count of Adam's averages stays."""

    def is_schedule(node: object) -> bool:
        # Optax counts the schedule's steps here, apart from the steps in the state of Adam.
        return isinstance(node, optax.ScaleByScheduleState)

    return jax.tree.map(lambda old, new: new if is_schedule(old) else old, optimizer, fresh, is_leaf=is_schedule)


def _targets(running: Running) -> Mapping[str, RestoreTarget]:
    """The placement of every array that a checkpoint may have: the state, and the frozen rest of the model."""
    work = running.run
    targets = planned_targets(work.state_plan.resident, running.mesh, true_sizes={"vocab": work.vocab})
    rest = f"{FROZEN}."
    return {
        # Frozen leaves are planned under `frozen.`, but a checkpoint that trained them has them under `model.`.
        under_model(path.removeprefix(rest)) if path.startswith(rest) else path: target
        for path, target in targets.items()
    }
