"""Checks before a training run begins: data, token stores, folders, the checkpoint it resumes from.

No document or array is read. Each problem becomes a `Check`, so that all are reported together. Missing files, folders
and checkpoints, which another machine may have, are errors of a run and are only listed by a plan.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from haliax_ext.abstract import Leaf
from haliax_ext.pytree import PyTree
from levanter.checkpoint import CheckpointRef, SavedLeaf, checkpoint_at, used_shapes
from levanter.checkpoint.restore_specs import check_leaves, saved_leaf
from levanter.commands.cli.outputs import output_checks
from levanter.commands.train.config_diff import ChangedRunError, ResumeKeys, judge
from levanter.commands.train.run_dirs import RunDirs, find_resume, refuse_existing_exports
from levanter.commands.train.trained_run import TrainedRun
from levanter.data import (
    FORMATS,
    AbsentTextError,
    DataError,
    LmDataConfig,
    Tokenizer,
    compare_stores,
    resolve_training,
    template_lines,
)
from levanter.data.documents import Formats
from levanter.data.train_builder import bos_notes
from levanter.models.registry import LmConfig
from levanter.optim import OptimizerConfig
from levanter.optim.groups import describe_groups
from levanter.runplan import BAD_INPUT, Check, RunRefused, Target
from levanter.trainer.config_blocks import ProfilerConfig
from levanter.trainer.frozen_identity import FrozenPart, check_partition, under_model
from levanter.trainer.train_state import MODEL, OPTIMIZER

T = TypeVar("T")

KERNELS = ("splash", "cudnn")
"""Implementations of attention that can be differentiated only once."""


def data_checks(
    config: LmDataConfig, tokenizer: Tokenizer | None, *, vocab_size: int, formats: Formats = FORMATS
) -> list[Check]:
    """Checks that the training data exists, its weights name existing sets, and its token stores match.

    Args:
        config: the `data:` block; without components nothing is checked.
        tokenizer: the run's; None if it is unavailable, so that stores are not compared.
        vocab_size: ids that the model distinguishes.
        formats: of the records that the run learns from.
    """
    if not config.components:
        return []
    try:
        training = resolve_training(config, formats=formats)
    # The machine that runs may have the text, so its absence is not an error here; any other DataError is one
    # everywhere.
    except AbsentTextError as error:
        return [Check(name="data", status="unchecked", message=str(error), error=error)]
    except DataError as error:
        return [Check(name="data", status="error", message=str(error), error=error)]
    # Token stores can only be compared with a tokenizer at hand.
    problems = [] if tokenizer is None else compare_stores(config, training.sets, tokenizer, vocab_size=vocab_size)
    # A store that does not match may have been built with another template, so templates are shown only for matching
    # ones.
    templates = [] if tokenizer is None or problems else template_lines(training.sets, tokenizer)
    notes = [] if tokenizer is None else bos_notes(config, training.sets, tokenizer)
    return [
        *(Check(name="data", status="ok", message=line) for line in (*training.describe(), *templates)),
        *(Check(name="data", status="note", message=note) for note in notes),
        *(Check(name="data", status="error", message=problem, error=DataError(problem)) for problem in problems),
    ]


def run_dir_checks(run: TrainedRun, frozen: FrozenPart | None, keys: ResumeKeys) -> list[Check]:
    """Checks that a run may write its folders, and that the checkpoint it begins from matches its state.

    The contents of a run's own folder are only known if the run has a name (`trainer.id`, `$RUN_ID`).

    Args:
        run: the training run.
        frozen: the part of the model that is not trained.
        keys: the keys that only its task has.
    """
    config = run.config
    written = config.trainer.checkpointer
    checks = [
        *output_checks("trainer.log_dir", config.trainer.log_dir),
        *output_checks("trainer.checkpointer.base_path", written.base_path),
    ]
    if written.temporary_base_path is not None:
        checks += output_checks("trainer.checkpointer.temporary_base_path", written.temporary_base_path)
    if config.hf_save_path is not None:
        checks += output_checks("hf_save_path", config.hf_save_path)
    for key in ("peft_save_path", "merged_hf_save_path"):
        if (path := getattr(config, key)) is not None:
            checks += output_checks(key, path)
    changes: list[str] = []
    for error in _checkpoint_problems(run, frozen, keys, changes):
        # Another machine may have the checkpoint in full, but a configuration that contradicts it does so on every
        # machine.
        status = "error" if isinstance(error, ChangedRunError) else "unchecked"
        checks.append(Check(name="checkpoint", status=status, message=str(error), error=error))
    return [*checks, *(Check(name="resume", status="note", message=line) for line in changes)]


def _checkpoint_problems(
    run: TrainedRun, frozen: FrozenPart | None, keys: ResumeKeys, changes: list[str]
) -> Iterator[ValueError]:
    """Yields the reasons why the run cannot use its checkpoint; adds permitted changes to `changes`."""
    config = run.config
    # Without an id the run gets a random one when it starts, so it has no folder to look into yet.
    run_id = config.trainer.id or os.environ.get("RUN_ID")
    problems: list[ValueError] = []
    resumed = None
    if run_id is not None:
        dirs = RunDirs.of(config, run_id)
        resumed = attempted(problems, lambda: find_resume(config, dirs))
        attempted(problems, lambda: refuse_existing_exports(dirs, resumed))
    if resumed is not None:
        attempted(problems, lambda: _check_resumed(resumed, run, frozen))
        changes += attempted(problems, lambda: judge(resumed, config, run.model, keys)) or ()
    # Keys that initialize a run have no effect on one that resumes. After a problem above it is unknown whether it
    # resumes.
    elif not problems:
        begins = {
            config.initialize_from_checkpoint_path: (MODEL, OPTIMIZER),
            config.initialize_model_from_checkpoint_path: (MODEL,),
        }
        for path, prefixes in begins.items():
            if path is not None:
                attempted(
                    problems,
                    # The defaults bind this iteration's values.
                    lambda path=path, prefixes=prefixes: _check_parts(run, path, prefixes),
                )
    yield from problems


def _check_resumed(ref: CheckpointRef, run: TrainedRun, frozen: FrozenPart | None) -> None:
    """Raises an error if the run cannot resume from a checkpoint."""
    check_partition(ref, frozen)
    check_leaves(ref, _wanted(run, [planned.leaf for planned in run.state_plan.whole.leaves]))


def _check_parts(run: TrainedRun, path: str, groups: Sequence[str]) -> CheckpointRef:
    """Raises an error if some parts of a checkpoint do not match the run's; returns the checkpoint."""
    plan = run.state_plan
    ref = checkpoint_at(path)
    prefixes = tuple(f"{part}." for part in groups)
    # A checkpoint has the statistics and counters under their own paths, and parameters under `model.`, the base of
    # adapters included, which is no part of this run's state.
    others = (planned.leaf for planned in plan.whole.leaves if not planned.leaf.path.startswith(f"{MODEL}."))
    parameters = (replace(planned.leaf, path=under_model(planned.leaf.path)) for planned in plan.loaded.leaves)
    leaves = _wanted(run, [*parameters, *others])
    wanted = {path: leaf for path, leaf in leaves.items() if path.startswith(prefixes)}
    # A partial checkpoint: leaves that it lacks are initialized, so there is nothing to compare for them.
    if run.config.trainer.allow_partial_checkpoint:
        wanted = {path: leaf for path, leaf in wanted.items() if path in ref.leaves}
    check_leaves(ref, wanted, within=prefixes)
    return ref


def _wanted(run: TrainedRun, leaves: Sequence[Leaf]) -> Mapping[str, SavedLeaf]:
    # Padding rows of the vocabulary depend on the mesh; a checkpoint must agree on the used rows only.
    used = used_shapes(leaves, {"vocab": run.vocab})
    return {leaf.path: saved_leaf(leaf.shape, leaf.dtype, used=used.get(leaf.path)) for leaf in leaves}


def attempted(problems: list[ValueError], make: Callable[[], T]) -> T | None:
    """The result of `make`; if it refuses, None, and the reason is added to the problems."""
    try:
        return make()
    except ValueError as error:
        problems.append(error)
        return None


def refuse_all(checks: Sequence[Check], problems: Sequence[ValueError]) -> None:
    """Raises the one problem, or all of them with the findings so far; does nothing if there are none."""
    if not problems:
        return
    # Errors found by earlier checks are raised with the new ones, so that the user sees all of them in one attempt.
    before = [check.error for check in checks if check.error is not None and check.status == "error"]
    if len(problems) == 1 and not before:
        raise problems[0]
    raise RunRefused([*before, *problems], exit_code=BAD_INPUT)


def group_checks(optimizer: OptimizerConfig, parameters: PyTree) -> list[Check]:
    """A line for each group of `optimizer.groups`; none without groups.

    Args:
        optimizer: the run's.
        parameters: the trained ones, abstract.
    """
    if optimizer.groups is None:
        return []
    lines = describe_groups(optimizer.groups, parameters)
    return [Check(name="parameter group", status="ok", message=line) for line in lines]


def profiler_checks(profiler: ProfilerConfig, target: Target) -> list[Check]:
    """An error if the process that is to be profiled does not exist."""
    index = profiler.process_index
    if not profiler.enabled or index is None or index < target.hosts:
        return []
    # Otherwise the run would end without the profile that was its purpose.
    last = f"0 to {target.hosts - 1}" if target.hosts > 1 else "0 alone"
    error = ValueError(f"trainer.profiler.process_index: {index}, but the processes of this run are {last}")
    return [Check(name="profiler", status="error", message=str(error), error=error)]


def needs_blockwise(optimizer: OptimizerConfig, written: LmConfig, model: LmConfig) -> bool:
    """Whether attention must run in blocks, because the kernel that was chosen automatically has one derivative only.

    Args:
        optimizer: the run's.
        written: the model as configured.
        model: with the choices for its platform made.
    """
    requested = getattr(written, "attn_backend", None)
    # A kernel that the user names is not replaced; `refuse_kernels` refuses it.
    return (
        optimizer.curvature is not None
        and requested in (None, "default")
        and getattr(model, "attn_backend", None) in KERNELS
    )


def refuse_kernels(optimizer: OptimizerConfig, model: LmConfig) -> None:
    """Refuses an optimizer that needs curvature from a model whose attention cannot be differentiated twice.

    Args:
        optimizer: the run's.
        model: with the choices for its platform made.

    Raises:
        ValueError: attention runs in a kernel.
    """
    kernel = getattr(model, "attn_backend", None)
    if optimizer.curvature is not None and kernel in KERNELS:
        raise ValueError(
            f"optimizer.type: {OptimizerConfig.get_choice_name(type(optimizer))} differentiates the loss twice, which "
            f"the attention kernel {kernel} does not support; set model.attn_backend: blockwise"
        )
