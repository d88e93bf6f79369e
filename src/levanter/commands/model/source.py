"""The source of a model: its checkpoint, its config.json alone, or a complete `model:` block, in this order.

A run needs the complete checkpoint, a plan only its shapes. An absent or unreachable file becomes a check of status
`unchecked` with the error that a run raises; a file that exists and is broken is an error in both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

import haliax as hax
import numpy as np

from haliax_ext.abstract import Leaf
from haliax_ext.rules import WeightRules
from haliax_ext.sources import TensorSource
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

if TYPE_CHECKING:
    from levanter.commands.model.saved_adapters import SavedAdapters

PASSTHROUGH = "passthrough"
DEFAULT_STORED = "bfloat16"
"""Assumed dtype of stored weights if the config has none."""
_STORED = {"float32": "float32", "float": "float32", "float16": "float16", "half": "float16", "bfloat16": "bfloat16"}
_SIZES = ("hidden_dim", "intermediate_dim", "num_layers", "num_heads", "num_kv_heads")


def _none(weight: str) -> bool:
    """No weight is stored as int8."""
    del weight
    return False


class UnknownArchitectureError(ValueError):
    """No file that is readable on this machine defines the model's architecture."""


class OpenedModel(Protocol):
    """An open checkpoint of any format."""

    @property
    def source(self) -> TensorSource:
        """The weights."""
        ...

    @property
    def description(self) -> str:
        """One line that describes it."""
        ...

    def tokenizer(self) -> Tokenizer:
        """The checkpoint's own tokenizer."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelSource:
    """Where a model comes from, as far as it is known on this machine.

    Attributes:
        reference: the name in the config; None if it names none.
        checkpoint: the open checkpoint; None if it is unavailable on this machine.
        architecture: its config, with the user's runtime settings.
        description: one line that describes it.
        stored: dtype of the stored weights, or the assumed one.
        checks: the checks so far.
        is_int8: weight name in the checkpoint → whether it is stored as 8-bit integers and scales.
        rules: leaves → weight rules, if they are not the model family's table of Hugging Face names.
        padded: whether vocabulary rows are rounded up to a multiple of their shards, as in training.
        adapters: adapters of a checkpoint of `train_lm` whose base this is; None for none.
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
    adapters: "SavedAdapters | None" = None

    @property
    def has_int8(self) -> bool:
        """Whether some weights are stored as 8-bit integers, as far as it is known on this machine."""
        if self.checkpoint is None:
            # Without tensors, a function other than the default shows that the config has an int8 format.
            return self.is_int8 is not _none
        return any(self.is_int8(name) for name in self.checkpoint.source.tensors)

    def weight_rules(self, config: LmConfig, Vocab: hax.Axis, leaves: Sequence[Leaf]) -> WeightRules:
        """The weight rules of the model's leaves.

        Args:
            config: the architecture, with `vocab_size`.
            Vocab: rows of the embedding, at least `vocab_size`.
            leaves: leaves of the model.
        """
        if self.rules is None:
            return config.weight_rules(Vocab)
        # Rules by leaf path; the vocabulary may be padded only if its axis is.
        return self.rules(leaves, padded=("vocab",) if Vocab.size != config.vocab_size else ())


@dataclass(frozen=True, kw_only=True)
class ModelBlock:
    """The `model:` block of a configuration.

    Attributes:
        config: the resolved block, defaults included.
        keys: the keys that the user set.
    """

    config: LmConfig
    keys: frozenset[str]

    @classmethod
    def of(cls, config: LmConfig | None, written: ExplicitKeys) -> "ModelBlock | None":
        """The block of a configuration with the explicit keys `written`; None if it has none."""
        return None if config is None else cls(config=config, keys=written.below("model"))


def resolve_source(
    reference: str | None,
    model: ModelBlock | None,
    *,
    allow_pickle: bool = False,
    block_is_whole: bool = False,
    block_yields: bool = False,
) -> ModelSource:
    """Resolves the source of a model from the files that are readable on this machine.

    Args:
        reference: Hugging Face files: a folder, a hub id, a URL, a .gguf file.
        model: the `model:` block, which must agree with the checkpoint.
        allow_pickle: accepts pickled weights (never needed for safetensors).
        block_is_whole: whether the defaults of `model` count as explicit.
        block_yields: whether the checkpoint takes precedence if `model` contradicts its architecture.

    Raises:
        CheckpointError: the checkpoint is broken or incomplete.
        UnknownArchitectureError: there is neither a config.json nor a complete `model:` block.
    """
    if not reference:
        nothing = UnknownArchitectureError("no model is named; set hf_checkpoint")
        return source_from_block(None, model, nothing, block_is_whole=block_is_whole)
    try:
        # Reads the config, the index and the headers, no weights.
        checkpoint = open_checkpoint(reference, allow_pickle=allow_pickle)
    except (UnreachableError, MissingCheckpointFileError) as error:
        # Files that exist but cannot be assembled are an error even in a plan.
        if _has_weight_files(reference):
            raise
        return _source_without_weights(reference, model, error, block_is_whole, block_yields=block_yields)
    architecture, replaced = None, []
    if block_yields and model is not None:
        architecture, replaced = merge_with_checkpoint_priority(model, checkpoint.config, where=checkpoint.where)
    return ModelSource(
        reference=reference,
        checkpoint=checkpoint,
        architecture=architecture
        # `block_yields` has merged them already; otherwise a contradiction is an error.
        or merge_architecture(model, checkpoint.config, where=checkpoint.where, block_is_whole=block_is_whole),
        description=checkpoint.description,
        stored=_stored(checkpoint.document),
        checks=(
            Check(name="model", status="ok", message=checkpoint.description),
            *(
                Check(name="model", status="note", message=f"not reached: {source}")
                for source in checkpoint.passed_over
            ),
            *(
                Check(name="model", status="note", message=str(note))
                for note in (*checkpoint.findings, *checkpoint.notes)
            ),
            *replaced,
        ),
        is_int8=checkpoint.int8.__contains__,
    )


def merge_with_checkpoint_priority(
    model: ModelBlock, checkpoint_config: LmConfig, *, where: str
) -> tuple[LmConfig, list[Check]]:
    """The checkpoint's architecture, even if the block contradicts it, with the block's runtime settings.

    Returns:
        The config, and a note if the block contradicted it.
    """
    try:
        return merge_architecture(model, checkpoint_config, where=where), []
    except CheckpointError as error:
        # Keys that do not define the architecture.
        free = model.keys - set(family_for_config(type(checkpoint_config)).architecture_fields)
        # A block of another family has fields that this one lacks.
        shared = {field.name for field in fields(checkpoint_config)}
        config = replace(checkpoint_config, **{key: getattr(model.config, key) for key in sorted(free & shared)})
        message = f"the checkpoint's architecture is used instead of the block: {error}"
        return config, [Check(name="model block", status="note", message=message)]


def merge_architecture(
    model: ModelBlock | None, checkpoint_config: LmConfig, *, where: str, block_is_whole: bool = False
) -> LmConfig:
    """The checkpoint's architecture with the user's runtime settings (backend, blocks, lengths).

    Args:
        model: the block; keys that the user did not set are taken from the checkpoint.
        checkpoint_config: the checkpoint's architecture.
        where: the name of its config in messages.
        block_is_whole: whether the block's defaults count as explicit.

    Raises:
        ConfigMismatchError: the block contradicts the checkpoint's architecture.
    """
    if model is None:
        return checkpoint_config
    # `type` is always compared: a block of another family contradicts by itself.
    block = {key: value for key, value in plain(model.config).items() if key in model.keys or key == "type"}
    if block_is_whole:
        check_model_block({**plain(model.config), **block}, checkpoint_config, where=where)
        # The block stands for the whole architecture, so only the vocabulary is the checkpoint's.
        return replace(model.config, vocab_size=checkpoint_config.vocab_size)
    check_model_block(block, checkpoint_config, where=where)
    free = model.keys - set(family_for_config(type(checkpoint_config)).architecture_fields)
    # The checkpoint defines the architecture; the block's other keys are runtime settings.
    return replace(checkpoint_config, **{key: getattr(model.config, key) for key in sorted(free)})


def _missing_sizes(model: ModelBlock) -> list[str]:
    """Sizes that the block does not set. A size with default 0 is derived from others (as in GPT-2)."""
    defaults = {field.name: field.default for field in fields(model.config)}
    return [size for size in _SIZES if size not in model.keys and defaults.get(size, 0) != 0]


def _has_weight_files(reference: str) -> bool:
    """Whether some weight files exist: an incomplete checkpoint is an error, not an absent one."""
    try:
        files = locate_first(reference).repository.files
    except CheckpointError:
        return False
    return any(file.endswith(".safetensors") for file in files)


def _source_without_weights(
    reference: str, model: ModelBlock | None, error: CheckpointError, block_is_whole: bool, *, block_yields: bool
) -> ModelSource:
    # Weights are absent: the config alone still defines all shapes.
    where = f"{reference}/config.json"
    try:
        document = hf_config(reference)
    except (UnreachableError, MissingCheckpointFileError):
        # Imported late: a run, whose files are here, needs no table.
        from levanter.compat.hf.known_configs import known_config

        known = known_config(reference)
        if known is None:
            return source_from_block(reference, model, error, block_is_whole=block_is_whole)
        document, where = known, f"the known config.json of {reference}"
    # The quantization entry of the document is separated, since the config bridge does not know it.
    document, int8 = int8_format(document, where=where)
    bridged = read_config(document, where=where)
    stored = _stored(document)
    architecture, replaced = None, []
    if block_yields and model is not None:
        architecture, replaced = merge_with_checkpoint_priority(model, bridged.config, where=where)
    return ModelSource(
        reference=reference,
        checkpoint=None,
        architecture=architecture
        or merge_architecture(model, bridged.config, where=where, block_is_whole=block_is_whole),
        description=f"{where} ({bridged.kind.model_type}, without its weights)",
        stored=stored,
        checks=(
            Check(name="model", status="ok", message=f"{where} ({bridged.kind.model_type})"),
            *(Check(name="model", status="note", message=str(finding)) for finding in bridged.findings),
            *replaced,
            _unavailable_check(error, stored),
        ),
        is_int8=_none if int8 is None else int8.covers,
    )


def source_from_block(
    reference: str | None,
    model: ModelBlock | None,
    error: ValueError,
    *,
    block_is_whole: bool = False,
    rules: Callable[..., WeightRules] | None = None,
    padded: bool = False,
) -> ModelSource:
    """The source of a model of which only the `model:` block is available.

    Args:
        reference: the name in the config.
        model: the block.
        error: why there is no checkpoint; a run raises it.
        block_is_whole, rules, padded: see `resolve_source` and `ModelSource`.

    Raises:
        UnknownArchitectureError: the block is incomplete.
    """
    # A block that counts as whole has its defaults as sizes.
    missing = [] if model is None or block_is_whole else _missing_sizes(model)
    if model is None or missing:
        block = "there is no model: block" if model is None else f"model: does not set {', '.join(missing)}"
        raise UnknownArchitectureError(
            f"{error}\nthe model's architecture is unknown without it: {block}\n"
            "  → to run it, make the checkpoint available; to plan it, a folder with its config.json or a complete "
            "model: block is enough"
        ) from error
    kind = type(model.config).get_choice_name(type(model.config))
    stored = np.dtype(_named(DEFAULT_STORED))
    return ModelSource(
        reference=reference,
        checkpoint=None,
        architecture=model.config,
        description=f"{reference or 'no checkpoint'} ({kind}, from the model: block, without weights)",
        stored=stored,
        checks=(
            Check(name="model", status="ok", message=f"{kind}, from the model: block"),
            _unavailable_check(error, stored),
        ),
        rules=rules,
        padded=padded,
    )


def _unavailable_check(error: ValueError, stored: np.dtype) -> Check:
    reason = str(error).splitlines()[0]
    return Check(
        name="weights",
        status="unchecked",
        message=f"{reason}; planned with the names and shapes of the architecture, in {stored.name}",
        error=error,
    )


def _stored(document: Mapping[str, Any]) -> np.dtype:
    # transformers writes `dtype` in new files, `torch_dtype` in old ones, perhaps as `torch.bfloat16`.
    stated = document.get("dtype") or document.get("torch_dtype")
    name = _STORED.get(stated.removeprefix("torch."), DEFAULT_STORED) if isinstance(stated, str) else DEFAULT_STORED
    return np.dtype(_named(name))


def _named(name: str) -> Any:
    import ml_dtypes

    return ml_dtypes.bfloat16 if name == "bfloat16" else name


def find_tokenizer(
    named: str | None, *, origin: ModelSource | None, size: int | None
) -> tuple[Tokenizer | None, Check]:
    """The tokenizer of a run, if it is available on this machine.

    Args:
        named: the configured tokenizer; None for the checkpoint's own.
        origin: the source of the model.
        size: vocabulary size of the model, if known.

    Raises:
        CheckpointError: it exists but cannot be read, or has more ids than the model has embeddings.
    """
    reference = named or (None if origin is None else origin.reference)
    try:
        # Data of token ids needs no files.
        if named == PASSTHROUGH and size is not None:
            tokenizer: Tokenizer = PassthroughTokenizer(size)
        elif named is None and origin is not None and origin.checkpoint is not None:
            tokenizer = origin.checkpoint.tokenizer()
        elif reference is None or reference == PASSTHROUGH:
            raise MissingCheckpointFileError("tokenizer", "none is named, and there is no checkpoint to take it from")
        else:
            tokenizer = load_tokenizer(reference)
            # More ids than embedding rows would index out of range.
            if size is not None:
                check_vocabulary(tokenizer, size, where="model" if origin is None else origin.description)
    except (UnreachableError, MissingCheckpointFileError) as error:
        reason = str(error).splitlines()[0]
        return None, Check(name="tokenizer", status="unchecked", message=reason, error=error)
    return tokenizer, Check(name="tokenizer", status="ok", message=f"{tokenizer.name}, {tokenizer.vocab_size} ids")


def vocabulary(model: LmConfig, *, tokenizer: Tokenizer | None, names: tuple[str | None, ...]) -> tuple[int, str]:
    """The vocabulary size of the model, and how it is known.

    Args:
        model: the architecture; its own size (config.json's, `model.vocab_size`) comes first.
        tokenizer: the tokenizer, if it is available on this machine.
        names: names of tokenizers and checkpoints whose vocabulary size may be known.

    Raises:
        ValueError: no source defines it.
    """
    if model.vocab_size is not None:
        return model.vocab_size, "as configured"
    if tokenizer is not None:
        return tokenizer.vocab_size, f"tokenizer {tokenizer.name}"
    for name in filter(None, names):
        if (size := known_vocabulary(name)) is not None:
            # Published vocabularies, so that a plan works without files.
            return size, f"the known size of {name}"
    tried = ", ".join(dict.fromkeys(filter(None, names))) or "none is named"
    raise ValueError(
        "the vocabulary size is unknown: no config.json, no model.vocab_size, no readable tokenizer, "
        f"and no tokenizer of known size ({tried})\n  → set model.vocab_size"
    )
