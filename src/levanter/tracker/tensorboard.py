"""TensorBoard, through `tensorboardX` (optional: `pip install 'levanter-fork[tensorboard]'`)."""

import importlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from levanter.base.bounded_json import Json
from levanter.config.validators import Count, PositiveInt
from levanter.io import Output
from levanter.io.names import name_problem
from levanter.io.paths import is_remote, join, local_path
from levanter.tracker.base import Metrics, MetricsTable, Tracker, TrackerConfig, as_json, as_plain

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

logger = logging.getLogger(__name__)


class TensorboardTracker(Tracker):
    """Writes event files: numbers as scalars, strings and tables as text, lists of numbers as histograms."""

    name = "tensorboard"

    def __init__(self, writer: "SummaryWriter"):
        self.writer = writer
        self._finished = False
        self._step = 0

    def log_hyperparameters(self, hparams: Mapping[str, Any]) -> None:
        self.writer.add_text("config", _as_code(hparams), global_step=0)

    def log(self, metrics: Metrics, *, step: int | None, commit: bool | None = None) -> None:
        del commit
        # A summary has no step; it is drawn at the last one that was logged.
        self._step = self._step if step is None else step
        self._add(metrics, self._step)

    def log_summary(self, metrics: Metrics) -> None:
        self._add({f"summary/{name}": value for name, value in metrics.items()}, self._step)

    def log_artifact(self, path: str, *, name: str | None = None, type: str | None = None) -> None:
        del type
        folder = self.writer.logdir
        # `tensorboardX` writes its event files to object stores; plain files would need another client.
        if is_remote(folder):
            logger.warning("tensorboard: %s is not copied to the remote folder %s", path, folder)
            return
        target = os.path.join(folder, "artifacts", name or os.path.basename(path))
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.isdir(path):
            shutil.copytree(path, target, dirs_exist_ok=True)
        else:
            shutil.copyfile(path, target)

    def finish(self) -> None:
        if not self._finished:
            self._finished = True
            self.writer.close()

    def _add(self, metrics: Metrics, step: int) -> None:
        # `as_plain` would flatten a table into lists of one column's values.
        for name, table in ((name, value) for name, value in metrics.items() if isinstance(value, MetricsTable)):
            self.writer.add_text(name, table.markdown, step)
        numbers = {name: value for name, value in metrics.items() if not isinstance(value, MetricsTable)}
        for name, value in flatten(as_plain(numbers)):
            # After `as_plain` every number is one of Python's, of arrays of one element too.
            if isinstance(value, (bool, int, float)):
                self.writer.add_scalar(name, value, step)
            elif isinstance(value, list) and value and all(isinstance(item, (int, float)) for item in value):
                self.writer.add_histogram(name, value, step)
            elif isinstance(value, list):
                self.writer.add_text(name, _as_code(value), step)
            elif value is not None:
                self.writer.add_text(name, str(value), step)


def flatten(value: Json, prefix: str = "") -> Iterator[tuple[str, Json]]:
    """The leaves of nested mappings, their keys joined by `/`."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flatten(item, f"{prefix}/{key}" if prefix else str(key))
    else:
        yield prefix, value


def _as_code(value: object) -> str:
    lines = json.dumps(as_json(value), indent=2).splitlines()
    return "\n".join("    " + line for line in lines)  # Markdown's indented code block


@TrackerConfig.register_subclass("tensorboard")
@dataclass(frozen=True, kw_only=True)
class TensorboardConfig(TrackerConfig):
    """Where event files go; keys as upstream (those of `SummaryWriter`)."""

    logdir: str = "tblogs"
    comment: str | None = ""
    purge_step: Count | None = None
    max_queue: Count | None = 10
    flush_secs: PositiveInt | None = 120
    filename_suffix: str | None = ""
    write_to_disk: bool | None = True

    def __post_init__(self) -> None:
        super().__post_init__()
        # A part of a file's name.
        if self.filename_suffix and (problem := name_problem(self.filename_suffix)) is not None:
            raise ValueError(f"filename_suffix: {problem}")

    def init(self, run_id: str | None) -> Tracker:
        try:
            tensorboardX = importlib.import_module("tensorboardX")
        except ModuleNotFoundError as error:
            raise ValueError(
                "tracker `tensorboard` needs the package tensorboardX: pip install 'levanter-fork[tensorboard]'"
            ) from error
        folder = self._folder(run_id)
        return TensorboardTracker(
            tensorboardX.SummaryWriter(
                folder if is_remote(folder) else local_path(folder),
                comment=self.comment or "",
                purge_step=self.purge_step,
                max_queue=10 if self.max_queue is None else self.max_queue,
                flush_secs=120 if self.flush_secs is None else self.flush_secs,
                filename_suffix=self.filename_suffix or "",
                write_to_disk=self.write_to_disk is not False,
            )
        )

    def outputs(self, run_id: str | None) -> tuple[Output, ...]:
        return (Output(key="tracker.logdir", path=self._folder(run_id), kind="folder"),) if self.write_to_disk else ()

    def _folder(self, run_id: str | None) -> str:
        return self.logdir if run_id is None else join(self.logdir, run_id)
