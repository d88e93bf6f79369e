"""`RangeFetcher`: ranges of remote files into the caller's memory, many side by side, none of them lost.

A range is asked for again after a failure that may pass (at once, and then with growing, scattered delays), and by a
second request while the first is still under way when that one has become slow or silent (a *hedge*): whoever is
first wins, the other is given up. Either way only what has not arrived is asked for. How many requests are under way
follows what they bring (`pace`); small ones, which wait for the network and bring next to nothing, are counted apart
and take nobody's room, and one that broke off does not queue up again (`lanes`). The caller's own threads make the
requests, so what is in flight is bounded by them and by the memory that they were given.
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
"""Of one request: at 30 ms and 20 MB/s seven eighths of its time go into bytes."""
SMALL_BYTES = 256 << 10
"""Of a small request: most of its time goes into waiting for the first byte."""
DELAYS = (0.05, 0.5, 1.8, 5.0, 12.0, 25.0)
"""Seconds before a range is asked for again, each scattered by half of it."""
REFUSED_DELAY = 0.2
"""The least of them where a server asks for fewer requests."""
ANEW_BYTES = 256 << 10
"""A request that brought so many bytes before it failed is followed by others as if it had not: a long range over a
line that breaks often arrives in the end."""
QUICK_DELAYS = (0.2, 0.8, 2.4)
"""The same for the first question of a run: a place that is not there should be told soon."""
LONGEST_WAIT = 60.0
"""A server that asks to be left alone for longer is asked all the same."""
HEDGES = 4
"""Second requests under way."""
SECOND_SECONDS = 1.0
"""No second request is given up because nothing of it arrives before."""
HEDGED_SHARE = 0.015
"""Of the bytes that may be received twice, beyond a first few."""
LOOK_SECONDS = 0.05
IDLE_SECONDS = 2.0

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class FetchStats:
    """What a fetcher did so far.

    Attributes:
        ranges: that arrived.
        wanted_bytes: of those.
        extra_bytes: received beyond them: by requests that failed half-way or lost.
        retried: requests made because one before them failed.
        hedged: second requests beside slow ones.
        hedges_won: of those that were first.
        requests: that may be under way at present.
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
            fields.append(f"{self.retried} tried again")
        if self.hedged:
            fields.append(f"{self.hedged} asked twice")
        if self.extra_bytes:
            fields.append(f"{self.extra_bytes / 2**20:,.1f} MiB extra")
        return ", ".join(fields)


class RangeFetcher:
    """Reads ranges of files that share a network.

    One is made for each checkpoint; its methods are called from any thread.
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
        """Requests side by side that make sense, at most."""
        return self._most

    @property
    def read_bytes(self) -> int:
        """Bytes of one request that make sense."""
        return PART_BYTES

    @property
    def hedge_bytes(self) -> int:
        """Memory of second requests, at most, where no range is larger than `read_bytes`."""
        return HEDGES * PART_BYTES

    @property
    def tally(self) -> FetchStats:
        """What was done so far."""
        names = ("ranges", "wanted_bytes", "extra_bytes", "retried", "hedged", "hedges_won")
        with self._lock:
            counts = {name: self._counts[name] for name in names}
        return FetchStats(**counts, requests=self._large.pace.limit)

    def __str__(self) -> str:
        return str(self.tally)

    def interrupt(self) -> None:
        """Ends everything that is under way or comes later, until `resume`; who waits for it gets a `RangeError`."""
        with self._lock:
            self._stop.set()
            requests = [attempt for race in self._races for attempt in (race.first, race.second) if attempt is not None]
        for request in requests:
            request.attempt.give_up()
        for lane in (self._small, self._large):
            lane.stopped()

    def resume(self) -> None:
        """Takes back an interrupt."""
        with self._lock:
            if self._stop.is_set():
                self._stop = threading.Event()

    def ask(self, action: Callable[[], R], *, what: str, delays: Iterable[float] = QUICK_DELAYS) -> R:
        """Calls `action`, again after each of `delays` seconds when it fails in a way that may pass.

        Raises:
            RangeError: it failed to the end; says how often and why.
        """
        waits, reasons, began = list(delays), Counter[str](), self._clock()
        while True:
            try:
                return action()
            except TransientError as error:
                reasons[error.reason] += 1
                if not waits or self._stop.is_set():
                    raise _failed(what, reasons, self._clock() - began) from error
                self._stop.wait(_scattered(waits.pop(0), error))

    def fetch_all(self, file: RangeSource, ranges: Iterable[tuple[int, memoryview]]) -> None:
        """Fills several ranges of a file, side by side where there are several.

        Raises:
            RangeError: one of them cannot be read.
        """
        wanted = list(ranges)
        if len(wanted) == 1:
            self.fetch(file, *wanted[0])
            return
        for future in [self._pool.submit(self.fetch, file, *part) for part in wanted]:
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
            stop = self._stop
        try:
            self._run(race, stop)
        finally:
            with self._lock:
                race.over = True
                self._races.discard(race)
                second = race.second
            if second is not None:
                second.attempt.give_up()
        self._count(ranges=1, wanted_bytes=race.nbytes)

    def _run(self, race: HedgedRequest, stop: threading.Event) -> None:
        what = f"{race.file.name}: bytes {race.start:,} to {race.start + race.nbytes:,}"
        waits, reasons, began = list(self._delays), Counter[str](), self._clock()
        again = False
        while True:
            before = race.kept
            try:
                self._once(race, stop, again=again)
            except GivenUpError:
                if race.replaced is not None:
                    raise race.replaced from None
                if race.won is None:
                    raise RangeError(f"{what}: reading was interrupted") from None
            except TransientError as error:
                reasons[error.reason] += 1
                if race.kept - before >= ANEW_BYTES:
                    waits = list(self._delays)
                if race.won is None and race.missing and not waits:
                    raise _failed(what, reasons, self._clock() - began, arrived=race.kept) from error
                if race.won is None and race.missing:
                    self._pause(race, _scattered(waits.pop(0), error), stop)
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
        """Waits, but no longer than for a second request that comes home meanwhile."""
        until = self._clock() + seconds
        while (remaining := until - self._clock()) > 0 and race.won is None and not stop.is_set():
            race.changed.wait(min(remaining, LOOK_SECONDS))

    def _once(self, race: HedgedRequest, stop: threading.Event, *, again: bool) -> None:
        attempt, rest = Attempt(), race.rest
        start, size = race.start + race.kept, sum(map(len, rest))
        lane = self._small if size <= SMALL_BYTES else self._large
        with lane.slot(stop, again=again):
            with self._lock:
                if race.won is not None or stop.is_set():
                    raise GivenUpError
                race.begin(attempt, self._clock())
            self._watch()
            done = False
            try:
                race.file.fetch(start, rest, attempt)
                done = True
            except TransientError as error:
                if error.overloaded:
                    # Its own kind alone: the other one has nothing to forget it by.
                    with self._lock:
                        lane.pace.overloaded(self._clock())
                raise
            finally:
                now = self._clock()
                with self._lock:
                    ended = race.end(now)
                    if done:
                        self._durations.add(now - ended.began, size, ended.silence if attempt.streams else None)
                        lane.pace.finished(size, now, waiting=lane.waiting > 0)
                    if race.won is not None:
                        self._decide(race, done=done)

    def _decide(self, race: HedgedRequest, *, done: bool) -> None:
        """Counts what two requests have both brought; that of the second is not needed where the first is whole."""
        assert race.won is not None, "the second one is home"
        at, content = race.won
        if done:
            race.won = None
            self._counts.update(hedges_won=-1, extra_bytes=len(content))
        else:
            self._counts.update(extra_bytes=race.kept - at)

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def _watch(self) -> None:
        """Sees to it that somebody looks for slow requests."""
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
                elif now - idle_since > IDLE_SECONDS:
                    self._watching = False
                    return
                silent = self._durations.silent_seconds
                slow = [race for race in races if self._is_slow(race, now, silent)]
                lost = [race.second for race in self._races if self._is_lost(race, now, silent)]
                hedged = sum(race.second is not None for race in self._races)
                chosen: list[tuple[HedgedRequest, int, Attempt]] = []
                for race in sorted(slow, key=_began)[: max(0, HEDGES - hedged)]:
                    if race.missing and self._may_hedge(race):
                        chosen.append((race, race.arrived, race.begin_second(now).attempt))
                        self._counts.update(hedged=1)
            for second in lost:
                if second is not None:
                    second.attempt.give_up()
            for race, at, attempt in chosen:
                self._hedging.submit(self._second, race, at, attempt)

    def _is_slow(self, race: HedgedRequest, now: float, silent: float) -> bool:
        assert race.first is not None, "under way"
        silence = race.first.look(now)
        if race.second is not None or not race.file.can_be_cut_short:
            return False
        seconds = now - race.first.began
        return (race.first.attempt.streams and silence > silent) or seconds > self._durations.slow_seconds(race.nbytes)

    def _is_lost(self, race: HedgedRequest, now: float, silent: float) -> bool:
        """Whether nothing comes of the second request either, so that another one is made in its place.

        It is waited for longer than the first, and each one twice as long as the one before: a server that answers
        nobody, or everybody slowly, gets few of them.
        """
        second = race.second
        if second is None:
            return False
        silence, seconds = second.look(now), now - second.began
        limit = silent if second.attempt.streams else self._durations.slow_seconds(race.nbytes)
        waited = silence if second.attempt.streams else seconds
        return waited > max(SECOND_SECONDS, limit) * 2 ** (race.second_requests - 1)

    def _may_hedge(self, race: HedgedRequest) -> bool:
        """Whether what is received twice, if all that is under way twice is, remains a small share."""
        allowed = HEDGES * PART_BYTES + HEDGED_SHARE * self._counts["wanted_bytes"]
        at_stake = sum(other.missing for other in self._races if other.second is not None)
        return self._counts["extra_bytes"] + at_stake + race.missing <= allowed

    def _second(self, race: HedgedRequest, at: int, attempt: Attempt) -> None:
        """The second request for a slow range: for what is missing from `at` on."""
        buffer = bytearray(race.nbytes - at)
        try:
            race.file.fetch(race.start + at, (memoryview(buffer),), attempt)
        except (TransientError, GivenUpError, RangeError, FileNotFoundError) as error:
            # The first is still under way, and tells what is wrong if it meets it too; a file that is another one by
            # now is wrong however the first ends.
            with self._lock:
                self._counts["extra_bytes"] += attempt.received
                race.second = None
                first = None
                if isinstance(error, ReplacedError) and not race.over:
                    race.replaced, first = error, race.first
            if first is not None:
                first.attempt.give_up()
            return
        with self._lock:
            lost = race.over
            first = race.first
            if lost:
                self._counts["extra_bytes"] += attempt.received
            else:
                race.won = at, buffer
                self._counts["hedges_won"] += 1
                if first is None:
                    self._counts["extra_bytes"] += race.kept - at
        if not lost and first is not None:
            first.attempt.give_up()
        race.changed.set()


def _began(race: HedgedRequest) -> float:
    assert race.first is not None, "under way"
    return race.first.began


def _scattered(seconds: float, error: TransientError) -> float:
    """A delay, scattered so that many who failed together do not come back together."""
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
        "  → run again once the server is well, or copy the files to a local disk and give the copy"
    )
