"""How configurations name a model: keys that several have. Apart, so that `--help` imports nothing that runs."""

from typing import Protocol

from levanter.commands.model.representation import Quantize, TiedHead
from levanter.trainer.config import TrainerConfig


class NamesModel(Protocol):
    """A configuration that names a model."""

    @property
    def hf_checkpoint(self) -> str | None:
        """Hugging Face files."""

    @property
    def checkpoint_path(self) -> str | None:
        """A checkpoint."""

    @property
    def model(self) -> object:
        """An architecture."""


class NamesEither(NamesModel, Protocol):
    """A configuration whose `checkpoint_path` may be of either kind."""

    @property
    def checkpoint_is_hf(self) -> bool:
        """Whether it names Hugging Face files."""
        ...


class ReadsModel(Protocol):
    """A configuration of a run that reads a model, whichever keys name it."""

    @property
    def trainer(self) -> TrainerConfig:
        """Mesh and precision."""
        ...

    @property
    def allow_pickle(self) -> bool:
        """Accept pickled weights."""
        ...

    @property
    def load_memory_gib(self) -> float | None:
        """Host memory for reading."""

    @property
    def quantize(self) -> Quantize | None:
        """In what projections are held."""

    @property
    def tied_head(self) -> TiedHead:
        """What a quantized model's head multiplies by."""
        ...

    @property
    def adapter_path(self) -> str | None:
        """An adapter."""


def named_files(config: NamesEither) -> str | None:
    """The Hugging Face files that are named, under either key."""
    return config.hf_checkpoint or (config.checkpoint_path if config.checkpoint_is_hf else None)


def named_saved(config: NamesEither) -> str | None:
    """The checkpoint of our own training that is named."""
    return None if config.checkpoint_is_hf else config.checkpoint_path


def naming_problems(config: NamesModel, *, alias: str | None = None, purpose: str = "") -> list[str]:
    """What is wrong where no model is named, or two.

    Args:
        config: the configuration.
        alias: its `initialize_from_hf`, another name of `hf_checkpoint`, where it has that.
        purpose: what the model is for, such as `to evaluate`.
    """
    problems, files = [], config.hf_checkpoint or alias
    if alias and files != alias:
        problems.append("hf_checkpoint and initialize_from_hf name two models; give one")
    if config.checkpoint_path and files:
        problems.append("checkpoint_path and hf_checkpoint name two models; give one")
    elif not (config.checkpoint_path or files or config.model is not None):
        problems.append(
            f"no model{purpose and f' {purpose}'}: give hf_checkpoint (a folder, a hub id, or a .gguf file) or "
            "checkpoint_path (a checkpoint of train_lm)"
        )
    return problems
