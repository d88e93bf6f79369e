"""A model in one of our own checkpoints: what a training run writes about it, and how any other run reads it.

Besides the arrays, a checkpoint records what they are: the architecture, the number of ids, the tokenizer. So
`checkpoint_path` needs no `model:` block; if one is given, it must not contradict. The parameters are then read like
those of any other checkpoint, by slices and straight into their shards; the optimizer state is not read.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from levanter.checkpoint import (
    CheckpointRef,
    CheckpointSource,
    MissingCheckpointError,
    UnreadableCheckpointError,
    checkpoint_at,
    same_names,
)
from levanter.commands.model.origin import PASSTHROUGH, ModelBlock, Origin, from_block, merged
from levanter.compat.hf.tokenizer import check_vocabulary
from levanter.compat.open import load_tokenizer
from levanter.config import ConfigError, parse_text, plain
from levanter.data import PassthroughTokenizer, Tokenizer
from levanter.models.registry import LmConfig, family_of
from levanter.run import Check
from levanter.trainer.frozen import FrozenPart
from levanter.trainer.state import MODEL

PREFIX = f"{MODEL}."
_ALSO = ("max_seq_len", "scan_layers")
"""Fields that do not affect the arithmetic, but the leaves or what the model was trained for."""


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """The keys of `metadata.json` that describe the model."""

    model: LmConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedModel:
    """The model of one of our checkpoints.

    Attributes:
        ref: the checkpoint.
        config: its architecture, with `vocab_size`.
        source: its parameters, by slices.
        tokenizer_name: the tokenizer that it was trained with.
    """

    ref: CheckpointRef
    config: LmConfig
    source: CheckpointSource
    tokenizer_name: str | None

    @property
    def description(self) -> str:
        """What it is, in a line: place, family, step, storage, size."""
        kind = type(self.config).get_choice_name(type(self.config))
        stored = " and ".join(sorted({info.dtype.name for info in self.source.tensors.values()}))
        size = sum(info.nbytes for info in self.source.tensors.values()) / 2**20
        return f"{self.ref.path} ({kind}, step {self.ref.step}, {stored}, {size:,.1f} MiB)"

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of its training data.

        Raises:
            CheckpointError: it cannot be read here, or has more ids than the model has embeddings.
        """
        assert self.config.vocab_size is not None
        if self.tokenizer_name is None or self.tokenizer_name == PASSTHROUGH:
            return PassthroughTokenizer(self.config.vocab_size)
        found = load_tokenizer(self.tokenizer_name)
        check_vocabulary(found, self.config.vocab_size, where=self.description)
        return found


def model_metadata(model: LmConfig, *, tokenizer: str | None) -> dict[str, Any]:
    """What a training run writes with its arrays, so that the model can be read without the run's configuration.

    Args:
        model: the architecture, with `vocab_size`.
        tokenizer: of the training data.
    """
    assert model.vocab_size is not None
    fields = plain(model)
    names = (*family_of(type(model)).architecture_fields, *_ALSO)
    return {
        "model": {"type": fields["type"], **{name: fields[name] for name in names if name in fields}},
        "tokenizer": tokenizer,
    }


def open_saved(path: str) -> SavedModel:
    """The model of a checkpoint, or of the newest one in a folder of them.

    Raises:
        MissingCheckpointError: there is none.
        UnreadableCheckpointError: it is damaged, or does not describe a model.
    """
    ref = checkpoint_at(path)
    if not any(name.startswith(PREFIX) for name in ref.leaves):
        raise UnreadableCheckpointError(f"{ref.path}: contains no model parameters (leaves {PREFIX}…)")
    part = FrozenPart.of(ref)
    if part is not None and part.adapters is not None:
        raise UnreadableCheckpointError(
            f"{ref.path}: contains adapters and no model; the model that they are of came from {part.origin}. Give "
            "that as hf_checkpoint, and what the run saved with peft_save_path as adapter_path"
        )
    if part is not None:
        raise UnreadableCheckpointError(
            f"{ref.path}: contains only the trained part of the model ({', '.join(part.patterns)}); the "
            f"{len(part.digests)} frozen parameters came from {part.origin}. A Hugging Face export of the run "
            "(hf_save_path) has all of them"
        )
    return SavedModel(
        ref=ref,
        config=_architecture(ref),
        source=CheckpointSource(ref, prefix=PREFIX),
        tokenizer_name=ref.metadata.get("tokenizer"),
    )


def _architecture(ref: CheckpointRef) -> LmConfig:
    block = ref.metadata.get("model")
    if not isinstance(block, Mapping):
        raise UnreadableCheckpointError(
            f"{ref.path}: its metadata.json does not say which model it is; checkpoints of train_lm do (`model`)"
        )
    try:
        found = parse_text(_Saved, json.dumps({"model": dict(block)}), source=f"{ref.path}/metadata.json").model
    except ConfigError as error:
        raise UnreadableCheckpointError(
            f"{ref.path}: metadata.json does not describe one of our models: {error}"
        ) from error
    if found.vocab_size is None:
        raise UnreadableCheckpointError(f"{ref.path}: metadata.json lacks model.vocab_size")
    return found


def find_saved(path: str, model: ModelBlock | None, *, key: str = "checkpoint_path") -> Origin:
    """What can be known here about the model of a checkpoint; see `find_origin`.

    Args:
        path: a checkpoint, or a folder of them.
        model: the `model:` block, which must not contradict.
        key: the config key of the path.

    Raises:
        UnreadableCheckpointError: it is damaged.
        UnknownArchitectureError: it is absent, and there is no complete `model:` block.
        ConfigMismatchError: the block contradicts its architecture.
    """
    try:
        found = open_saved(path)
    except MissingCheckpointError as error:
        return from_block(path, model, MissingCheckpointError(f"{key}: {error}"), rules=same_names, padded=True)
    where = f"{found.ref.path}/metadata.json"
    (stored, *_) = (info.dtype for info in found.source.tensors.values() if info.dtype.kind not in "iub")
    return Origin(
        reference=found.tokenizer_name,
        checkpoint=found,
        architecture=merged(model, found.config, where=where),
        description=found.description,
        stored=np.dtype(stored),
        checks=(Check(name="model", status="ok", message=found.description),),
        rules=same_names,
        padded=True,
    )
