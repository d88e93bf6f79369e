"""Threads that write a checkpoint give way to those that compute.

TensorStore writes with threads of its own, as many as it has cores. Where the training step runs on the same cores,
they take turns with it, and every step that meets a save is longer by what the save takes. At a lower priority they
take what the step leaves: all of a core that is idle, a tenth of one that is not. Python's threads stay as they are,
because whoever waits for the interpreter's lock would wait with them.

Linux alone gives threads priorities of their own; elsewhere nothing is done.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

NICER = 10
"""The nice increment: the kernel then gives a thread a ninth of its former weight."""
_WORKERS = "ts_pool_worker"
_TASKS = Path("/proc/self/task")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.25


@contextlib.contextmanager
def giving_way(*, by: int = NICER) -> Iterator[None]:
    """Keeps TensorStore's threads at a lower priority while the block runs, those that begin in it included.

    Behind it they have their priority back where the process may raise it (root, or a limit on `nice`); where not, the
    few that live on read the next batches at the lower one.
    """
    if by <= 0 or sys.platform != "linux" or not _TASKS.is_dir():
        yield
        return
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    ended = threading.Event()

    def keep() -> None:
        pause = _FIRST_PAUSE
        while not ended.wait(pause):
            _set(usual + by)
            pause = min(2 * pause, _LONGEST_PAUSE)

    _set(usual + by)
    thread = threading.Thread(target=keep, name="checkpoint priority", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        _set(usual)


def _set(priority: int) -> None:
    """Gives TensorStore's threads this priority. Threads come and go meanwhile."""
    for task in _TASKS.iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if (task / "comm").read_text().strip() == _WORKERS:
                os.setpriority(os.PRIO_PROCESS, int(task.name), min(priority, 19))
