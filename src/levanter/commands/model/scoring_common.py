"""Shared parts of commands that score texts: rows per batch, context-length checks, output paths."""

from typing import Literal, Protocol

from levanter.io import Output, join
from levanter.models.registry import LmConfig
from levanter.runplan import Check
from levanter.trainer.config import TrainerConfig


class WritesResults(Protocol):
    """A configuration with an output path for results."""

    @property
    def output_path(self) -> str | None:
        """The output path, if it is set."""

    @property
    def trainer(self) -> TrainerConfig:
        """The trainer, whose `log_dir` has the results otherwise."""
        ...


def configured_rows(trainer: TrainerConfig) -> tuple[int, str] | None:
    """Rows per batch shard and the key that sets them; None if no key does."""
    # The key of evaluation comes first; -1 means that a key is not set.
    for key in ("per_device_eval_parallelism", "per_device_parallelism"):
        if (rows := getattr(trainer, key)) != -1:
            return rows, f"trainer.{key}"
    return None


def per_device(rows: int, why: str, ways: int) -> str:
    """Describes a batch as rows per device times batch shards."""
    return f"{rows} per device ({why}) × {ways} batch shards"


def context_length_checks(model: LmConfig, subject: str, *, name: str, advice: str) -> list[Check]:
    """Checks of texts longer than the trained context: a note, or an error if the model has no such positions.

    Args:
        model: the architecture.
        subject: subject of the message, with its key: `lengths: 4,096 tokens`.
        name: name of the check.
        advice: the key to change; the message appends the number.
    """
    message = f"{subject} exceed the model's max_seq_len, {model.max_seq_len:,}"
    # Rotary embeddings compute any position; learned ones end with their table.
    if not model.learned_positions:
        return [Check(name=name, status="note", message=f"{message}; it was not trained on longer texts")]
    error = ValueError(f"{message}; its position embeddings end there\n  → {advice} {model.max_seq_len}")
    return [Check(name=name, status="error", message=str(error), error=error)]


def output_key(config: WritesResults) -> tuple[str, str]:
    """The key that sets the output path, and its value."""
    if config.output_path:
        return "output_path", config.output_path
    return "trainer.log_dir", str(config.trainer.log_dir)


def result_output(config: WritesResults, *below: str, kind: Literal["file", "folder"]) -> Output:
    """The output of a command.

    Args:
        config: the configuration.
        below: path below `trainer.log_dir`, used if `output_path` is not set.
        kind: whether the output is a file or a folder.
    """
    key, path = output_key(config)
    return Output(key=key, path=path if config.output_path else join(path, *below), kind=kind)
