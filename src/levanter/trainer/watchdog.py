"""The watchdog: records where a run hangs.

A step hangs if it takes ten times as long as the median of recent steps, and at least half a minute: a peer does not
answer, or a file system blocks. The watchdog then writes the stacks of all Python threads to a file in the run's log
folder, once per step. The run continues. Pauses (checkpoints, evaluations) do not count as steps, and the first steps
of a run, which compile, are not checked.

`trainer.progress_watchdog` sets absolute limits, which are off by default. If one is passed, the watchdog writes the
stacks and ends the process, because nothing else can: the main thread waits inside of a collective or a system call.
"""

import faulthandler
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median

from levanter.base.exit_codes import PEER_LOST
from levanter.trainer.config_blocks import ProgressWatchdogConfig
from levanter.trainer.report import StepReport

logger = logging.getLogger(__name__)

FACTOR = 10.0
LEAST_SECONDS = 30.0
HISTORY = 100
JUDGED_FROM = 3
"""Number of timed steps before a step can count as slow."""
DIAGNOSTIC_SECONDS = 30.0
"""Seconds that writing the stacks may take before the process ends without them."""


@dataclass(kw_only=True)
class Watchdog:
    """Watches the time since the last step: a context, a listener of the loop, and a context around pauses (`resting`).

    Attributes:
        file: where stacks are written.
        factor: multiple of the median that a step may take.
        least: seconds that any step may take.
        tick: seconds between two checks.
        clock: seconds, monotonic.
        limits: absolute limits that end the process.
        terminate: ends the process with an exit code.
        dumps: number of times that stacks were written.
    """

    file: Path
    factor: float = FACTOR
    least: float = LEAST_SECONDS
    tick: float = 1.0
    clock: Callable[[], float] = time.monotonic
    limits: ProgressWatchdogConfig = field(default_factory=ProgressWatchdogConfig)
    terminate: Callable[[int], object] = os._exit
    dumps: int = field(default=0, init=False)
    _times: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY), init=False)
    _since: float | None = field(default=None, init=False)
    _taken: int = field(default=0, init=False)
    _first: bool = field(default=True, init=False)
    _reported: bool = field(default=False, init=False)
    _entered: float = field(default=0.0, init=False)
    _first_ended: float | None = field(default=None, init=False)
    _progressed: float = field(default=0.0, init=False)
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
            self._since = self._progressed = self.clock()
            self._reported = False
            # The grace period begins once the first step, which compiles, has ended.
            if self._first_ended is None:
                self._first_ended = self._since

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Suspends the watchdog; afterwards the current step is timed from the start."""
        with self._lock:
            self._since, self._progressed = None, self.clock()
        try:
            yield
        finally:
            with self._lock:
                self._since = self._progressed = self.clock()
                self._reported = False

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

    def overdue(self) -> str | None:
        """The limit that the run has passed, as a message; None for none."""
        with self._lock:
            now, first_ended, step = self.clock(), self._first_ended, self._taken
            progressed, since = self._progressed, self._since
        limits = self.limits
        # Until a step has ended, only time tells whether the run compiles or hangs, so that has a limit of its own.
        if first_ended is None:
            return _passed("the first step has not ended", now - self._entered, "startup_timeout", limits)
        # As in upstream, the first steps may be slow: caches of compiled programs, of data and of the file system.
        if now - first_ended < limits.startup_grace_period.total_seconds():
            return None
        # None in a pause: an evaluation is no step, but it is progress only when it begins and ends.
        if since is not None and (message := _passed(f"step {step}", now - since, "step_timeout", limits)):
            return message
        return _passed(f"no progress since step {step}", now - progressed, "process_timeout", limits)

    def _end(self, what: str) -> None:
        logger.critical("%s; the process ends with exit code %d", what, PEER_LOST)
        # In a thread of its own: the file system may be what hangs, and then the process must end all the same.
        dump = threading.Thread(target=self._dump, args=(what,), name="step-watchdog-stacks", daemon=True)
        dump.start()
        limit = self.limits.diagnostic_timeout
        dump.join(DIAGNOSTIC_SECONDS if limit is None else limit.total_seconds())
        # `sys.exit` would end this thread alone, and handlers at exit would wait for the main thread.
        self.terminate(PEER_LOST)

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
        self._entered = self.clock()
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
            if (what := self.overdue()) is not None:
                self._end(what)
                return
            self.look()


def _passed(what: str, seconds: float, key: str, limits: ProgressWatchdogConfig) -> str | None:
    """A message if more seconds have passed than the limit of that key allows."""
    limit = getattr(limits, key)
    if limit is None or seconds < limit.total_seconds():
        return None
    return f"{what} after {seconds:.0f} s, and trainer.progress_watchdog.{key} is {limit.total_seconds():.0f} s"
