"""`RangeFetcher`: reads ranges of remote files into the caller's memory, with retries, hedging and many at once.

A range is requested again after a failure that may pass, first at once and then with growing, randomized delays. When a
request becomes slow or silent, a second one (a *hedge*) starts while the first continues; the first to finish wins and
the other is cancelled. Both retries and hedges request only the bytes that have not arrived.

`ConcurrencyLimit` sets the number of concurrent requests. Small requests spend their time waiting for the first byte
and say nothing about bandwidth, so they have a limit of their own; an interrupted range does not queue again. The
caller's threads run the requests, so the callers and their buffers bound what is in flight.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from levanter.io.ranges.concurrency import ConcurrencyLimit, Durations
from levanter.io.ranges.hedging import HedgedRequest
from levanter.io.ranges.request import (
    Attempt,
    GivenUpError,
    RangeError,
    RangeSource,
    ReplacedError,
    TransientError,
)

MOST_REQUESTS = 128
PART_BYTES = 4 << 20
"""The size of one request: at 30 ms latency and 20 MB/s, seven eighths of its time are transfer."""
SMALL_BYTES = 256 << 10
"""The largest size of a small request, most of whose time is latency."""
DELAYS = (0.05, 0.5, 1.8, 5.0, 12.0, 25.0)
"""Seconds before a range is requested again, each randomized by half of it."""
REFUSED_DELAY = 0.2
"""The least delay after a refusal for overload."""
ANEW_BYTES = 256 << 10
"""Bytes of progress after which a failure starts the delays anew, so that a long range arrives over a connection that
breaks often."""
QUICK_DELAYS = (0.2, 0.8, 2.4)
"""The delays of the first request of a run: a location that does not exist should be reported soon."""
LONGEST_WAIT = 60.0
"""The longest `Retry-After` in seconds that is honoured."""
HEDGES = 4
"""The most second requests at once."""
SECOND_SECONDS = 1.0
"""The least silence after which a second request is cancelled."""
HEDGED_SHARE = 0.015
"""The share of all bytes that may be received twice, beyond `HEDGES * PART_BYTES`."""
LOOK_SECONDS = 0.05
IDLE_SECONDS = 2.0

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class FetchStats:
    """Counters of a fetcher.

    Attributes:
        ranges: ranges that arrived.
        wanted_bytes: the bytes of these ranges.
        extra_bytes: bytes received twice, by requests that failed or were overtaken.
        retried: requests after a failure.
        hedged: second requests for slow ranges.
        hedges_won: second requests that finished first.
        requests: the current limit on concurrent requests.
    """

    ranges: int
    wanted_bytes: int
    extra_bytes: int
    retried: int
    hedged: int
    hedges_won: int
    requests: int

    def __str__(self) -> str:
        fields = [f"{self.requests} connections"]
        if self.retried:
            fields.append(f"{self.retried} retried")
        if self.hedged:
            fields.append(f"{self.hedged} hedged")
        if self.extra_bytes:
            fields.append(f"{self.extra_bytes / 2**20:,.1f} MiB extra")
        return ", ".join(fields)


class RangeFetcher:
    """Reads ranges of files that share a network.

    Each checkpoint has its own fetcher. Its methods may be called from any thread.
    """

    def __init__(
        self,
        *,
        most: int = MOST_REQUESTS,
        delays: tuple[float, ...] = DELAYS,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._delays, self._clock = delays, clock
        self._durations = Durations()
        self._most = most
        self._lock = threading.Lock()
        self._small, self._large = ConcurrencyLimit(most), ConcurrencyLimit(most)
        self._races: set[HedgedRequest] = set()
        self._watching = False
        self._stop = threading.Event()
        self._counts: Counter[str] = Counter()

    @property
    def reads_at_once(self) -> int:
        """The most concurrent requests that are useful."""
        return self._most

    @property
    def read_bytes(self) -> int:
        """The useful size of one request, in bytes."""
        return PART_BYTES

    @property
    def hedge_bytes(self) -> int:
        """The most memory of second requests, where no range is larger than `read_bytes`."""
        return HEDGES * PART_BYTES

    @property
    def tally(self) -> FetchStats:
        """The counters so far."""
        names = ("ranges", "wanted_bytes", "extra_bytes", "retried", "hedged", "hedges_won")
        with self._lock:
            counts = {name: self._counts[name] for name in names}
        return FetchStats(**counts, requests=self._large.pace.limit)

    def __str__(self) -> str:
        return str(self.tally)

    def interrupt(self) -> None:
        """Cancels all requests, running and future, until `resume`; their callers get a `RangeError`."""
        with self._lock:
            self._stop.set()
            requests = [attempt for race in self._races for attempt in (race.first, race.second) if attempt is not None]
        # Outside the lock: the cancelled threads take it to record their end.
        for request in requests:
            request.attempt.give_up()
        # Wakes the requests that wait for a slot; they see that `stop` is set.
        for lane in (self._small, self._large):
            lane.stopped()

    def resume(self) -> None:
        """Ends an interrupt."""
        with self._lock:
            if self._stop.is_set():
                # A new event rather than `clear`: requests of before the interrupt hold the old one and still end.
                self._stop = threading.Event()

    def ask(self, action: Callable[[], R], *, what: str, delays: Iterable[float] = QUICK_DELAYS) -> R:
        """Calls `action`, and again after each of `delays` seconds while it raises `TransientError`.

        Raises:
            RangeError: the last try failed; the message has the number of tries and the reasons.
        """
        # `reasons` counts each cause, because the last failure is often not the one that explains the others.
        remaining_delays, reasons, began = list(delays), Counter[str](), self._clock()
        while True:
            try:
                return action()
            except TransientError as error:
                reasons[error.reason] += 1
                if not remaining_delays or self._stop.is_set():
                    raise _failed(what, reasons, self._clock() - began) from error
                self._stop.wait(_scattered(remaining_delays.pop(0), error))

    def fetch_all(self, file: RangeSource, ranges: Iterable[tuple[int, memoryview]]) -> None:
        """Fills several ranges of a file concurrently.

        Raises:
            RangeError: one of them cannot be read.
        """
        range_list = list(ranges)
        if len(range_list) == 1:
            self.fetch(file, *range_list[0])
            return
        # Waiting in order is enough: all run at once, and the first failure in this order is the one that is raised.
        for future in [self._pool.submit(self.fetch, file, *part) for part in range_list]:
            future.result()

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._most, thread_name_prefix="ranges")

    @cached_property
    def _hedging(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(HEDGES, thread_name_prefix="hedges")

    def fetch(self, file: RangeSource, start: int, *into: memoryview) -> None:
        """Fills memory, piece after piece, with the bytes of `file` from `start` on, by one request.

        Raises:
            ReplacedError: the file is another one than when it was opened.
            RangeError: they cannot be read, or everything was interrupted.
        """
        race = HedgedRequest(file, start, into)
        with self._lock:
            self._races.add(race)
            # The event of now: a `resume` between two tries must not revive this range.
            stop = self._stop
        try:
            self._run(race, stop)
        finally:
            with self._lock:
                # Under the lock, so that a second request which finishes now finds `over` and drops its bytes.
                race.over = True
                self._races.discard(race)
                second = race.second
            if second is not None:
                second.attempt.give_up()
        self._count(ranges=1, wanted_bytes=race.nbytes)

    def _run(self, race: HedgedRequest, stop: threading.Event) -> None:
        what = f"{race.file.name}: bytes {race.start:,} to {race.start + race.nbytes:,}"
        remaining_delays, reasons, began = list(self._delays), Counter[str](), self._clock()
        again = False
        while True:
            # `kept` grows by what this try writes, even if it fails.
            before = race.kept
            try:
                self._once(race, stop, again=again)
            except GivenUpError:
                # The first request was cancelled: by the second one, which won or met a replaced file, or by
                # `interrupt`.
                if race.replaced is not None:
                    raise race.replaced from None
                if race.won is None:
                    raise RangeError(f"{what}: reading was interrupted") from None
            except TransientError as error:
                reasons[error.reason] += 1
                # Progress: the connection works, so the delays begin anew.
                if race.kept - before >= ANEW_BYTES:
                    remaining_delays = list(self._delays)
                if race.won is None and race.missing and not remaining_delays:
                    raise _failed(what, reasons, self._clock() - began, arrived=race.kept) from error
                if race.won is None and race.missing:
                    self._pause(race, _scattered(remaining_delays.pop(0), error), stop)
                if race.won is None and race.missing and race.replaced is None:
                    self._count(retried=1)
                    again = True
                    continue
            if race.replaced is not None:
                raise race.replaced
            if race.won is not None:
                race.take()
            return

    def _pause(self, race: HedgedRequest, seconds: float, stop: threading.Event) -> None:
        """Waits, or returns as soon as a second request has finished."""
        until = self._clock() + seconds
        while (remaining := until - self._clock()) > 0 and race.won is None and not stop.is_set():
            race.changed.wait(min(remaining, LOOK_SECONDS))

    def _once(self, race: HedgedRequest, stop: threading.Event, *, again: bool) -> None:
        attempt, pieces = Attempt(), race.rest
        # A try continues where the earlier ones stopped, so nothing that arrived is requested again.
        start, size = race.start + race.kept, sum(map(len, pieces))
        lane = self._small if size <= SMALL_BYTES else self._large
        with lane.slot(stop, again=again):
            with self._lock:
                # A second request may have finished while this one waited for its slot.
                if race.won is not None or stop.is_set():
                    raise GivenUpError
                race.begin(attempt, self._clock())
            self._watch()
            done = False
            try:
                race.file.fetch(start, pieces, attempt)
                done = True
            except TransientError as error:
                if error.overloaded:
                    # Only the limit of this size class: the other one may have no answers by which a refusal decays.
                    with self._lock:
                        lane.pace.overloaded(self._clock())
                raise
            finally:
                now = self._clock()
                with self._lock:
                    # Under the lock, so that the watcher thread never sees a request that is both ended and `first`.
                    ended = race.end(now)
                    if done:
                        self._durations.add(now - ended.began, size, ended.silence if attempt.streams else None)
                        lane.pace.finished(size, now, waiting=lane.waiting > 0)
                    if race.won is not None:
                        self._decide(race, done=done)

    def _decide(self, race: HedgedRequest, *, done: bool) -> None:
        """Counts the bytes that both requests received; drops those of the second if the first is complete."""
        assert race.won is not None, "the second request has finished"
        offset, content = race.won
        if done:
            race.won = None
            # The counter was raised when the second request finished; the first one has everything, so take that back.
            self._counts.update(hedges_won=-1, extra_bytes=len(content))
        # Both requests received the bytes from `at` to `kept`.
        else:
            self._counts.update(extra_bytes=race.kept - offset)

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def _watch(self) -> None:
        """Starts the thread that looks for slow requests, unless it runs."""
        with self._lock:
            if self._watching:
                return
            self._watching = True
        threading.Thread(target=self._look, name="slow-ranges", daemon=True).start()

    def _look(self) -> None:
        idle_since = self._clock()
        while True:
            time.sleep(LOOK_SECONDS)
            now = self._clock()
            with self._lock:
                races = [race for race in self._races if race.first is not None]
                if races:
                    idle_since = now
                # The thread ends when nothing runs, so that an idle process has no thread that wakes 20 times a
                # second.
                elif now - idle_since > IDLE_SECONDS:
                    self._watching = False
                    return
                silent = self._durations.silent_seconds
                slow = [race for race in races if self._is_slow(race, now, silent)]
                stuck = [race.second for race in self._races if self._is_lost(race, now, silent)]
                hedged = sum(race.second is not None for race in self._races)
                chosen: list[tuple[HedgedRequest, int, Attempt]] = []
                # At most `HEDGES` run at once; the oldest slow requests get them first.
                for race in sorted(slow, key=_began)[: max(0, HEDGES - hedged)]:
                    if race.missing and self._may_hedge(race):
                        chosen.append((race, race.arrived, race.begin_second(now).attempt))
                        self._counts.update(hedged=1)
            for second in stuck:
                if second is not None:
                    second.attempt.give_up()
            for race, offset, attempt in chosen:
                self._hedging.submit(self._second, race, offset, attempt)

    def _is_slow(self, race: HedgedRequest, now: float, silent: float) -> bool:
        assert race.first is not None, "under way"
        # Sampled on every round, also for requests that cannot be hedged: their silences feed `Durations`.
        silence = race.first.look(now)
        if race.second is not None or not race.file.can_be_cut_short:
            return False
        seconds = now - race.first.began
        # A library that delivers all bytes at the end is always silent, so only its total time counts.
        return (race.first.attempt.streams and silence > silent) or seconds > self._durations.slow_seconds(race.nbytes)

    def _is_lost(self, race: HedgedRequest, now: float, silent: float) -> bool:
        """Whether the second request is stuck too, so that another one replaces it.

        Each second request gets twice the time of the one before, so that a server which answers nobody, or everybody
        slowly, receives few of them.
        """
        second = race.second
        if second is None:
            return False
        silence, seconds = second.look(now), now - second.began
        limit = silent if second.attempt.streams else self._durations.slow_seconds(race.nbytes)
        waited = silence if second.attempt.streams else seconds
        return waited > max(SECOND_SECONDS, limit) * 2 ** (race.second_requests - 1)

    def _may_hedge(self, race: HedgedRequest) -> bool:
        """Whether the bytes received twice stay within their share, even if every hedged range arrives twice."""
        allowed = HEDGES * PART_BYTES + HEDGED_SHARE * self._counts["wanted_bytes"]
        # Bytes that running second requests may still duplicate, in the worst case.
        at_stake = sum(other.missing for other in self._races if other.second is not None)
        return self._counts["extra_bytes"] + at_stake + race.missing <= allowed

    def _second(self, race: HedgedRequest, offset: int, attempt: Attempt) -> None:
        """Runs the second request of a slow range, for the bytes from `offset` on."""
        buffer = bytearray(race.nbytes - offset)
        try:
            race.file.fetch(race.start + offset, (memoryview(buffer),), attempt)
        except (TransientError, GivenUpError, RangeError, FileNotFoundError) as error:
            # The first request still runs and reports the error if it meets it too. A replaced file counts at
            # once: the range is wrong however the first request ends.
            with self._lock:
                self._counts["extra_bytes"] += attempt.received
                # Frees the hedge's place: the watcher may start another one for this range.
                race.second = None
                first = None
                if isinstance(error, ReplacedError) and not race.over:
                    race.replaced, first = error, race.first
            if first is not None:
                first.attempt.give_up()
            return
        with self._lock:
            # The caller may have returned in the meantime; then the bytes were received for nothing.
            late = race.over
            first = race.first
            if late:
                self._counts["extra_bytes"] += attempt.received
            else:
                race.won = offset, buffer
                self._counts["hedges_won"] += 1
                if first is None:
                    self._counts["extra_bytes"] += race.kept - offset
        # Outside the lock: `give_up` shuts a socket down.
        if not late and first is not None:
            first.attempt.give_up()
        race.changed.set()


def _began(race: HedgedRequest) -> float:
    assert race.first is not None, "under way"
    return race.first.began


def _scattered(seconds: float, error: TransientError) -> float:
    """A randomized delay, so that requests which failed together do not return together."""
    if error.overloaded:
        seconds = max(seconds, REFUSED_DELAY)
    if error.wait_seconds is not None:
        seconds = max(seconds, min(error.wait_seconds, LONGEST_WAIT))
    return seconds * random.uniform(0.5, 1.5)


def _failed(what: str, reasons: Counter[str], seconds: float, *, arrived: int = 0) -> RangeError:
    listing = "; ".join(
        reason if count == 1 else f"{reason} ({count} times)" for reason, count in reasons.most_common()
    )
    tries = "once" if reasons.total() == 1 else f"{reasons.total()} times"
    listing += f"; {arrived:,} bytes arrived" if arrived else ""
    return RangeError(
        f"{what} could not be read, tried {tries} in {seconds:.1f} s: {listing}\n"
        "  → run again when the server works again, or copy the files to a local disk and use the copy"
    )
