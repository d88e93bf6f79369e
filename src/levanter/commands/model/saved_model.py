"""The model in a checkpoint of `train_lm`: the metadata that training writes, and how other runs read it.

Besides the arrays, a checkpoint records the architecture, the vocabulary size and the tokenizer. So `checkpoint_path`
needs no `model:` block; a block that is set must not contradict. The parameters are read like those of any other
checkpoint, in slices and directly into their shards; the optimizer state is not read.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np

from haliax_ext.sources import TensorSource
from levanter.checkpoint import (
    CheckpointRef,
    CheckpointSource,
    MissingCheckpointError,
    UnreadableCheckpointError,
    checkpoint_at,
    same_names,
)
from levanter.commands.model.saved_adapters import SavedAdapters
from levanter.commands.model.source import (
    PASSTHROUGH,
    ModelBlock,
    ModelSource,
    OpenedModel,
    merge_architecture,
    resolve_source,
    source_from_block,
)
from levanter.compat.hf.tokenizer import check_vocabulary
from levanter.compat.open import load_tokenizer
from levanter.config import ConfigError, parse_text, plain
from levanter.data import PassthroughTokenizer, Tokenizer
from levanter.models.registry import LmConfig, family_for_config
from levanter.runplan import Check
from levanter.trainer.frozen_identity import FrozenPart
from levanter.trainer.train_state import MODEL

PREFIX = f"{MODEL}."
_EXTRA_FIELDS = ("max_seq_len", "scan_layers")
"""Fields that do not change the arithmetic, but the leaves or the trained context length."""


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """The keys of `metadata.json` that describe the model."""

    model: LmConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedModel:
    """The model of a checkpoint of `train_lm`.

    Attributes:
        ref: the checkpoint.
        config: its architecture, with `vocab_size`.
        source: its parameters.
        tokenizer_name: the tokenizer of its training data.
    """

    ref: CheckpointRef
    config: LmConfig
    source: CheckpointSource
    tokenizer_name: str | None

    @property
    def description(self) -> str:
        """One line: path, family, step, dtypes, size."""
        kind = type(self.config).get_choice_name(type(self.config))
        stored = " and ".join(sorted({info.dtype.name for info in self.source.tensors.values()}))
        size = sum(info.nbytes for info in self.source.tensors.values()) / 2**20
        return f"{self.ref.path} ({kind}, step {self.ref.step}, {stored}, {size:,.1f} MiB)"

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of its training data.

        Raises:
            CheckpointError: it cannot be read here, or has more ids than the model has embeddings.
        """
        return _tokenizer(self)


class _WithTokenizer(Protocol):
    @property
    def config(self) -> LmConfig: ...

    @property
    def description(self) -> str: ...

    @property
    def tokenizer_name(self) -> str | None: ...


def _tokenizer(model: _WithTokenizer) -> Tokenizer:
    """The tokenizer of the training data; a passthrough of token ids if it had none."""
    # Saved models always record the size.
    assert model.config.vocab_size is not None
    if model.tokenizer_name is None or model.tokenizer_name == PASSTHROUGH:
        return PassthroughTokenizer(model.config.vocab_size)
    tokenizer = load_tokenizer(model.tokenizer_name)
    check_vocabulary(tokenizer, model.config.vocab_size, where=model.description)
    return tokenizer


def model_metadata(model: LmConfig, *, tokenizer: str | None) -> dict[str, Any]:
    """The metadata that a training run writes, so that the model can be read without the run's configuration.

    Args:
        model: the architecture, with `vocab_size`.
        tokenizer: tokenizer of the training data.
    """
    assert model.vocab_size is not None
    fields = plain(model)
    # Fields of the architecture only: runtime settings belong to the run that reads the checkpoint.
    names = (*family_for_config(type(model)).architecture_fields, *_EXTRA_FIELDS)
    return {
        "model": {"type": fields["type"], **{name: fields[name] for name in names if name in fields}},
        "tokenizer": tokenizer,
    }


def open_saved(path: str) -> SavedModel:
    """The model of a checkpoint, or of the newest one in a folder of them.

    Raises:
        MissingCheckpointError: there is no checkpoint.
        UnreadableCheckpointError: the checkpoint is damaged or does not describe a model.
    """
    ref = checkpoint_at(path)
    if not any(name.startswith(PREFIX) for name in ref.leaves):
        raise UnreadableCheckpointError(f"{ref.path}: contains no model parameters (leaves {PREFIX}…)")
    # The frozen part is in no checkpoint, so such a checkpoint alone is no model.
    part = FrozenPart.of(ref)
    if part is not None and part.adapters is not None:
        raise UnreadableCheckpointError(f"{ref.path}: contains only adapters; their base model came from {part.origin}")
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


@dataclass(frozen=True, kw_only=True, eq=False)
class _Base:
    """The base model of adapters, with the tokenizer of their training data."""

    base: OpenedModel
    config: LmConfig
    description: str
    tokenizer_name: str | None

    @property
    def source(self) -> TensorSource:
        return self.base.source

    def tokenizer(self) -> Tokenizer:
        # The tokenizer of the adapters' data may differ from the base's own.
        return self.base.tokenizer() if self.tokenizer_name is None else _tokenizer(self)


def _resolve_adapter_source(ref: CheckpointRef, part: FrozenPart, model: ModelBlock | None) -> ModelSource:
    """The base model of a checkpoint of adapters, together with the adapters."""
    adapters = SavedAdapters.of(ref, part, prefix=PREFIX)
    config, where = _architecture(ref), f"{ref.path}/metadata.json"
    run_config = ref.metadata["config"]
    reference, base_checkpoint = _base_checkpoint(run_config)
    # The base as the training run found it, in its original place.
    if reference is not None:
        origin = resolve_source(reference, None)
    elif base_checkpoint is not None:
        origin = resolve_saved_source(base_checkpoint, None)
    else:
        raise UnreadableCheckpointError(
            f"{ref.path}: contains adapters of a model that was initialized from a seed and is in no checkpoint; train "
            "adapters on a checkpoint (hf_checkpoint, initialize_model_from_checkpoint_path)"
        )
    # All architecture fields count as explicit: the base that is found now must have the recorded architecture.
    keys = {*family_for_config(type(config)).architecture_fields, *_EXTRA_FIELDS} & {
        field.name for field in fields(config)
    }
    architecture = merge_architecture(ModelBlock(config=config, keys=frozenset(keys)), origin.architecture, where=where)
    description = f"{origin.description}, with the adapters of {ref.path} (step {ref.step})"
    tokenizer_name = ref.metadata.get("tokenizer")
    opened = origin.checkpoint
    # None if the base is unavailable here; a plan needs no arrays.
    if opened is not None:
        opened = _Base(base=opened, config=architecture, description=description, tokenizer_name=tokenizer_name)
    return replace(
        origin,
        # The tokenizer's name comes first, since `reference` is where tokenizers are looked up.
        reference=tokenizer_name or origin.reference,
        checkpoint=opened,
        architecture=merge_architecture(model, architecture, where=where),
        description=description,
        checks=(*origin.checks, Check(name="model", status="ok", message=description)),
        # The vocabulary may be padded to other multiples than in training.
        adapters=replace(adapters, padded=("vocab",)),
    )


def _base_checkpoint(config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The Hugging Face files, or the checkpoint of `train_lm`, that a run was initialized from."""
    reference = config.get("hf_checkpoint") or config.get("initialize_from_hf")
    # `true` meant the reference checkpoint that the `model:` block names.
    if reference is True:
        block = config.get("model")
        reference = block.get("reference_checkpoint") if isinstance(block, Mapping) else None
    checkpoint = config.get("initialize_model_from_checkpoint_path")
    return (reference if isinstance(reference, str) else None), (checkpoint if isinstance(checkpoint, str) else None)


def _architecture(ref: CheckpointRef) -> LmConfig:
    block = ref.metadata.get("model")
    if not isinstance(block, Mapping):
        raise UnreadableCheckpointError(
            f"{ref.path}: its metadata.json has no key `model`, which checkpoints of train_lm have"
        )
    try:
        # Parsed like a configuration, so that unknown or invalid fields are errors with their key.
        config = parse_text(_Saved, json.dumps({"model": dict(block)}), source=f"{ref.path}/metadata.json").model
    except ConfigError as error:
        raise UnreadableCheckpointError(
            f"{ref.path}: metadata.json does not describe one of our models: {error}"
        ) from error
    if config.vocab_size is None:
        raise UnreadableCheckpointError(f"{ref.path}: metadata.json lacks model.vocab_size")
    return config


def resolve_saved_source(path: str, model: ModelBlock | None, *, key: str = "checkpoint_path") -> ModelSource:
    """Resolves the model of a checkpoint of `train_lm`; see `resolve_source`.

    Args:
        path: a checkpoint, or a folder of them.
        model: the `model:` block, which must not contradict.
        key: the config key of the path.

    Raises:
        UnreadableCheckpointError: the checkpoint is damaged.
        UnknownArchitectureError: the checkpoint is absent, and there is no complete `model:` block.
        ConfigMismatchError: the block contradicts its architecture.
    """
    try:
        ref = checkpoint_at(path)
        part = FrozenPart.of(ref)
        # A checkpoint of adapters names its base, which is resolved first.
        if part is not None and part.adapters is not None:
            return _resolve_adapter_source(ref, part, model)
        saved = open_saved(path)
    except MissingCheckpointError as error:
        return source_from_block(path, model, MissingCheckpointError(f"{key}: {error}"), rules=same_names, padded=True)
    where = f"{saved.ref.path}/metadata.json"
    # The dtype of the first floating-point tensor; counters and masks do not count.
    (stored, *_) = (info.dtype for info in saved.source.tensors.values() if info.dtype.kind not in "iub")
    return ModelSource(
        reference=saved.tokenizer_name,
        checkpoint=saved,
        architecture=merge_architecture(model, saved.config, where=where),
        description=saved.description,
        stored=np.dtype(stored),
        checks=(Check(name="model", status="ok", message=saved.description),),
        rules=same_names,
        padded=True,
    )
