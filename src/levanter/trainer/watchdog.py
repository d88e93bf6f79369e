"""The watchdog: records where a run hangs.

A step hangs if it takes ten times as long as the median of recent steps, and at least half a minute: a peer does not
answer, or a file system blocks. The watchdog then writes the stacks of all Python threads to a file in the run's log
folder, once per step. The run continues; the watchdog never ends it. Pauses (checkpoints, evaluations) do not count as
steps, and the first steps of a run, which compile, are not checked.
"""

import faulthandler
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median

from levanter.trainer.report import StepReport

logger = logging.getLogger(__name__)

FACTOR = 10.0
LEAST_SECONDS = 30.0
HISTORY = 100
JUDGED_FROM = 3
"""Number of timed steps before a step can count as slow."""


@dataclass(kw_only=True)
class Watchdog:
    """Watches the time since the last step: a context, a listener of the loop, and a context around pauses (`resting`).

    Attributes:
        file: where stacks are written.
        factor: multiple of the median that a step may take.
        least: seconds that any step may take.
        tick: seconds between two checks.
        clock: seconds, monotonic.
        dumps: number of times that stacks were written.
    """

    file: Path
    factor: float = FACTOR
    least: float = LEAST_SECONDS
    tick: float = 1.0
    clock: Callable[[], float] = time.monotonic
    dumps: int = field(default=0, init=False)
    _times: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY), init=False)
    _since: float | None = field(default=None, init=False)
    _taken: int = field(default=0, init=False)
    _first: bool = field(default=True, init=False)
    _reported: bool = field(default=False, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _stop: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def __call__(self, report: StepReport) -> None:
        """Records the end of a step."""
        with self._lock:
            # The first step compiles; its time would raise the median of the first steps.
            if not self._first:
                self._times.append(report.seconds)
            self._first, self._taken = False, report.taken
            self._since, self._reported = self.clock(), False

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Suspends the watchdog; afterwards the current step is timed from the start."""
        with self._lock:
            self._since = None
        try:
            yield
        finally:
            with self._lock:
                self._since, self._reported = self.clock(), False

    @property
    def limit(self) -> float | None:
        """Seconds that a step may take; None while too few steps have been timed."""
        if len(self._times) < JUDGED_FROM:
            return None
        return max(self.factor * median(self._times), self.least)

    def look(self) -> bool:
        """Writes the stacks once if the current step takes too long; returns whether it wrote them."""
        with self._lock:
            limit, since = self.limit, self._since
            if limit is None or since is None or self._reported:
                return False
            seconds = self.clock() - since
            if seconds <= limit:
                return False
            self._reported, usual, step = True, median(self._times), self._taken
        # Outside the lock: writing may block on the same file system that hangs, and the loop needs the lock.
        self._dump(f"step {step} has taken {seconds:.0f} s, and {usual:.2g} s is usual")
        return True

    def _dump(self, what: str) -> None:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a") as file:
                # faulthandler writes to the file descriptor, so the buffered heading must be flushed before.
                file.write(f"\n{datetime.now().isoformat(timespec='seconds')} {what}\n")
                file.flush()
                faulthandler.dump_traceback(file=file, all_threads=True)
        except OSError as error:
            logger.warning("%s; stacks could not be written to %s: %s", what, self.file, error)
            return
        self.dumps += 1
        logger.warning("%s; stack of every thread: %s", what, self.file)

    def __enter__(self) -> "Watchdog":
        # A thread: while the main thread hangs in a collective, only another thread can run. As a daemon it does not
        # keep the process alive.
        self._thread = threading.Thread(target=self._watch, name="step-watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self.tick):
            self.look()
