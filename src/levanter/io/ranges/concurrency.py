"""How many requests run at once: `ConcurrencyLimit` admits them, `AdaptiveConcurrency` sets the limit, `Durations`
says from when on a request is slow.

The best number of connections depends on the network and on the server, so the limit is measured: it doubles while the
bytes per second grow by `GAIN`, settles near the best value, and drops by `SLOWER` when the server refuses requests.
A range that began and broke off is admitted before ranges that have not begun: a reader waits for it, and the bytes
that were read behind it occupy memory until then.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Generator

from levanter.io.ranges.request import GivenUpError

FIRST_REQUESTS = 32
WINDOW_SECONDS = 0.4
GAIN = 1.1
"""What doubling the connections must bring, at least, to be kept."""
HEADROOM = 1.25
"""Connections beyond those that brought the most, so that the way there is never idle."""
PROBE_SECONDS = 15.0
SLOWER = 0.6
"""What is left of the connections when a server is overloaded."""
LEAST_REQUESTS = 2
REFUSALS = 3.0
"""Refusals among the last answers that say nothing; more of them are a server that is overloaded."""
REMEMBERED = 64
"""Answers after which a refusal is forgotten, about."""
RECOVER_SECONDS = 2.0
"""After which more connections are tried again; twice as long each time that it was too early."""
LATENCY_BYTES = 512 << 10
"""What a request costs before its first byte, as bytes: durations of small and large ones are compared by it."""
SAMPLES = 256
FEWEST_SAMPLES = 16
SLOW_QUANTILE = 0.9
SLOW_FACTOR = 3.0
SLOW_SECONDS = 0.5
"""No request is called slow before."""
SILENT_SECONDS = 0.3
"""No request is called silent before."""
UNKNOWN_SLOW_SECONDS = 5.0
"""When nothing is known yet."""


class AdaptiveConcurrency:
    """The number of requests side by side, from what they brought.

    Attributes:
        limit: requests that may be under way.
    """

    def __init__(self, most: int, *, first: int = FIRST_REQUESTS):
        self.limit = max(1, min(first, most))
        self._most = max(1, most)
        self._rising = True
        self._best = (0.0, self.limit)
        self._begin: float | None = None
        self._bytes = 0
        self._done = 0
        self._probe_at = 0.0
        self._refusals = 0.0
        self._slowed_at = float("-inf")
        self._recover = RECOVER_SECONDS

    def finished(self, nbytes: int, now: float, *, waiting: bool) -> None:
        """A request was answered; `waiting` says whether others wait for room."""
        self._refusals *= 1 - 1 / REMEMBERED
        if self._begin is None or not waiting:
            # A window in which fewer were wanted than allowed says nothing about more of them.
            self._begin, self._bytes, self._done = now, 0, 0
            return
        self._bytes += nbytes
        self._done += 1
        seconds = now - self._begin
        if seconds < WINDOW_SECONDS or self._done < self.limit:
            return
        self._judge(self._bytes / seconds, now)
        self._begin, self._bytes, self._done = now, 0, 0

    def _judge(self, rate: float, now: float) -> None:
        best, at = self._best
        if not self._rising:
            if now >= self._probe_at:
                self._rising, self._best = True, (rate, self.limit)
                self._grow(now)
        elif rate >= GAIN * best:
            self._best = rate, self.limit
            self._grow(now)
        else:
            self.limit = min(self._most, max(1, round(at * HEADROOM)))
            self._rest(now)

    def _grow(self, now: float) -> None:
        if self.limit == self._most:
            self._rest(now)
        self.limit = min(self._most, 2 * self.limit)

    def _rest(self, now: float, seconds: float = PROBE_SECONDS) -> None:
        self._rising, self._probe_at = False, now + seconds

    def overloaded(self, now: float) -> None:
        """The server asked for fewer requests; those that were under way together slow this down once."""
        if now - self._slowed_at < WINDOW_SECONDS:
            return
        self._refusals += 1
        if self._refusals <= REFUSALS:
            return
        again = now - self._slowed_at < PROBE_SECONDS + self._recover
        self._recover = min(2 * self._recover, PROBE_SECONDS) if again else RECOVER_SECONDS
        self._refusals, self._slowed_at = 0.0, now
        self.limit = max(min(LEAST_REQUESTS, self._most), round(self.limit * SLOWER))
        self._best, self._begin = (0.0, self.limit), None
        self._rest(now, self._recover)


class Durations:
    """How long requests take, and from when on one is slow."""

    def __init__(self) -> None:
        self._seconds_per_byte: deque[float] = deque(maxlen=SAMPLES)
        self._silences: deque[float] = deque(maxlen=SAMPLES)

    def add(self, seconds: float, nbytes: int, silence: float | None = None) -> None:
        """A request of so many bytes took so long; for at most `silence` seconds nothing of it arrived."""
        self._seconds_per_byte.append(seconds / (LATENCY_BYTES + nbytes))
        if silence is not None:
            self._silences.append(silence)

    def slow_seconds(self, nbytes: int) -> float:
        """From when on a request of so many bytes is slow."""
        if len(self._seconds_per_byte) < FEWEST_SAMPLES:
            return UNKNOWN_SLOW_SECONDS
        return max(SLOW_SECONDS, SLOW_FACTOR * _usual(self._seconds_per_byte) * (LATENCY_BYTES + nbytes))

    @property
    def silent_seconds(self) -> float:
        """From when on a request of which nothing arrives is silent."""
        if len(self._silences) < FEWEST_SAMPLES:
            return UNKNOWN_SLOW_SECONDS
        return max(SILENT_SECONDS, SLOW_FACTOR * _usual(self._silences))


def _usual(durations: deque[float]) -> float:
    return sorted(durations)[int(SLOW_QUANTILE * len(durations))]


class ConcurrencyLimit:
    """How many requests of one kind are under way, may be, and wait for room.

    Attributes:
        pace: says how many may be.
        under_way: that are.
        waiting: that wait for room.
    """

    def __init__(self, most: int):
        self.pace = AdaptiveConcurrency(most)
        self.under_way = self.waiting = 0
        self._lock = threading.Lock()
        self._next, self._others = threading.Condition(self._lock), threading.Condition(self._lock)
        self._ahead = 0

    @contextlib.contextmanager
    def slot(self, stop: threading.Event, *, again: bool) -> Generator[None]:
        """Room for one more request; `again` for one that was under way before.

        Raises:
            GivenUpError: everything was stopped.
        """
        with self._lock:
            self._wait(stop, again=again)
            if stop.is_set():
                raise GivenUpError
            self.under_way += 1
            self._call()  # where there is more room, whoever gave way to this one has not been told
        try:
            yield
        finally:
            with self._lock:
                self.under_way -= 1
                self._call()

    def stopped(self) -> None:
        """Tells everybody who waits that everything was stopped."""
        with self._lock:
            self._next.notify_all()
            self._others.notify_all()

    def _wait(self, stop: threading.Event, *, again: bool) -> None:
        self.waiting += 1
        self._ahead += again
        try:
            while not stop.is_set() and (self._free_slots <= 0 or (self._ahead and not again)):
                (self._next if again else self._others).wait()
        finally:
            self.waiting -= 1
            self._ahead -= again

    @property
    def _free_slots(self) -> int:
        return self.pace.limit - self.under_way

    def _call(self) -> None:
        if self._free_slots > 0:
            (self._next if self._ahead else self._others).notify(self._free_slots)
