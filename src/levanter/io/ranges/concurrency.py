"""Limits the number of concurrent requests: `ConcurrencyLimit` admits them, `AdaptiveConcurrency` sets the limit,
`Durations` determines when a request counts as slow.

The best number of connections depends on the network and on the server, so the limit is measured: it doubles while the
bytes per second grow by `GAIN`, settles near the best value, and drops by `SLOWER` when the server refuses requests. An
interrupted range is admitted before ranges that have not begun: a reader waits for it, and the bytes that were read
after it occupy memory until then.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Generator

from levanter.io.ranges.request import GivenUpError

FIRST_REQUESTS = 32
WINDOW_SECONDS = 0.4
GAIN = 1.1
"""The factor by which doubling the connections must raise the rate, or the limit is lowered again."""
HEADROOM = 1.25
"""The limit over the number of connections with the best rate, so that the network is never idle."""
PROBE_SECONDS = 15.0
SLOWER = 0.6
"""The factor on the limit when a server is overloaded."""
LEAST_REQUESTS = 2
REFUSALS = 3.0
"""Refusals among the recent answers that are ignored; more of them mean that the server is overloaded."""
REMEMBERED = 64
"""The decay constant of the count of refusals, in answers."""
RECOVER_SECONDS = 2.0
"""Seconds without growth after an overload; doubled for every further overload soon after."""
LATENCY_BYTES = 512 << 10
"""The latency of a request in bytes of transfer, so that durations of small and large requests compare."""
SAMPLES = 256
FEWEST_SAMPLES = 16
SLOW_QUANTILE = 0.9
SLOW_FACTOR = 3.0
SLOW_SECONDS = 0.5
"""The least duration of a slow request."""
SILENT_SECONDS = 0.3
"""The least silence of a silent request."""
UNKNOWN_SLOW_SECONDS = 5.0
"""Both limits while there are fewer than `FEWEST_SAMPLES` samples."""


class AdaptiveConcurrency:
    """Adapts the number of concurrent requests to the rate that they reach.

    Attributes:
        limit: the number of requests that may run at once.
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
        """Records a successful request; `waiting` is true if other requests wait for a slot."""
        # Decays per answer, so that it measures the share of refusals among about `REMEMBERED` answers.
        self._refusals *= 1 - 1 / REMEMBERED
        if self._begin is None or not waiting:
            # A window in which the limit did not bind does not show whether a higher limit would help.
            self._begin, self._bytes, self._done = now, 0, 0
            return
        self._bytes += nbytes
        self._done += 1
        seconds = now - self._begin
        # Fewer answers than connections are too small a sample of the rate.
        if seconds < WINDOW_SECONDS or self._done < self.limit:
            return
        self._judge(self._bytes / seconds, now)
        self._begin, self._bytes, self._done = now, 0, 0

    def _judge(self, rate: float, now: float) -> None:
        best, best_limit = self._best
        if not self._rising:
            # The network may have become faster since, so the limit is tested again every `PROBE_SECONDS`.
            if now >= self._probe_at:
                self._rising, self._best = True, (rate, self.limit)
                # The current rate becomes the reference, so the search goes up only if the next doubling pays.
                self._grow(now)
        elif rate >= GAIN * best:
            self._best = rate, self.limit
            self._grow(now)
        else:
            # Doubling did not pay: return to the best number, with a margin.
            self.limit = min(self._most, max(1, round(best_limit * HEADROOM)))
            self._pause_search(now)

    def _grow(self, now: float) -> None:
        if self.limit == self._most:
            self._pause_search(now)
        self.limit = min(self._most, 2 * self.limit)

    def _pause_search(self, now: float, seconds: float = PROBE_SECONDS) -> None:
        self._rising, self._probe_at = False, now + seconds

    def overloaded(self, now: float) -> None:
        """Lowers the limit after a refusal for overload; refusals within one window count once."""
        if now - self._slowed_at < WINDOW_SECONDS:
            return
        # Busy servers refuse single requests; only a larger share means that there are too many connections.
        self._refusals += 1
        if self._refusals <= REFUSALS:
            return
        # An overload soon after the last one means that the limit rose too early, so wait twice as long.
        again = now - self._slowed_at < PROBE_SECONDS + self._recover
        self._recover = min(2 * self._recover, PROBE_SECONDS) if again else RECOVER_SECONDS
        self._refusals, self._slowed_at = 0.0, now
        self.limit = max(min(LEAST_REQUESTS, self._most), round(self.limit * SLOWER))
        # The earlier best rate was reached with more connections than the server accepts.
        self._best, self._begin = (0.0, self.limit), None
        self._pause_search(now, self._recover)


class Durations:
    """Records the durations of requests and derives from when on one is slow or silent."""

    def __init__(self) -> None:
        self._seconds_per_byte: deque[float] = deque(maxlen=SAMPLES)
        self._silences: deque[float] = deque(maxlen=SAMPLES)

    def add(self, seconds: float, nbytes: int, silence: float | None = None) -> None:
        """Records a request: its seconds, its bytes, and the longest time in which no byte arrived."""
        # Latency counts as bytes, so that one number per byte describes small and large requests alike.
        self._seconds_per_byte.append(seconds / (LATENCY_BYTES + nbytes))
        if silence is not None:
            self._silences.append(silence)

    def slow_seconds(self, nbytes: int) -> float:
        """The seconds after which a request of `nbytes` bytes counts as slow."""
        if len(self._seconds_per_byte) < FEWEST_SAMPLES:
            return UNKNOWN_SLOW_SECONDS
        return max(SLOW_SECONDS, SLOW_FACTOR * _usual(self._seconds_per_byte) * (LATENCY_BYTES + nbytes))

    @property
    def silent_seconds(self) -> float:
        """The seconds without a byte after which a request counts as silent."""
        if len(self._silences) < FEWEST_SAMPLES:
            return UNKNOWN_SLOW_SECONDS
        return max(SILENT_SECONDS, SLOW_FACTOR * _usual(self._silences))


def _usual(durations: deque[float]) -> float:
    # At most 256 samples, so sorting them each time is cheap.
    return sorted(durations)[int(SLOW_QUANTILE * len(durations))]


class ConcurrencyLimit:
    """Admits requests of one kind up to an adaptive limit; interrupted requests go first.

    Attributes:
        pace: sets the limit.
        under_way: the number of running requests.
        waiting: the number of requests that wait for a slot.
    """

    def __init__(self, most: int):
        self.pace = AdaptiveConcurrency(most)
        self.under_way = self.waiting = 0
        self._lock = threading.Lock()
        # Two conditions on one lock: `notify` on the first wakes only requests that were interrupted.
        self._next, self._others = threading.Condition(self._lock), threading.Condition(self._lock)
        self._ahead = 0

    @contextlib.contextmanager
    def slot(self, stop: threading.Event, *, again: bool) -> Generator[None]:
        """Occupies a slot for one request; `again` is true for a request that was interrupted before.

        Raises:
            GivenUpError: `stop` is set.
        """
        with self._lock:
            self._wait(stop, again=again)
            if stop.is_set():
                raise GivenUpError
            self.under_way += 1
            # A request that waited behind this one was not notified; if there are more free slots, wake it now.
            self._call()
        try:
            yield
        finally:
            with self._lock:
                self.under_way -= 1
                self._call()

    def stopped(self) -> None:
        """Wakes all waiting requests after their `stop` event was set."""
        with self._lock:
            self._next.notify_all()
            self._others.notify_all()

    def _wait(self, stop: threading.Event, *, again: bool) -> None:
        self.waiting += 1
        # Counts the interrupted requests that wait, because the loop below lets the others wait for them.
        self._ahead += again
        try:
            while not stop.is_set() and (self._free_slots <= 0 or (self._ahead and not again)):
                # Both conditions release the same lock, so the test of the loop is made under it again.
                (self._next if again else self._others).wait()
        finally:
            self.waiting -= 1
            self._ahead -= again

    @property
    def _free_slots(self) -> int:
        return self.pace.limit - self.under_way

    def _call(self) -> None:
        # While interrupted requests wait, waking others would be in vain: they would wait again.
        if self._free_slots > 0:
            (self._next if self._ahead else self._others).notify(self._free_slots)
