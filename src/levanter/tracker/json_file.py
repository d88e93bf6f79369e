"""JSON lines in a folder: one record appended per call, and a JSON file of the last values at the end.

`metrics.jsonl` is append-only and each line reaches the disk as one write, so a run that is killed leaves every line
it logged. A partial line from an earlier crash is truncated when the file is reopened. Object stores cannot append:
there the file is kept in memory and rewritten in full, at most every `REMOTE_INTERVAL` seconds and at the end.

Records: `{"time": …, "step": 3, "metrics": {…}}`, or with `hparams`, `summary` or `artifact` instead of `metrics`.
Numbers that JSON cannot represent are the strings "NaN", "Infinity" and "-Infinity".
"""

import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from levanter.io import Output
from levanter.io.atomic import atomic_write
from levanter.io.paths import exists as path_exists
from levanter.io.paths import is_remote, join, local_path, open_read
from levanter.io.write_errors import output_error, output_errors
from levanter.tracker.base import Metrics, Tracker, TrackerConfig, as_json

METRICS_FILE = "metrics.jsonl"
RESULTS_FILE = "eval_results.json"
REMOTE_INTERVAL = 60.0
MOST_WAITING = 256 << 20
"""Bytes of lines that may wait for space on a full disk before the run fails."""

logger = logging.getLogger(__name__)


class JsonFileTracker(Tracker):
    """Tracks into a folder, local or remote."""

    name = "json_file"

    def __init__(self, folder: str):
        self.folder = folder
        self._last: dict[str, Any] = {}
        self._finished = False
        path = join(folder, METRICS_FILE)
        self._lines: _LocalLines | _RemoteLines = _RemoteLines(path) if is_remote(folder) else _LocalLines(path)

    def log_hyperparameters(self, hparams: Mapping[str, Any]) -> None:
        self._append(hparams=as_json(hparams))

    def log(self, metrics: Metrics, *, step: int | None, commit: bool | None = None) -> None:
        del commit
        record = as_json(metrics)
        self._last.update(record)
        self._append(step=step, metrics=record)

    def log_summary(self, metrics: Metrics) -> None:
        record = as_json(metrics)
        self._last.update(record)
        self._append(summary=record)

    def log_artifact(self, path: str, *, name: str | None = None, type: str | None = None) -> None:
        self._append(artifact={"path": path, "name": name, "type": type})

    def finish(self) -> None:
        if self._finished:
            return
        self._finished = True
        try:
            self._lines.close()
        finally:
            # Written even if the lines could not be: the last values are what evaluations are read by.
            with atomic_write(join(self.folder, RESULTS_FILE)) as file:
                file.write((json.dumps(self._last, indent=2, sort_keys=True) + "\n").encode())

    def _append(self, **record: object) -> None:
        line = json.dumps({"time": round(time.time(), 3), **record})
        self._lines.append(line.encode() + b"\n")


class _LocalLines:
    """An append-only file of lines; those that a full disk rejects wait, and the run continues."""

    def __init__(self, path: str):
        self._path = local_path(path)
        self._waiting = bytearray()
        self._warned = False
        with output_errors(path, "written"):
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            # O_APPEND: a resumed run continues behind the lines of the earlier one.
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            self._cut_half_line()

    def append(self, line: bytes) -> None:
        self._waiting += line
        try:
            self._write()
        except OSError as error:
            # A full disk is often cleared while a run continues; only a backlog
            # that threatens its memory ends it.
            if len(self._waiting) > MOST_WAITING:
                raise output_error(self._path, error) from error
            if not self._warned:
                logger.warning("%s; the run continues, and its metrics wait in memory", output_error(self._path, error))
            self._warned = True

    def close(self) -> None:
        try:
            with output_errors(self._path, "written"):
                self._write()
                # Once, at the end: after a crash of the process the kernel still has the
                # lines, only a power failure loses some.
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

    def _write(self) -> None:
        # One call to write(2): lines of an O_APPEND file do not tear if the process crashes.
        while self._waiting:
            del self._waiting[: os.write(self._descriptor, self._waiting)]

    def _cut_half_line(self) -> None:
        size = os.fstat(self._descriptor).st_size
        end, block = size, 1 << 16
        while end > 0:
            start = max(0, end - block)
            # Searches backwards in blocks for the last line break; everything behind it is a torn line.
            newline = os.pread(self._descriptor, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end != size:
            os.ftruncate(self._descriptor, end)


class _RemoteLines:
    """The same for a store that only has complete objects."""

    def __init__(self, path: str):
        self._path = path
        self._content = bytearray()
        if path_exists(path):
            with open_read(path) as file:
                content = file.read()
            # The same for an object: a half line at its end is dropped, and
            # with no line break at all everything is.
            self._content += content[: content.rfind(b"\n") + 1]
        self._written = time.monotonic()

    def append(self, line: bytes) -> None:
        self._content += line
        if time.monotonic() - self._written > REMOTE_INTERVAL:
            try:
                self._write()
            except OSError as error:
                # Stores fail temporarily; everything is in memory, and is written with the next lines.
                self._written = time.monotonic()
                logger.warning("%s; the run continues, and its metrics wait in memory", error)

    def close(self) -> None:
        self._write()

    def _write(self) -> None:
        with atomic_write(self._path) as file:
            file.write(bytes(self._content))
        self._written = time.monotonic()


@TrackerConfig.register_subclass("json_file")
@dataclass(frozen=True, kw_only=True)
class JsonFileTrackerConfig(TrackerConfig):
    """Tracks into the folder `output_path` (`tracker: {type: json_file, output_path: …}`)."""

    output_path: str = ""

    def init(self, run_id: str | None) -> Tracker:
        return JsonFileTracker(self._folder(run_id))

    def outputs(self, run_id: str | None) -> tuple[Output, ...]:
        return (Output(key="tracker.output_path", path=self._folder(run_id), kind="folder"),)

    def _folder(self, run_id: str | None) -> str:
        return self.output_path or join("logs", run_id or "run")
