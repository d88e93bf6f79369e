"""Metrics as JSON lines in the program's own log, for machines that collect logs."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from levanter.config.validators import Count
from levanter.tracker.base import Metrics, Tracker, TrackerConfig, as_json


class JsonLoggerTracker(Tracker):
    """Writes each call to a logger as one JSON object."""

    name = "json_logger"

    def __init__(self, logger: logging.Logger, *, level: int):
        self._logger = logger
        self._level = level

    def log_hyperparameters(self, hparams: Mapping[str, Any]) -> None:
        self._write("hparams", hparams=hparams)

    def log(self, metrics: Metrics, *, step: int | None, commit: bool | None = None) -> None:
        del commit
        self._write("metrics", step=step, metrics=metrics)

    def log_summary(self, metrics: Metrics) -> None:
        self._write("summary", summary=metrics)

    def log_artifact(self, path: str, *, name: str | None = None, type: str | None = None) -> None:
        self._write("artifact", path=path, name=name, type=type)

    def finish(self) -> None:
        self._write("finish")

    def _write(self, event: str, **values: object) -> None:
        self._logger.log(self._level, "%s", json.dumps(as_json({"event": event, **values})))


@TrackerConfig.register_subclass("json_logger")
@dataclass(frozen=True, kw_only=True)
class JsonLoggerConfig(TrackerConfig):
    """The logger, and the level (`20` is INFO)."""

    logger_name: str = "levanter.json_logger"
    level: Count = logging.INFO

    def init(self, run_id: str | None) -> Tracker:
        del run_id
        return JsonLoggerTracker(logging.getLogger(self.logger_name), level=self.level)
