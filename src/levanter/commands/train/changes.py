"""What changed in a configuration between a run's checkpoint and the attempt that goes on behind it.

A run that is resumed under another architecture, on other data or with another seed is another run, though every array
may have its shape. So each field of the configuration is in one of three lists: what must not change, what may change
and is said, and what means nothing to a run's numbers.
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

FIXED = frozenset(
    {
        # The architecture, beside what the checkpoint says of the model itself, and how parameters were made.
        "model.type",
        "model.initializer_range",
        "initialize_from_hf",
        "use_hf_model_config",
        "hf_checkpoint",
        "initialize_from_checkpoint_path",
        "initialize_model_from_checkpoint_path",
        "adapter",
        "trainer.model_averaging",
        "optimizer.type",
        "trainer.seed",
        "data_seed",
        "data.tokenizer",
        "data.vocab_size",
        "data.chat_template",
        "data.ignore_token_id",
        "data.enforce_bos",
        "data.enforce_eos",
        "data.block_cross_document_attention",
        # Which rows there are, in which order, and which of them are held out.
        "data.components",
        "data.shuffle",
        "data.permutation_type",
        "data.num_validation_sequences",
        "data.shuffle_before_trainval_split",
        "data.max_train_batches",
        "data.target_budget",
        "data.experiment_budget",
    }
)
"""What must not change."""

SAID = frozenset(
    {
        "model",
        "optimizer",
        "train_seq_len",
        "z_loss_weight",
        "epoch",
        "data.train_weights",
        "data.stop_strategy",
        "data.mixture_block_size",
        "trainer.num_train_steps",
        "trainer.train_batch_size",
        "trainer.per_device_parallelism",
        "trainer.allow_nondivisible_batch_size",
        "trainer.mp",
        "trainer.mesh",
        "trainer.tracker",
        "trainer.checkpointer",
        "trainer.skip_nonfinite_steps",
        "trainer.crash_on_nan",
        "trainer.crash_on_inf",
        "trainer.allow_nonfinite",
        "trainer.jax_config",
        "trainer.initialize_from",
        "hf_save_path",
        "hf_save_steps",
        "hf_save_dtype",
        "hf_generation_eos_token_ids",
        "peft_save_path",
        "peft_hf_upload",
        "merged_hf_save_path",
        "merged_hf_upload",
    }
)
"""What may change, and is said."""

SILENT = frozenset(
    {
        "data.cache_dir",
        "data.cache_options",
        "data.auto_build_caches",
        "eval_harness",
        "eval_harness_steps",
        "labeled_eval",
        "plan",
        "trainer.id",
        "trainer.log_dir",
        "trainer.watch",
        "trainer.profiler",
        "trainer.per_device_eval_parallelism",
        "trainer.steps_per_eval",
        "trainer.max_eval_batches",
        "trainer.load_checkpoint",
        "trainer.load_checkpoint_path",
        "trainer.allow_partial_checkpoint",
        "trainer.resume_with_changes",
        "trainer.jax_compilation_cache_dir",
        "trainer.distributed",
        "trainer.require_accelerator",
        # Compared where what is trained and what is frozen is: with the leaves that the checkpoint has.
        "trainer.trainable",
    }
)
"""What means nothing to the numbers of a run, or is compared elsewhere."""

PLACES = frozenset({"cache_dir", "flat_cache"})
"""Names within data sets that say where tokens are kept, not which they are."""

ORIGIN = ("initialize_from_hf", "hf_checkpoint", "initialize_model_from_checkpoint_path")
"""Where parameters came from. What is frozen is compared by its values: the same weights may lie elsewhere by now."""


class ChangedRunError(ValueError):
    """A run was to go on behind a checkpoint of what is another run by its configuration."""


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What differs between a checkpoint's configuration and the one that goes on behind it, each in a line.

    Attributes:
        fixed: of what must not change.
        said: of what may.
    """

    fixed: tuple[str, ...]
    said: tuple[str, ...]


def judge(ref: CheckpointRef, config: TrainLmConfig, model: LmConfig) -> tuple[str, ...]:
    """Compares a checkpoint's configuration with the run's; the lines to be said.

    Args:
        ref: the checkpoint that the run goes on behind.
        config: of the run.
        model: its architecture, with `vocab_size`.

    Raises:
        ChangedRunError: something changed that must not; all of it is listed.
    """
    if not isinstance(ref.metadata.get("config"), Mapping):
        return ("its checkpoint does not say its configuration; what changed since is not known",)
    found = changes(ref, config, model)
    if not found.fixed:
        return found.said
    if config.trainer.resume_with_changes:
        return (*(f"{line} (trainer.resume_with_changes)" for line in found.fixed), *found.said)
    raise ChangedRunError(
        f"{ref.path}: the run that saved this checkpoint is another one than would go on behind it; "
        f"{len(found.fixed)} difference{'s' if len(found.fixed) > 1 else ''}:\n  "
        + "\n  ".join(found.fixed)
        + "\n  → change them back, give another trainer.id to begin anew, or set trainer.resume_with_changes: true"
    )


def changes(ref: CheckpointRef, config: TrainLmConfig, model: LmConfig) -> Changes:
    """What differs; a key that the checkpoint does not have, because its program did not, is not compared."""
    before = cast("dict[str, object]", ref.metadata["config"])
    now = cast("dict[str, object]", json.loads(json.dumps(plain(config), default=str)))
    fixed, said = [], []
    was = ref.metadata.get("model")
    if isinstance(was, Mapping):
        own = json.loads(json.dumps(model_metadata(model, tokenizer=None)["model"], default=str))
        for key, value in cast("Mapping[str, object]", was).items():
            # Rows of text may get longer or shorter; whatever else is here is arithmetic.
            if key in own and own[key] != value:
                (said if key == "max_seq_len" else fixed).append(_line(f"model.{key}", value, own[key]))
    for key in sorted(FIXED | SAID):
        if key in ("model", "optimizer"):
            continue
        (old, there), (new, here) = _at(before, key), _at(now, key)
        if there and here and not any(line.startswith(f"{key}: ") for line in fixed):
            whole = [_line(key, old, new)] if old != new else []
            found = _differences(key, old, new) if key == "data.components" else whole
            (fixed if key in FIXED else said).extend(found)
    named = {line.split(":")[0] for line in (*fixed, *said)}
    # The fields of another kind of optimizer, or of model, are others.
    blocks = [block for block in ("model", "optimizer") if f"{block}.type" not in named]
    said += [line for block in blocks for line in _below(block, before, now) if line.split(":")[0] not in named]
    if config.trainer.trainable is not None:
        moved = [line for line in fixed if line.split(":")[0] in ORIGIN]
        fixed, said = [line for line in fixed if line not in moved], [*said, *moved]
    other = config.trainer.initialize_from
    if other is not None and ref.path.startswith(other.rstrip("/")):
        # Another run's on purpose: its model and its statistics are taken, not its data.
        taken = [line for line in fixed if line.startswith(("model.", "optimizer."))]
        fixed, said = taken, [*said, *(line for line in fixed if line not in taken)]
    return Changes(fixed=tuple(fixed), said=tuple(said))


def _below(block: str, before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    old, new = before.get(block), now.get(block)
    if not isinstance(old, dict) or not isinstance(new, dict):
        return []
    was, own = cast("dict[str, object]", old), cast("dict[str, object]", new)
    return [
        _line(f"{block}.{key}", was[key], own[key]) for key in sorted(was.keys() & own.keys()) if was[key] != own[key]
    ]


def _at(document: Mapping[str, object], key: str) -> tuple[object, bool]:
    """The value of a dotted key, and whether there is one."""
    found: object = document
    for part in key.split("."):
        if not isinstance(found, dict) or part not in found:
            return None, False
        found = cast("dict[str, object]", found)[part]
    return found, True


def _differences(key: str, old: object, new: object) -> list[str]:
    """A line for each value that differs, by its own key; nothing for where tokens are kept."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return [] if old == new else [_line(key, old, new)]
    was, own = cast("dict[str, object]", old), cast("dict[str, object]", new)
    lines: list[str] = []
    for name in sorted(was.keys() | own.keys()):
        if name in PLACES:
            continue
        if name in was and name in own:
            lines += _differences(f"{key}.{name}", was[name], own[name])
        else:
            lines.append(f"{key}.{name}: was there when it was saved" if name in was else f"{key}.{name}: is new")
    return lines


def _line(key: str, old: object, new: object) -> str:
    return f"{key}: {_short(old)} when it was saved, {_short(new)} now"


def _short(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 120 else text[:120] + " …"
