"""The model keys that several configurations have: which model, how it is read, and how its weights are represented.

This module imports nothing that runs, so `--help` stays fast.
"""

from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

from levanter.config.validators import PathText, PositiveFloat, Ranged
from levanter.models.registry import LmConfig
from levanter.trainer.config import TrainerConfig

Quantize = Literal["int8"]
"""Representation of a model's projections, if it is not the compute dtype."""
TiedHead = Literal["copy", "share"]
"""Matrix of a tied output head: an int8 copy of the embedding table, or the table itself."""


@dataclass(frozen=True, kw_only=True)
class ModelKeys(Ranged):
    """The keys that name a model.

    Attributes:
        hf_checkpoint: Hugging Face files: a folder, a hub id (`org/name@revision`), a URL, or a .gguf file.
        checkpoint_path: a checkpoint of `train_lm`, or a run's folder for its newest one.
        model: the architecture, if the checkpoint has no config; otherwise it is checked against the checkpoint.
        adapter_path: an adapter to apply to the model, in the format of peft or `peft_save_path`: a folder, a hub id,
            or a URL.
    """

    hf_checkpoint: PathText | None = None
    checkpoint_path: PathText | None = None
    model: LmConfig | None = None
    adapter_path: PathText | None = None


@dataclass(frozen=True, kw_only=True)
class QuantizableModelKeys(ModelKeys):
    """The keys of a model whose projections may become integers.

    Attributes:
        quantize: `int8` stores all projections as 8-bit integers with a scale per output channel, quantized while they
            are read; null keeps them in the compute dtype.
        tied_head: with `quantize` and tied embeddings: `copy` gives the output head an int8 copy of the embedding
            table, `share` multiplies by the table itself.
    """

    quantize: Quantize | None = None
    tied_head: TiedHead = "copy"


@dataclass(frozen=True, kw_only=True)
class LoadedModelKeys(QuantizableModelKeys):
    """The keys of a model whose weights are read, with those that say how.

    Attributes:
        allow_pickle: accepts pickled weights (never needed for safetensors).
        load_memory_gib: host memory for read buffers in GiB, in addition to the arrays; default a tenth of them, within
            [0.25, 4].
    """

    allow_pickle: bool = False
    load_memory_gib: PositiveFloat | None = None

    @property
    def model_keys(self) -> dict[str, Any]:
        """The values of these keys by name, for another configuration of the same model."""
        return {field.name: getattr(self, field.name) for field in fields(LoadedModelKeys)}


class HasCheckpointKeys(Protocol):
    """A configuration whose `checkpoint_path` may also name Hugging Face files."""

    @property
    def hf_checkpoint(self) -> str | None:
        """Hugging Face files."""

    @property
    def checkpoint_path(self) -> str | None:
        """A checkpoint of `train_lm`."""

    @property
    def checkpoint_is_hf(self) -> bool:
        """Whether `checkpoint_path` names Hugging Face files."""
        ...


class HasLoadKeys(Protocol):
    """A configuration with the keys of reading a model, independent of the keys that name it."""

    @property
    def trainer(self) -> TrainerConfig:
        """Mesh and precision."""
        ...

    @property
    def allow_pickle(self) -> bool:
        """Accepts pickled weights."""
        ...

    @property
    def load_memory_gib(self) -> float | None:
        """Host memory for read buffers in GiB."""

    @property
    def quantize(self) -> Quantize | None:
        """Representation of the projections."""

    @property
    def tied_head(self) -> TiedHead:
        """Matrix of a tied output head of a quantized model."""
        ...

    @property
    def adapter_path(self) -> str | None:
        """An adapter to apply to the model."""


def hf_files(config: HasCheckpointKeys) -> str | None:
    """The Hugging Face files that the configuration names, under either key."""
    # `hf_checkpoint` comes first; a second, different model is refused by `model_key_problems`.
    return config.hf_checkpoint or (config.checkpoint_path if config.checkpoint_is_hf else None)


def saved_checkpoint(config: HasCheckpointKeys) -> str | None:
    """The checkpoint of `train_lm` that the configuration names."""
    return None if config.checkpoint_is_hf else config.checkpoint_path


def model_key_problems(config: ModelKeys, *, alias: str | None = None, purpose: str = "") -> list[str]:
    """Returns the problems of a configuration that names no model, or two.

    Args:
        config: the configuration.
        alias: value of `initialize_from_hf`, an alias of `hf_checkpoint`, if the configuration has it.
        purpose: the purpose in messages, such as `to evaluate`.
    """
    problems, files = [], config.hf_checkpoint or alias
    # The alias may repeat the same name.
    if alias and files != alias:
        problems.append("hf_checkpoint and initialize_from_hf name two models; set one")
    if config.checkpoint_path and files:
        problems.append("checkpoint_path and hf_checkpoint name two models; set one")
    # A `model:` block alone is enough to plan.
    elif not (config.checkpoint_path or files or config.model is not None):
        problems.append(
            f"no model{purpose and f' {purpose}'}: set hf_checkpoint (a folder, a hub id, or a .gguf file) or "
            "checkpoint_path (a checkpoint of train_lm)"
        )
    return problems
