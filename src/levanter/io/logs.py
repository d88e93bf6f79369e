"""Logs: one handler on the root logger, set up by the entry point and by nobody else."""

import logging
import sys
from typing import IO

from levanter.io.stdout import printable

HANDLER_NAME = "levanter"
QUIET = ("fsspec", "urllib3", "httpx", "httpcore", "filelock", "h5py", "jax._src", "absl")
"""Libraries whose INFO records are of no use to the user of a run; their warnings are shown."""


class _Formatter(logging.Formatter):
    """Shows control characters of a message: it may have names from files."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _StderrHandler(logging.StreamHandler):
    """Writes to what standard error is at the time, so that lines appear above a progress bar."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> IO[str]:
        return sys.stderr

    @stream.setter
    def stream(self, value: object) -> None:
        # `StreamHandler.setStream` assigns here; the stream is always the current `sys.stderr`.
        del value


def setup_logging(level: int | str = logging.INFO, *, process_index: int = 0, process_count: int = 1) -> None:
    """Sends log records to standard error: everything from process 0, warnings from the others.

    Calling it again replaces the handler of the previous call. Handlers of others stay as they are.

    Args:
        level: the lowest level that is shown.
        process_index: the index of this process in the job.
        process_count: the number of processes; with more than one, each line names its process.
    """
    root = logging.getLogger()
    # Only our own handler, by its name: pytest, absl and notebooks have handlers of theirs on the root logger.
    for handler in list(root.handlers):
        if handler.get_name() == HANDLER_NAME:
            root.removeHandler(handler)
            handler.close()
    handler = _StderrHandler()
    handler.set_name(HANDLER_NAME)
    label = f" [{process_index}]" if process_count > 1 else ""
    handler.setFormatter(_Formatter(f"%(asctime)s{label} %(levelname).1s %(name)s: %(message)s", "%H:%M:%S"))
    handler.setLevel(level if process_index == 0 else max(logging.WARNING, _number(level)))
    root.addHandler(handler)
    # The root level is the lower bound for every handler; process 1 and up filter in the handler, so that handlers of
    # others still see the records.
    root.setLevel(level)
    for name in QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, _number(level)))


def _number(level: int | str) -> int:
    return level if isinstance(level, int) else logging.getLevelNamesMapping()[level.upper()]
