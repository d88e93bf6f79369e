"""`SaveWatch`: reports about a save while it runs, to find out why it is slow or takes too much memory.

It is meant for debugging one run, not for every run: tracing allocations slows Python down.
"""

import contextlib
import gc
import logging
import os
import sys
import threading
import time
import traceback
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)
_STATM = Path("/proc/self/statm")


@dataclass(frozen=True, kw_only=True)
class SaveWatch:
    """The settings of the reports about a save.

    Attributes:
        interval: seconds between two lines.
        stacks_after: seconds after which the stacks of all Python threads are logged, once a save; None for never.
        frames: frames recorded for each allocation; 0 traces no allocations.
        top: how many of the largest allocations since the save began are logged.
        collect: whether garbage is collected before a save.
        flush: whether logs are flushed behind each line.
    """

    interval: float
    stacks_after: float | None = None
    frames: int = 0
    top: int = 8
    collect: bool = True
    flush: bool = True

    def __post_init__(self) -> None:
        problems = [
            f"{name}: must be positive, got {value}"
            for name, value in (("interval", self.interval), ("stacks_after", self.stacks_after))
            if value is not None and value <= 0
        ]
        problems += [
            f"{name}: must not be negative, got {value}"
            for name, value in (("frames", self.frames), ("top", self.top))
            if value < 0
        ]
        if problems:
            raise ValueError("\n".join(problems))

    def begin(self, name: str) -> Callable[[], None]:
        """Reports on a save from now on; returns a function that ends the reports.

        Args:
            name: how lines call the save.
        """
        if self.collect:
            gc.collect()
        # Tracing that something else has started is used, and not stopped afterwards.
        following = self.frames > 0 and not tracemalloc.is_tracing()
        if following:
            tracemalloc.start(self.frames)
        before = tracemalloc.take_snapshot() if self.frames > 0 else None
        ended, began = threading.Event(), time.monotonic()

        def report() -> None:
            stacks_due = self.stacks_after
            while not ended.wait(self._pause(began, stacks_due)):
                passed = time.monotonic() - began
                if stacks_due is not None and passed >= stacks_due:
                    # Once a save: the stacks of a slow save change little, and fill the log.
                    stacks_due = None
                    self._say("%s: stacks after %.1f s:\n%s", name, passed, _stacks())
                else:
                    self._say("%s: running for %.1f s, %s", name, passed, _memory())

        thread = threading.Thread(target=report, name="checkpoint watch", daemon=True)
        thread.start()

        def end() -> None:
            ended.set()
            thread.join()
            self._say("%s: ended after %.2f s, %s", name, time.monotonic() - began, _memory())
            if before is not None:
                for line in tracemalloc.take_snapshot().compare_to(before, "lineno")[: self.top]:
                    self._say("%s: allocated %s", name, line)
            if following:
                tracemalloc.stop()

        return end

    def _pause(self, began: float, stacks_due: float | None) -> float:
        remaining = self.interval if stacks_due is None else stacks_due - (time.monotonic() - began)
        return max(0.0, min(self.interval, remaining))

    def _say(self, message: str, *values: object) -> None:
        log.info(message, *values)
        if self.flush:
            for handler in logging.getLogger().handlers:
                # A handler whose stream was closed raises here.
                with contextlib.suppress(ValueError):
                    handler.flush()


def _memory() -> str:
    if not _STATM.exists():
        return "resident memory is not known here"
    return f"{int(_STATM.read_text().split()[1]) * os.sysconf('SC_PAGESIZE') / 2**30:.2f} GiB resident"


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}"
        for number, frame in sys._current_frames().items()
    )
