"""What runs that score texts have in common: rows of a batch, texts longer than the model knows, their output."""

from typing import Literal, Protocol

from levanter.io import Output, join
from levanter.models.registry import LmConfig
from levanter.runplan import Check
from levanter.trainer.config import TrainerConfig


class WritesResults(Protocol):
    """A configuration with a place for results."""

    @property
    def output_path(self) -> str | None:
        """Where they go, if that is said."""

    @property
    def trainer(self) -> TrainerConfig:
        """Where they go otherwise: below its `log_dir`."""
        ...


def rows_asked(trainer: TrainerConfig) -> tuple[int, str] | None:
    """Rows of a batch on each of its shards, and the key that says so; None where nobody says."""
    for key in ("per_device_eval_parallelism", "per_device_parallelism"):
        if (rows := getattr(trainer, key)) != -1:
            return rows, f"trainer.{key}"
    return None


def per_device(rows: int, why: str, ways: int) -> str:
    """How a batch is made of rows on each of its shards, in words."""
    return f"{rows} per device ({why}) × {ways} batch shards"


def beyond_context(model: LmConfig, said: str, *, name: str, advice: str) -> list[Check]:
    """What is said of texts longer than the model was trained on: a note, or an error where it has no positions there.

    Args:
        model: the architecture.
        said: what is longer, with its key: `lengths: 4,096 tokens`.
        name: of the check.
        advice: the key to change, up to the number.
    """
    message = f"{said} exceed the model's max_seq_len, {model.max_seq_len:,}"
    if not model.learned_positions:
        return [Check(name=name, status="note", message=f"{message}; it was not trained on longer texts")]
    error = ValueError(f"{message}; it has no positions beyond\n  → {advice} {model.max_seq_len}")
    return [Check(name=name, status="error", message=str(error), error=error)]


def output_key(config: WritesResults) -> tuple[str, str]:
    """Which key says where results go, and what it says."""
    if config.output_path:
        return "output_path", config.output_path
    return "trainer.log_dir", str(config.trainer.log_dir)


def result_output(config: WritesResults, *below: str, kind: Literal["file", "folder"]) -> Output:
    """Where results go.

    Args:
        config: the configuration.
        below: where below `trainer.log_dir`, if nothing else is said.
        kind: what is there.
    """
    key, path = output_key(config)
    return Output(key=key, path=path if config.output_path else join(path, *below), kind=kind)
