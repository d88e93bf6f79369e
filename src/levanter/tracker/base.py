"""`Tracker`: where a run's metrics go.

A *tracker* receives hyperparameters once, metrics by step, a summary of single values, and files (artifacts). A
`TrackerConfig` is its YAML block (`tracker: {type: wandb, …}`, or a list of such blocks) and starts it. Only one
process of a job tracks; the others hold a `NoopTracker`. Services are imported when a tracker starts, never before.
"""

import abc
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, overload

import draccus
import numpy as np

from levanter.base.bounded_json import Json
from levanter.config.validators import Ranged
from levanter.io import Output

logger = logging.getLogger(__name__)

Metrics = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class MetricsTable:
    """A metric that is a table of texts and numbers; services show it as one, files get its records.

    Attributes:
        columns: the names of the columns.
        rows: the values of each row, in the order of the columns.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str | int | float | None, ...], ...]

    @property
    def records(self) -> list[dict[str, Json]]:
        """The rows as objects."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    @property
    def markdown(self) -> str:
        """The table in Markdown; line breaks and bars of a value do not break its row."""
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: object) -> str:
    # Markdown ends a cell at a bar and a row at a line break.
    text = "" if value is None else str(value)
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\r", "").replace("\n", "<br>")


class Tracker(abc.ABC):
    """Receives what a run reports. Every method may be called until `finish`, which ends the tracker."""

    name: str

    @abc.abstractmethod
    def log_hyperparameters(self, hparams: Mapping[str, Any]) -> None:
        """Records the run's resolved configuration (nested mappings)."""

    @abc.abstractmethod
    def log(self, metrics: Metrics, *, step: int | None, commit: bool | None = None) -> None:
        """Records metrics of a step. `commit=False` says that more metrics of this step will follow."""

    @abc.abstractmethod
    def log_summary(self, metrics: Metrics) -> None:
        """Records single values for the entire run."""

    @abc.abstractmethod
    def log_artifact(self, path: str, *, name: str | None = None, type: str | None = None) -> None:
        """Records a local file or folder."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Writes everything out and closes the tracker. Calling it again does nothing."""

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()


@dataclass(frozen=True, kw_only=True)
class TrackerConfig(Ranged, draccus.ChoiceRegistry, abc.ABC):
    """The base of all tracker blocks (`wandb` by default, as upstream)."""

    @classmethod
    def default_choice_name(cls) -> str | None:
        """The default `type`: Weights & Biases."""
        return "wandb"

    @abc.abstractmethod
    def init(self, run_id: str | None) -> Tracker:
        """Starts the tracker of this process for the run `run_id`."""

    def outputs(self, run_id: str | None) -> tuple[Output, ...]:
        """The paths that the tracker will write, which are tried before it starts."""
        del run_id
        return ()


class NoopTracker(Tracker):
    """Discards everything."""

    name = "noop"

    def log_hyperparameters(self, hparams: Mapping[str, Any]) -> None:
        del hparams

    def log(self, metrics: Metrics, *, step: int | None, commit: bool | None = None) -> None:
        del metrics, step, commit

    def log_summary(self, metrics: Metrics) -> None:
        del metrics

    def log_artifact(self, path: str, *, name: str | None = None, type: str | None = None) -> None:
        del path, name, type

    def finish(self) -> None:
        pass


@TrackerConfig.register_subclass("noop")
@dataclass(frozen=True, kw_only=True)
class NoopConfig(TrackerConfig):
    """No tracking (`tracker: {type: noop}`)."""

    def init(self, run_id: str | None) -> Tracker:
        del run_id
        return NoopTracker()


@TrackerConfig.register_subclass("telemetry")
@dataclass(frozen=True, kw_only=True)
class TelemetryConfig(TrackerConfig):
    """Upstream's telemetry to the services of its own cluster: accepted, and records nothing."""

    def init(self, run_id: str | None) -> Tracker:
        del run_id
        # A warning, not a refusal: outside of its cluster upstream's tracker records nothing either.
        logger.warning("tracker telemetry: records nothing, because it belongs to upstream's cluster; leave it out")
        return NoopTracker()


@overload
def as_plain(value: Mapping[str, object]) -> dict[str, Json]: ...
@overload
def as_plain(value: object) -> Json: ...
def as_plain(value: object) -> Json:
    """A value as mappings, lists, strings and Python numbers: arrays of one element become numbers, others lists.

    Anything that is none of these is written as its `str`.
    """
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, MetricsTable):
        return as_plain(value.records)
    if isinstance(value, Mapping):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [as_plain(item) for item in value]
    # JAX arrays too: `np.asarray` copies them to the host and waits for their computation.
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        if array.dtype.kind == "V" or array.dtype.kind == "O":  # bfloat16 and the like
            array = array.astype(np.float32)
        return array.item() if array.size == 1 else array.tolist()
    return str(value)


def detached(metrics: Metrics) -> dict[str, Any]:
    """Metrics that no later change of an array affects: `as_plain`, except for tables, which never change."""
    return {str(name): value if isinstance(value, MetricsTable) else as_plain(value) for name, value in metrics.items()}


@overload
def as_json(value: Mapping[str, object]) -> dict[str, Json]: ...
@overload
def as_json(value: object) -> Json: ...
def as_json(value: object) -> Json:
    """`as_plain` for strict JSON: numbers that are not finite become "NaN", "Infinity", "-Infinity"."""
    plain = as_plain(value)
    if isinstance(plain, float) and not math.isfinite(plain):
        return "NaN" if math.isnan(plain) else "Infinity" if plain > 0 else "-Infinity"
    if isinstance(plain, dict):
        return {key: as_json(item) for key, item in plain.items()}
    if isinstance(plain, list):
        return [as_json(item) for item in plain]
    return plain
