"""A model in one of our own checkpoints: what a training run writes about it, and how any other run reads it.

Besides the arrays, a checkpoint records what they are: the architecture, the number of ids, the tokenizer. So
`checkpoint_path` needs no `model:` block; if one is given, it must not contradict. The parameters are then read like
those of any other checkpoint, by slices and straight into their shards; the optimizer state is not read.
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
    OpenedModel,
    Origin,
    find_origin,
    from_block,
    merged,
)
from levanter.compat.hf.tokenizer import check_vocabulary
from levanter.compat.open import load_tokenizer
from levanter.config import ConfigError, parse_text, plain
from levanter.data import PassthroughTokenizer, Tokenizer
from levanter.models.registry import LmConfig, family_for_config
from levanter.runplan import Check
from levanter.trainer.frozen_identity import FrozenPart
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
        return _tokenizer(self)


class _WithTokenizer(Protocol):
    @property
    def config(self) -> LmConfig: ...

    @property
    def description(self) -> str: ...

    @property
    def tokenizer_name(self) -> str | None: ...


def _tokenizer(of: _WithTokenizer) -> Tokenizer:
    """The tokenizer of the training data; token ids where there was none."""
    assert of.config.vocab_size is not None
    if of.tokenizer_name is None or of.tokenizer_name == PASSTHROUGH:
        return PassthroughTokenizer(of.config.vocab_size)
    found = load_tokenizer(of.tokenizer_name)
    check_vocabulary(found, of.config.vocab_size, where=of.description)
    return found


def model_metadata(model: LmConfig, *, tokenizer: str | None) -> dict[str, Any]:
    """What a training run writes with its arrays, so that the model can be read without the run's configuration.

    Args:
        model: the architecture, with `vocab_size`.
        tokenizer: of the training data.
    """
    assert model.vocab_size is not None
    fields = plain(model)
    names = (*family_for_config(type(model)).architecture_fields, *_ALSO)
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
            f"{ref.path}: contains adapters and no model; the model that they are of came from {part.origin}"
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


@dataclass(frozen=True, kw_only=True, eq=False)
class _Base:
    """The model that adapters are of, with the tokenizer of their training data."""

    base: OpenedModel
    config: LmConfig
    description: str
    tokenizer_name: str | None

    @property
    def source(self) -> TensorSource:
        return self.base.source

    def tokenizer(self) -> Tokenizer:
        return self.base.tokenizer() if self.tokenizer_name is None else _tokenizer(self)


def _adapted(ref: CheckpointRef, part: FrozenPart, model: ModelBlock | None) -> Origin:
    """The model that the adapters of a checkpoint are of, with them beside it."""
    adapters = SavedAdapters.of(ref, part, prefix=PREFIX)
    config, where = _architecture(ref), f"{ref.path}/metadata.json"
    said = ref.metadata["config"]
    reference, begun = _begun(said)
    if reference is not None:
        origin = find_origin(reference, None)
    elif begun is not None:
        origin = find_saved(begun, None)
    else:
        raise UnreadableCheckpointError(
            f"{ref.path}: contains adapters of a model that was made from the seed, which is in no checkpoint; train "
            "them on one that is (hf_checkpoint, initialize_model_from_checkpoint_path)"
        )
    keys = {*family_for_config(type(config)).architecture_fields, *_ALSO} & {each.name for each in fields(config)}
    own = merged(ModelBlock(config=config, keys=frozenset(keys)), origin.architecture, where=where)
    description = f"{origin.description}, with the adapters of {ref.path} (step {ref.step})"
    named = ref.metadata.get("tokenizer")
    opened = origin.checkpoint
    if opened is not None:
        opened = _Base(base=opened, config=own, description=description, tokenizer_name=named)
    return replace(
        origin,
        reference=named or origin.reference,
        checkpoint=opened,
        architecture=merged(model, own, where=where),
        description=description,
        checks=(*origin.checks, Check(name="model", status="ok", message=description)),
        adapters=replace(adapters, padded=("vocab",)),
    )


def _begun(config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The Hugging Face files that a run began from, or its checkpoint of ours."""
    named = config.get("hf_checkpoint") or config.get("initialize_from_hf")
    if named is True:
        block = config.get("model")
        named = block.get("reference_checkpoint") if isinstance(block, Mapping) else None
    begun = config.get("initialize_model_from_checkpoint_path")
    return (named if isinstance(named, str) else None), (begun if isinstance(begun, str) else None)


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
        ref = checkpoint_at(path)
        part = FrozenPart.of(ref)
        if part is not None and part.adapters is not None:
            return _adapted(ref, part, model)
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
