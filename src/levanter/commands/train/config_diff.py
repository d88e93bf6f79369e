"""Compares the configuration in a run's checkpoint with that of the attempt that resumes from it.

A run that is resumed with another architecture, other data or another seed is a different run, even if every array has
the right shape. So each field of the configuration is in one of three lists: what must not change, what may change and
is reported, and what does not affect a run's results.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from levanter.checkpoint import CheckpointRef
from levanter.commands.model.saved_model import model_metadata
from levanter.commands.train.config import TrainLmConfig
from levanter.config import plain
from levanter.models.registry import LmConfig


def _keys(*groups: str) -> frozenset[str]:
    """The keys in some lists, separated by spaces."""
    return frozenset(key for group in groups for key in group.split())


FIXED = _keys(
    # The architecture, besides what the checkpoint records about the model itself, and how parameters were
    # initialized.
    "model.type model.initializer_range initialize_from_hf use_hf_model_config hf_checkpoint",
    "initialize_from_checkpoint_path initialize_model_from_checkpoint_path",
    "adapter trainer.model_averaging optimizer.type trainer.seed data_seed data.tokenizer data.vocab_size",
    "data.chat_template data.ignore_token_id data.enforce_bos data.enforce_eos data.block_cross_document_attention",
    # Which rows there are, in which order, and which of them are held out.
    "data.components data.shuffle data.permutation_type data.num_validation_sequences",
    "data.shuffle_before_trainval_split data.max_train_batches data.target_budget data.experiment_budget",
)
"""Keys that must not change between a checkpoint and the run that resumes from it."""

REPORTED = _keys(
    "model optimizer train_seq_len z_loss_weight epoch data.train_weights data.stop_strategy",
    "data.mixture_block_size trainer.num_train_steps trainer.train_batch_size trainer.per_device_parallelism",
    "trainer.allow_nondivisible_batch_size trainer.mp trainer.mesh trainer.tracker trainer.checkpointer",
    "trainer.skip_nonfinite_steps trainer.crash_on_nan trainer.crash_on_inf trainer.allow_nonfinite",
    "trainer.jax_config trainer.initialize_from hf_save_path hf_save_steps hf_save_dtype",
    "hf_generation_eos_token_ids peft_save_path peft_hf_upload merged_hf_save_path merged_hf_upload",
    # Compiler options: the same sums, perhaps in another order.
    "trainer.compiler trainer.compiler_options",
    # These only determine the first state, which a resumed run does not create again.
    "reinit_tokens reinit_embeddings reinit_lm_head",
)
"""Keys that may change; every change is reported."""

SILENT = _keys(
    "data.cache_dir data.cache_options data.auto_build_caches eval_harness eval_harness_steps labeled_eval plan",
    "generation sample_every sample_prompts",
    "trainer.id trainer.log_dir trainer.watch trainer.profiler trainer.progress_watchdog",
    "trainer.per_device_eval_parallelism",
    "trainer.steps_per_eval trainer.max_eval_batches trainer.load_checkpoint trainer.load_checkpoint_path",
    "trainer.allow_partial_checkpoint trainer.resume_with_changes trainer.jax_compilation_cache_dir",
    "trainer.distributed trainer.require_accelerator",
    # Compared with the leaves that the checkpoint has, like what is trained and what is frozen.
    "trainer.trainable",
)
"""Keys that do not affect the results of a run, or are compared elsewhere; changes are not reported."""

LOCATION_KEYS = frozenset({"cache_dir", "flat_cache"})
"""Keys of data sets that locate token stores; they do not affect which tokens there are."""

ORIGIN = ("initialize_from_hf", "hf_checkpoint", "initialize_model_from_checkpoint_path")
"""Keys that name the source of the parameters. Frozen parameters are compared by value, since the same weights may
have moved."""

BLOCKS = frozenset({"data.components"})
"""Keys of nested blocks, compared value by value."""


@dataclass(frozen=True, kw_only=True)
class ResumeKeys:
    """How the keys that only one task has are compared; those in neither list must not change.

    Attributes:
        reported: keys that may change; every change is reported.
        silent: keys that do not affect the results.
        blocks: keys of nested blocks, compared value by value.
    """

    reported: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()
    blocks: frozenset[str] = frozenset()


class ChangedRunError(ValueError):
    """A run was to resume from a checkpoint whose configuration is that of a different run."""


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The differences between a checkpoint's configuration and that of the resuming run, one line each.

    Attributes:
        fixed: differences in what must not change.
        reported: differences in what may.
    """

    fixed: tuple[str, ...]
    reported: tuple[str, ...]


def judge(
    ref: CheckpointRef, config: TrainLmConfig, model: LmConfig, keys: ResumeKeys = ResumeKeys()
) -> tuple[str, ...]:
    """Compares a checkpoint's configuration with the run's; returns the lines to report.

    Args:
        ref: the checkpoint that the run resumes from.
        config: of the run.
        model: its architecture, with `vocab_size`.
        keys: those of its task.

    Raises:
        ChangedRunError: something changed that must not; lists all of it.
    """
    if not isinstance(ref.metadata.get("config"), Mapping):
        return ("the checkpoint does not record its configuration, so changes since then are unknown",)
    differences = changes(ref, config, model, keys)
    if not differences.fixed:
        return differences.reported
    if config.trainer.resume_with_changes:
        return (*(f"{line} (trainer.resume_with_changes)" for line in differences.fixed), *differences.reported)
    raise ChangedRunError(
        f"{ref.path}: this checkpoint was saved by a different run than the one that would resume from it; "
        f"{len(differences.fixed)} difference{'s' if len(differences.fixed) > 1 else ''}:\n  "
        + "\n  ".join(differences.fixed)
        + "\n  → change them back, set another trainer.id to start a new run, or set trainer.resume_with_changes: true"
    )


def changes(ref: CheckpointRef, config: TrainLmConfig, model: LmConfig, keys: ResumeKeys = ResumeKeys()) -> Changes:
    """Lists the differences; keys that one side lacks are not compared."""
    before = cast("dict[str, object]", ref.metadata["config"])
    # Through JSON and back, as the checkpoint's own copy went: tuples become lists, dates and enums strings.
    now = cast("dict[str, object]", json.loads(json.dumps(plain(config), default=str)))
    fixed, reported = [], []
    was = ref.metadata.get("model")
    # The resolved architecture is compared, not the `model:` block: the block may leave everything to a checkpoint.
    if isinstance(was, Mapping):
        current = json.loads(json.dumps(model_metadata(model, tokenizer=None)["model"], default=str))
        for key, value in cast("Mapping[str, object]", was).items():
            # `max_seq_len` only sets the length of rows; every other key here changes what the model computes.
            if key in current and current[key] != value:
                (reported if key == "max_seq_len" else fixed).append(_line(f"model.{key}", value, current[key]))
    may_change, blocks = REPORTED | keys.reported, BLOCKS | keys.blocks
    # A key that a task adds and classifies nowhere is fixed: whoever adds one decides that it may change.
    classified = {key.partition(".")[0] for key in (*FIXED, *SILENT, *keys.silent, *may_change)}
    for key in sorted(FIXED | may_change | (now.keys() - classified)):
        # Their keys are compared one by one below.
        if key in ("model", "optimizer"):
            continue
        (old, in_checkpoint), (new, in_run) = _at(before, key), _at(now, key)
        if key == "adapter":
            # Two spellings of the same adapter must compare as equal.
            old, new = _adapter(old), _adapter(new)
        # A key that one side lacks is not compared: the program that wrote the checkpoint may not have known it. A key
        # that the model's metadata reported above is not reported a second time.
        if in_checkpoint and in_run and not any(line.startswith(f"{key}: ") for line in fixed):
            whole = [_line(key, old, new)] if old != new else []
            # Sets of data and references are nested blocks with a line for each value that differs.
            lines = _differences(key, old, new) if key in blocks else whole
            (reported if key in may_change else fixed).extend(lines)
    named = {line.split(":")[0] for line in (*fixed, *reported)}
    # Fields of another kind of optimizer or model are not comparable; the changed `type` is reported already.
    blocks = [block for block in ("model", "optimizer") if f"{block}.type" not in named]
    reported += [line for block in blocks for line in _below(block, before, now) if line.split(":")[0] not in named]
    # Frozen weights are compared by digest after loading, so a changed origin is only reported.
    if config.trainer.trainable is not None or config.lora is not None:
        moved = [line for line in fixed if line.split(":")[0] in ORIGIN]
        fixed, reported = [line for line in fixed if line not in moved], [*reported, *moved]
    # `trainer.initialize_from` continues the model and the optimizer state of another run, but on data of its own.
    other = config.trainer.initialize_from
    # The prefix compares the run's folder with the path of one of its checkpoints, `<folder>/step-<N>`.
    if other is not None and ref.path.startswith(other.rstrip("/")):
        # Differences in data and seeds are intended there, so they are reported instead of refused.
        taken = [line for line in fixed if line.startswith(("model.", "optimizer."))]
        fixed, reported = taken, [*reported, *(line for line in fixed if line not in taken)]
    return Changes(fixed=tuple(fixed), reported=tuple(reported))


def _adapter(written: object) -> object:
    """Normalizes an `adapter:` block: `null` and `{type: none}` are equal, and `initialize_from` is dropped."""
    if not isinstance(written, dict):
        return written
    block = cast("dict[str, object]", written)
    # `initialize_from` is dropped: the checkpoint contains the adapters' current values.
    kept = {key: value for key, value in block.items() if value is not None and key != "initialize_from"}
    return None if block.get("type") == "none" else kept


def _below(block: str, before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    old, new = before.get(block), now.get(block)
    if not isinstance(old, dict) or not isinstance(new, dict):
        return []
    old_block, new_block = cast("dict[str, object]", old), cast("dict[str, object]", new)
    # Only keys that both sides have; see `changes` for why.
    return [
        _line(f"{block}.{key}", old_block[key], new_block[key])
        for key in sorted(old_block.keys() & new_block.keys())
        if old_block[key] != new_block[key]
    ]


def _at(document: Mapping[str, object], key: str) -> tuple[object, bool]:
    """The value of a dotted key, and whether there is one."""
    value: object = document
    for part in key.split("."):
        # A key below a value that is no mapping (null, say) is absent, like a missing key.
        if not isinstance(value, dict) or part not in value:
            return None, False
        value = cast("dict[str, object]", value)[part]
    return value, True


def _differences(key: str, old: object, new: object) -> list[str]:
    """A line for each value that differs, under its own key; locations of token stores are skipped."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return [] if old == new else [_line(key, old, new)]
    old_block, new_block = cast("dict[str, object]", old), cast("dict[str, object]", new)
    lines: list[str] = []
    for name in sorted(old_block.keys() | new_block.keys()):
        # A token store may move to another folder between two attempts.
        if name in LOCATION_KEYS:
            continue
        if name in old_block and name in new_block:
            lines += _differences(f"{key}.{name}", old_block[name], new_block[name])
        else:
            lines.append(
                f"{key}.{name}: present when it was saved, gone now" if name in old_block else f"{key}.{name}: new"
            )
    return lines


def _line(key: str, old: object, new: object) -> str:
    return f"{key}: {_short(old)} when it was saved, {_short(new)} now"


def _short(value: object) -> str:
    # Sorted keys, so that the same value is always shown as the same text.
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 120 else text[:120] + " …"
