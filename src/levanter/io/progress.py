"""Progress of a whole job: done, total, rate and time left, from the first second to the last.

One `Progress` counts one kind of unit (bytes, tokens, rows) over everything there is to do, never per file. On a
terminal it is one bar; elsewhere a line in the log at once, then every ten seconds while it moves, and a last one with
the average rate. A job that makes no progress says so after ten seconds, then after twice as long each time. `Meter`
does the arithmetic and needs only a clock.
"""

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO

logger = logging.getLogger(__name__)

RATE_WINDOW = 30.0
"""Seconds over which the current rate is averaged."""


@dataclass
class Meter:
    """Counts, and knows rate and time left.

    Attributes:
        total: how many units there are in the whole job; None if unknown.
        unit: their name in the plural; `bytes` are shown with binary prefixes.
        clock: seconds, monotonic.
    """

    total: float | None
    unit: str
    clock: Callable[[], float] = time.monotonic
    done: float = 0.0
    started: float = field(init=False)
    _samples: deque[tuple[float, float]] = field(init=False, default_factory=deque)

    def __post_init__(self) -> None:
        self.started = self.clock()
        self._samples.append((self.started, self.done))

    def advance_to(self, done: float) -> None:
        """Sets how many units are done so far; a smaller number than before is ignored."""
        self.done = max(self.done, done)
        now = self.clock()
        # At most one sample a tenth of a second, so that a tight loop does not fill the window.
        if now - self._samples[-1][0] >= 0.1:
            self._samples.append((now, self.done))
        while len(self._samples) > 2 and now - self._samples[1][0] >= RATE_WINDOW:
            # Keeps one sample that is older than the window, so that the rate spans at least `RATE_WINDOW` once there
            # is that much history.
            self._samples.popleft()

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return self.clock() - self.started

    @property
    def average_rate(self) -> float:
        """Units per second since the start."""
        return self.done / self.elapsed if self.elapsed > 0 else 0.0

    @property
    def rate(self) -> float:
        """Units per second over the last `RATE_WINDOW` seconds."""
        # Up to now rather than to the last sample: while nothing arrives, the rate falls.
        then, done = self._samples[0]
        seconds = self.clock() - then
        return (self.done - done) / seconds if seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the end at the current rate; None while that is not known."""
        if self.total is None:
            return None
        if self.done >= self.total:
            return 0.0
        # Units arrive in steps (batches). From step to step the rate of a steady job is constant; the rate up to now
        # falls until the next step arrives, and the time left would rise and fall with it.
        (then, done), (last, _) = self._samples[0], self._samples[-1]
        waited, usual = self.clock() - last, (last - then) / max(len(self._samples) - 1, 1)
        if self.done > done and waited <= 2 * usual:
            return max((self.total - self.done) * (last - then) / (self.done - done) - waited, 0.0)
        rate = self.rate
        return (self.total - self.done) / rate if rate > 0 else None

    def describe(self) -> str:
        """For instance `1.2 / 2.4 GiB, 50 %, 0.4 GiB/s, 0:03 left`."""
        fields = [self.counts()]
        if self.total:
            # Rounded down: 100 % means done.
            fields.append(f"{int(100 * self.done / self.total)} %")
        fields.append(f"{amount(self.rate, self.unit)}/s")
        seconds_left = self.seconds_left
        fields.append("time left unknown" if seconds_left is None else f"{duration(seconds_left)} left")
        return ", ".join(fields)

    def summary(self) -> str:
        """For instance `2.4 GiB in 0:06, 0.4 GiB/s`."""
        return f"{self.counts()} in {duration(self.elapsed)}, {amount(self.average_rate, self.unit)}/s"

    def counts(self) -> str:
        """For instance `1.2 GiB / 2.4 GiB`."""
        if self.total is None or self.done >= self.total:
            return amount(self.done, self.unit)
        return f"{amount(self.done, self.unit)} / {amount(self.total, self.unit)}"


class Progress:
    """Shows the progress of a job; a context manager.

    `advance` and `advance_to` may be called from any thread and at any rate.

    Args:
        description: the name of the job (`loading`, `evaluating`).
        total: how many units there are over the whole job; None if unknown.
        unit: their name in the plural (`bytes`, `tokens`).
        show: whether this process shows anything (one process of a job does).
        interval: seconds between lines in the log.
        lazy: whether to show nothing before the first unit; a job without units then shows nothing at all.
        stream: the stream of the bar; standard error if absent.
        bar: whether to draw a bar; if absent, whether the stream is a terminal.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        description: str,
        *,
        total: float | None,
        unit: str,
        show: bool = True,
        interval: float = 10.0,
        lazy: bool = False,
        stream: IO[str] | None = None,
        bar: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.description = description
        self.meter = Meter(total=total, unit=unit, clock=clock)
        self._note = ""
        self._show = show
        self._interval = interval
        self._lazy = lazy
        self._clock = clock
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        target: IO[str] = sys.stderr if stream is None else stream
        self._bar = _Bar(description, target) if show and (target.isatty() if bar is None else bar) else None
        self._last_line = -float("inf")
        self._last_state: tuple[str, str] | None = None
        self._quiet = interval

    def __enter__(self) -> "Progress":
        if not self._lazy:
            self._begin()
        return self

    def _begin(self) -> None:
        if not self._show:
            return
        if self._bar is not None:
            self._bar.start()
        self.tick()
        self._thread = threading.Thread(target=self._beat, name=f"progress-{self.description}", daemon=True)
        self._thread.start()

    def __exit__(self, kind: object, *_: object) -> None:
        self._stop.set()
        if self._thread is None:
            return
        # Wait for the thread before the last line, so that it cannot draw over it.
        self._thread.join()
        if self._bar is not None:
            self._bar.show(self.meter, self._note)
            self._bar.stop()
        if kind is None:
            logger.info("%s: done, %s", self.description, self.meter.summary())
        else:
            logger.info("%s: stopped at %s", self.description, self.meter.counts())

    def advance(self, amount: float, *, note: str | None = None) -> None:
        """Counts `amount` more units. `note` names the item that is being processed."""
        # Outside the lock, which `tick` takes as well.
        self._begin_once()
        with self._lock:
            self._update(self.meter.done + amount, note)

    def advance_to(self, done: float, *, note: str | None = None) -> None:
        """Sets the units done so far, over the whole job."""
        self._begin_once()
        with self._lock:
            self._update(done, note)

    def _begin_once(self) -> None:
        with self._lock:
            # Swapped under the lock, so that of several threads only one starts the bar.
            lazy, self._lazy = self._lazy, False
        if lazy:
            self._begin()

    def tick(self) -> None:
        """Draws the bar, or writes a line to the log if the interval has passed."""
        with self._lock:
            if self._bar is not None:
                self._bar.show(self.meter, self._note)
                return
            now, state = self._clock(), (self.meter.counts(), self._note)
            if state != self._last_state:
                self._quiet = self._interval
            if now - self._last_line < self._quiet:
                return
            # The same line again tells that the job has not ended; it need not tell it every ten seconds.
            self._quiet = 2 * self._quiet if state == self._last_state else self._interval
            self._last_line, self._last_state = now, state
            note = f" ({self._note})" if self._note else ""
            logger.info("%s: %s%s", self.description, self.meter.describe(), note)

    def _update(self, done: float, note: str | None) -> None:
        self.meter.advance_to(done)
        if note is not None:
            self._note = note

    def _beat(self) -> None:
        # A bar is redrawn five times a second. The log is looked at every second, so that a line is at most that late.
        while not self._stop.wait(0.2 if self._bar is not None else min(1.0, self._interval)):
            self.tick()


class _Bar:
    """One line on a terminal."""

    def __init__(self, description: str, stream: IO[str]):
        # Only terminals have bars; the runs of a pod log lines.
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[status]}"),
            TextColumn("[dim]{task.fields[note]}"),
        )
        # Without rich's own refresh thread: `Progress` has one, and two would draw at the same time.
        self._progress = RichProgress(*columns, console=Console(file=stream), auto_refresh=False)
        self._task = self._progress.add_task(description, total=None, status="", note="")

    def start(self) -> None:
        self._progress.start()

    def show(self, meter: Meter, note: str) -> None:
        self._progress.update(
            self._task, completed=meter.done, total=meter.total, status=meter.describe(), note=note, refresh=True
        )

    def stop(self) -> None:
        self._progress.stop()


def amount(count: float, unit: str) -> str:
    """A count with its unit: `2.36 GiB` for bytes, `12,345 tokens` or `1.23M tokens` for others."""
    if unit == "bytes":
        for prefix, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if count >= size:
                return f"{count / size:.2f} {prefix}"
        return f"{count:.0f} B"
    for suffix, size in (("G", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:.2f}{suffix} {unit}"
    return f"{count:,.0f} {unit}" if count >= 10 or count == int(count) else f"{count:.1f} {unit}"


def duration(seconds: float) -> str:
    """Seconds as `0:07`, `12:30` or `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
