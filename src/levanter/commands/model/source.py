"""Where a model comes from, as far as is known here: a run needs the complete checkpoint, planning only its shapes.

Sources, in this order: the checkpoint (config, index, headers); its config.json alone; a complete `model:` block. What
is absent or unreachable becomes a check of status `unchecked`, with the error that a run raises. What exists and is
broken is an error in both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import haliax as hax
import numpy as np

from haliax_ext.abstract import Leaf
from haliax_ext.rules import WeightRules
from haliax_ext.sources import TensorSource
from levanter.commands.model.saved_adapters import SavedAdapters
from levanter.compat.hf.config_bridge import check_model_block, read_config
from levanter.compat.hf.errors import CheckpointError, MissingCheckpointFileError, UnreachableError
from levanter.compat.hf.locate import locate_first
from levanter.compat.hf.tokenizer import check_vocabulary
from levanter.compat.open import hf_config, int8_format, load_tokenizer, open_checkpoint
from levanter.config import ExplicitKeys, plain
from levanter.data import PassthroughTokenizer, Tokenizer
from levanter.models.registry import LmConfig, family_for_config
from levanter.models.vocabularies import known_vocabulary
from levanter.runplan import Check

PASSTHROUGH = "passthrough"
DEFAULT_STORED = "bfloat16"
"""The dtype that weights are assumed to be stored in if nothing says."""
_STORED = {"float32": "float32", "float": "float32", "float16": "float16", "half": "float16", "bfloat16": "bfloat16"}
_SIZES = ("hidden_dim", "intermediate_dim", "num_layers", "num_heads", "num_kv_heads")


def _none(weight: str) -> bool:
    """No weight is stored as int8."""
    del weight
    return False


class UnknownArchitectureError(ValueError):
    """Nothing that is readable here gives the model's architecture."""


class OpenedModel(Protocol):
    """An open checkpoint, whoever wrote it."""

    @property
    def source(self) -> TensorSource:
        """The weights, by slices."""
        ...

    @property
    def description(self) -> str:
        """What it is, in a line."""
        ...

    def tokenizer(self) -> Tokenizer:
        """The checkpoint's own tokenizer."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Origin:
    """A model's origin.

    Attributes:
        reference: as the config names it; None if it names none.
        checkpoint: the open checkpoint; None if it is not available here.
        architecture: its config, with the user's choices of how to run it.
        description: what it is, in a line.
        stored: the dtype that weights are stored in, or assumed to be.
        checks: those made so far.
        is_int8: of a weight's name in the checkpoint, whether it is stored as 8-bit integers and scales.
        rules: leaves → where they come from, if that is not the model family's table of Hugging Face names.
        padded: whether the vocabulary's rows are rounded up to a multiple of their shards, as in training.
        adapters: those of one of our checkpoints, which this is the base of; None for none.
    """

    reference: str | None
    checkpoint: OpenedModel | None
    architecture: LmConfig
    description: str
    stored: np.dtype
    checks: tuple[Check, ...]
    is_int8: Callable[[str], bool] = _none
    rules: Callable[..., WeightRules] | None = None
    padded: bool = False
    adapters: SavedAdapters | None = None

    @property
    def has_int8(self) -> bool:
        """Whether some weights are stored as 8-bit integers, as far as is known here."""
        if self.checkpoint is None:
            return self.is_int8 is not _none
        return any(self.is_int8(name) for name in self.checkpoint.source.tensors)

    def weight_rules(self, config: LmConfig, Vocab: hax.Axis, leaves: Sequence[Leaf]) -> WeightRules:
        """Where each leaf of the model comes from.

        Args:
            config: the architecture, with `vocab_size`.
            Vocab: rows of the embedding, which may be more.
            leaves: the model's.
        """
        if self.rules is None:
            return config.weight_rules(Vocab)
        return self.rules(leaves, padded=("vocab",) if Vocab.size != config.vocab_size else ())


@dataclass(frozen=True, kw_only=True)
class ModelBlock:
    """The `model:` block of a configuration.

    Attributes:
        config: the resolved block, defaults included.
        keys: the keys written in it.
    """

    config: LmConfig
    keys: frozenset[str]

    @classmethod
    def of(cls, config: LmConfig | None, written: ExplicitKeys) -> "ModelBlock | None":
        """The block of a configuration with the explicit keys `written`; None if it has none."""
        return None if config is None else cls(config=config, keys=written.below("model"))


def find_origin(
    reference: str | None,
    model: ModelBlock | None,
    *,
    allow_pickle: bool = False,
    block_is_whole: bool = False,
    block_yields: bool = False,
) -> Origin:
    """Finds out what can be known about a model here.

    Args:
        reference: Hugging Face files: a folder, a hub id, a URL, a .gguf file.
        model: the architecture as the config has it; it must agree with the checkpoint.
        allow_pickle: accepts pickled weights (never needed for safetensors).
        block_is_whole: whether the defaults of `model` count as explicit.
        block_yields: whether the checkpoint wins if `model` contradicts its architecture.

    Raises:
        CheckpointError: the checkpoint is broken or incomplete.
        UnknownArchitectureError: neither a config.json nor a complete `model:` block.
    """
    if not reference:
        nothing = UnknownArchitectureError("no model is named; give hf_checkpoint")
        return from_block(None, model, nothing, block_is_whole=block_is_whole)
    try:
        checkpoint = open_checkpoint(reference, allow_pickle=allow_pickle)
    except (UnreachableError, MissingCheckpointFileError) as error:
        if _holds_weights(reference):
            raise
        return _without_weights(reference, model, error, block_is_whole)
    architecture, replaced = None, []
    if block_yields and model is not None:
        architecture, replaced = yielding(model, checkpoint.config, where=checkpoint.where)
    return Origin(
        reference=reference,
        checkpoint=checkpoint,
        architecture=architecture
        or merged(model, checkpoint.config, where=checkpoint.where, block_is_whole=block_is_whole),
        description=checkpoint.description,
        stored=_stored(checkpoint.document),
        checks=(
            Check(name="model", status="ok", message=checkpoint.description),
            *(Check(name="model", status="note", message=f"not reached: {each}") for each in checkpoint.passed_over),
            *(Check(name="model", status="note", message=str(finding)) for finding in checkpoint.findings),
            *replaced,
        ),
        is_int8=checkpoint.int8.__contains__,
    )


def yielding(model: ModelBlock, own: LmConfig, *, where: str) -> tuple[LmConfig, list[Check]]:
    """The checkpoint's architecture whatever the block says, with the block's choices of how to run it.

    Returns:
        The config, and a note if the block contradicted it.
    """
    try:
        return merged(model, own, where=where), []
    except CheckpointError as error:
        free = model.keys - set(family_for_config(type(own)).architecture_fields)
        # A block of another family has other fields.
        shared = {field.name for field in fields(own)}
        config = replace(own, **{key: getattr(model.config, key) for key in sorted(free & shared)})
        message = f"the checkpoint's architecture is used, whatever the block says: {error}"
        return config, [Check(name="model block", status="note", message=message)]


def merged(model: ModelBlock | None, own: LmConfig, *, where: str, block_is_whole: bool = False) -> LmConfig:
    """The checkpoint's architecture with the user's choices of how to run it (backend, blocks, lengths).

    Args:
        model: the block; keys that are not written are taken from the checkpoint.
        own: the checkpoint's.
        where: the name of its config in messages.
        block_is_whole: whether keys that are not written in the block count as well.

    Raises:
        ConfigMismatchError: the block contradicts the checkpoint's architecture.
    """
    if model is None:
        return own
    block = {key: value for key, value in plain(model.config).items() if key in model.keys or key == "type"}
    if block_is_whole:
        check_model_block({**plain(model.config), **block}, own, where=where)
        return replace(model.config, vocab_size=own.vocab_size)
    check_model_block(block, own, where=where)
    free = model.keys - set(family_for_config(type(own)).architecture_fields)
    return replace(own, **{key: getattr(model.config, key) for key in sorted(free)})


def _lacking(model: ModelBlock) -> list[str]:
    """Sizes that the block leaves open. If a family's default is 0, the size follows from others (as in GPT-2)."""
    defaults = {field.name: field.default for field in fields(model.config)}
    return [size for size in _SIZES if size not in model.keys and defaults.get(size, 0) != 0]


def _holds_weights(reference: str) -> bool:
    """Whether some weights exist: an incomplete checkpoint is broken, not absent."""
    try:
        files = locate_first(reference).repository.files
    except CheckpointError:
        return False
    return any(file.endswith(".safetensors") for file in files)


def _without_weights(reference: str, model: ModelBlock | None, error: CheckpointError, block_is_whole: bool) -> Origin:
    try:
        document = hf_config(reference)
    except (UnreachableError, MissingCheckpointFileError):
        return from_block(reference, model, error, block_is_whole=block_is_whole)
    where = f"{reference}/config.json"
    document, int8 = int8_format(document, where=where)
    bridged = read_config(document, where=where)
    stored = _stored(document)
    return Origin(
        reference=reference,
        checkpoint=None,
        architecture=merged(model, bridged.config, where=where, block_is_whole=block_is_whole),
        description=f"{where} ({bridged.kind.model_type}, without its weights)",
        stored=stored,
        checks=(
            Check(name="model", status="ok", message=f"{where} ({bridged.kind.model_type})"),
            *(Check(name="model", status="note", message=str(finding)) for finding in bridged.findings),
            _absent(error, stored),
        ),
        is_int8=_none if int8 is None else int8.covers,
    )


def from_block(
    reference: str | None,
    model: ModelBlock | None,
    error: ValueError,
    *,
    block_is_whole: bool = False,
    rules: Callable[..., WeightRules] | None = None,
    padded: bool = False,
) -> Origin:
    """A model of which only the `model:` block is available.

    Args:
        reference: as the config names it.
        model: the block.
        error: why there is no checkpoint; what a run raises.
        block_is_whole, rules, padded: see `find_origin` and `Origin`.

    Raises:
        UnknownArchitectureError: the block is incomplete.
    """
    lacking = [] if model is None or block_is_whole else _lacking(model)
    if model is None or lacking:
        block = "there is no model: block" if model is None else f"model: does not give {', '.join(lacking)}"
        raise UnknownArchitectureError(
            f"{error}\nthe model's architecture is unknown without it: {block}\n"
            "  → to run it, make the checkpoint available; to plan it, a folder with its config.json or a complete "
            "model: block is enough"
        ) from error
    kind = type(model.config).get_choice_name(type(model.config))
    stored = np.dtype(_named(DEFAULT_STORED))
    return Origin(
        reference=reference,
        checkpoint=None,
        architecture=model.config,
        description=f"{reference or 'no checkpoint'} ({kind}, from the model: block, without weights)",
        stored=stored,
        checks=(
            Check(name="model", status="ok", message=f"{kind}, from the model: block"),
            _absent(error, stored),
        ),
        rules=rules,
        padded=padded,
    )


def _absent(error: ValueError, stored: np.dtype) -> Check:
    reason = str(error).splitlines()[0]
    return Check(
        name="weights",
        status="unchecked",
        message=f"{reason}; planned with the names and shapes of the architecture, in {stored.name}",
        error=error,
    )


def _stored(document: Mapping[str, Any]) -> np.dtype:
    stated = document.get("dtype") or document.get("torch_dtype")
    name = _STORED.get(stated.removeprefix("torch."), DEFAULT_STORED) if isinstance(stated, str) else DEFAULT_STORED
    return np.dtype(_named(name))


def _named(name: str) -> Any:
    import ml_dtypes

    return ml_dtypes.bfloat16 if name == "bfloat16" else name


def find_tokenizer(named: str | None, *, origin: Origin | None, size: int | None) -> tuple[Tokenizer | None, Check]:
    """The tokenizer of a run, if it is available here.

    Args:
        named: the tokenizer; None for the checkpoint's own.
        origin: the checkpoint.
        size: ids that the model has embeddings for, if known.

    Raises:
        CheckpointError: it exists but cannot be read, or has more ids than the model has embeddings.
    """
    reference = named or (None if origin is None else origin.reference)
    try:
        if named == PASSTHROUGH and size is not None:
            found: Tokenizer = PassthroughTokenizer(size)
        elif named is None and origin is not None and origin.checkpoint is not None:
            found = origin.checkpoint.tokenizer()
        elif reference is None or reference == PASSTHROUGH:
            raise MissingCheckpointFileError("tokenizer", "none is named, and there is no checkpoint to take it from")
        else:
            found = load_tokenizer(reference)
            if size is not None:
                check_vocabulary(found, size, where="model" if origin is None else origin.description)
    except (UnreachableError, MissingCheckpointFileError) as error:
        reason = str(error).splitlines()[0]
        return None, Check(name="tokenizer", status="unchecked", message=reason, error=error)
    return found, Check(name="tokenizer", status="ok", message=f"{found.name}, {found.vocab_size} ids")


def vocabulary(model: LmConfig, *, tokenizer: Tokenizer | None, names: tuple[str | None, ...]) -> tuple[int, str]:
    """How many ids the model has, and how that is known.

    Args:
        model: the architecture; its own size (config.json's, `model.vocab_size`) comes first.
        tokenizer: the tokenizer, if it is available here.
        names: of tokenizers and checkpoints whose size may be well known.

    Raises:
        ValueError: nothing gives it.
    """
    if model.vocab_size is not None:
        return model.vocab_size, "as configured"
    if tokenizer is not None:
        return tokenizer.vocab_size, f"tokenizer {tokenizer.name}"
    for name in filter(None, names):
        if (size := known_vocabulary(name)) is not None:
            return size, f"the known size of {name}"
    tried = ", ".join(dict.fromkeys(filter(None, names))) or "none is named"
    raise ValueError(
        "the vocabulary size is unknown: no config.json, no model.vocab_size, no tokenizer that can be read "
        f"here, and none that is well known ({tried})\n  → set model.vocab_size"
    )
