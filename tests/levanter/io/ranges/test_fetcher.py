"""Ranges from a server that is slow and broken in every way: the bytes are right, or the error says what happened."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from helpers.object_store import Fault, ObjectStore, Request

from levanter.io.ranges import Connections, RangeError, RangeFetcher, ReplacedError, fetcher, remote_file
from levanter.io.ranges.concurrency import FIRST_REQUESTS

CONTENT = np.random.default_rng(0).bytes(1_500_000)
PART = 50_000
MIDDLE = 10 * PART
NAME = "bucket/model.safetensors"


def first_time(fault: Fault, *, every: int = 3) -> Callable[[Request], Fault | None]:
    """Breaks every third range, the first time that it is asked for."""

    def chosen(request: Request) -> Fault | None:
        number, behind = divmod(request.start, PART)
        return fault if number and number % every == 0 and not behind and not request.seen else None

    return chosen


def always(fault: Fault) -> Callable[[Request], Fault | None]:
    return lambda request: fault if request.start == MIDDLE else None


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row: what is broken, and what must come of it.

    Attributes:
        fault: what is wrong with an answer.
        retried: ranges that are asked for again; None where it is an error.
        error: the class of it.
        says: texts of the error.
    """

    fault: Callable[[Request], Fault | None]
    retried: int | None = None
    error: type[Exception] | None = None
    says: Sequence[str] = ()


MIDDLE_SAID = "bytes 500,000 to 550,000"
CASES = {
    "nothing": Case(fault=lambda request: None, retried=0),
    "500": Case(fault=first_time(Fault(status=500)), retried=9),
    "503": Case(fault=first_time(Fault(status=503)), retried=9),
    "429 with a wait": Case(fault=first_time(Fault(status=429, headers={"Retry-After": "0"})), retried=9),
    "reset": Case(fault=first_time(Fault(reset_after=20_000)), retried=9),
    "reset before a byte": Case(fault=first_time(Fault(reset_after=0)), retried=9),
    "short": Case(fault=first_time(Fault(end_after=20_000)), retried=9),
    "short, and says so": Case(
        fault=first_time(Fault(headers={"Content-Length": "20000"}, end_after=20_000)), retried=9
    ),
    "the next range": Case(fault=first_time(Fault(headers={"Content-Range": f"bytes 1-{PART}/1500000"})), retried=9),
    "no Content-Range": Case(fault=first_time(Fault(headers={"Content-Range": "-"})), retried=9),
    "the whole file": Case(fault=first_time(Fault(ignore_range=True)), retried=9),
    "a 503 that stays": Case(
        fault=always(Fault(status=503)),
        error=RangeError,
        says=(MIDDLE_SAID, "tried 4 times", "503 Service Unavailable"),
    ),
    "resets that stay": Case(
        fault=always(Fault(reset_after=0)), error=RangeError, says=(MIDDLE_SAID, "tried 4 times", "connection")
    ),
    "short for ever": Case(
        fault=always(Fault(end_after=0)),
        error=RangeError,
        says=(MIDDLE_SAID, "tried 4 times", "the answer ended early (4 times)\n"),
    ),
    "a little, again and again": Case(
        fault=lambda request: Fault(end_after=20) if MIDDLE <= request.start < MIDDLE + PART else None,
        error=RangeError,
        says=(MIDDLE_SAID, "tried 4 times", "the answer ended early (4 times); 80 bytes arrived\n"),
    ),
    "short again and again, and goes on where it was": Case(
        fault=lambda request: Fault(end_after=20_000) if MIDDLE <= request.start < MIDDLE + PART else None, retried=2
    ),
    "a wrong range for ever": Case(
        fault=always(Fault(headers={"Content-Range": "bytes 0-49999/1500000"})),
        error=RangeError,
        says=(MIDDLE_SAID, "it answered with Content-Range 'bytes 0-49999/1500000' (4 times)"),
    ),
    "another ETag": Case(
        fault=always(Fault(headers={"ETag": '"new"'})),
        error=ReplacedError,
        says=("was replaced while it was read: its version was", 'and is "new" now', "→ load again"),
    ),
    "another size": Case(
        fault=always(Fault(headers={"Content-Range": f"bytes {MIDDLE}-{MIDDLE + PART - 1}/1499999"})),
        error=ReplacedError,
        says=("it had 1,500,000 bytes and has 1,499,999 now",),
    ),
    "another date, and no ETag": Case(
        fault=lambda request: Fault(
            headers={"ETag": "-", "Last-Modified": "Sat, 01 Jan 2028 00:00:00 GMT"}
            if request.start == MIDDLE
            else {"ETag": "-"}
        ),
        error=ReplacedError,
        says=("is dated Sat, 01 Jan 2028 00:00:00 GMT now",),
    ),
    "gone": Case(fault=always(Fault(status=404)), error=ReplacedError, says=("it no longer exists (404 Not Found)",)),
    "shorter": Case(fault=always(Fault(status=416)), error=ReplacedError, says=(MIDDLE_SAID, "it no longer has")),
    "forbidden": Case(fault=always(Fault(status=403)), error=RangeError, says=("refuses", MIDDLE_SAID, "credentials")),
    "compressed": Case(
        fault=always(Fault(headers={"Content-Encoding": "gzip"})), error=RangeError, says=("compressed (gzip)",)
    ),
    "a teapot": Case(fault=always(Fault(status=418)), error=RangeError, says=("does not return", "418")),
}


@pytest.fixture
def unhurried(monkeypatch):
    """No request is ever slow: a machine that stands still for a moment would ask for one twice."""
    monkeypatch.setattr(fetcher.Durations, "slow_seconds", lambda durations, nbytes: float("inf"))
    monkeypatch.setattr(fetcher.Durations, "silent_seconds", float("inf"))


def parts(buffer: bytearray) -> list[tuple[int, memoryview]]:
    view = memoryview(buffer)
    return [(at, view[at : at + PART]) for at in range(0, len(buffer), PART)]


def read_all(store: ObjectStore, made: RangeFetcher) -> bytes:
    file = remote_file(f"{store.url}/{NAME}", Connections())
    assert file.describe().size == len(CONTENT)
    buffer = bytearray(len(CONTENT))
    made.fetch_all(file, parts(buffer))
    return bytes(buffer)


@pytest.mark.parametrize("name", CASES)
def test_broken_answers(name, unhurried):
    case = CASES[name]
    made = RangeFetcher(delays=(0.01, 0.01, 0.01))
    with ObjectStore({NAME: CONTENT}, fault=case.fault) as store:
        if case.error is None:
            assert read_all(store, made) == CONTENT
        else:
            with pytest.raises(case.error) as caught:
                read_all(store, made)
            assert type(caught.value) is case.error
            said = str(caught.value)
            assert said.startswith(f"{store.url}/{NAME}: ")
            assert [text for text in case.says if text not in said] == [], said
    tally = made.tally
    if case.retried is not None:
        assert (tally.ranges, tally.wanted_bytes, tally.retried) == (30, len(CONTENT), case.retried)
        assert store.requests == 1 + 30 + case.retried, "one to open it, one for each range and each failure"


STALLED = 25 * PART


def stalled_once(request: Request) -> Fault | None:
    """Of one range the server sends a part and falls silent for an hour."""
    return Fault(stall_after=20_000) if request.start == STALLED and not request.seen else None


def test_a_stalled_range_is_asked_for_by_a_second_request_and_the_first_is_given_up():
    """The others are quick, unless this machine stands still for a moment: then they may be asked for twice, too."""
    made = RangeFetcher(delays=())
    with ObjectStore({NAME: CONTENT}, fault=stalled_once) as store:
        assert read_all(store, made) == CONTENT
        tally = made.tally
        assert tally.hedged >= 1 and tally.retried == 0
        assert tally.wanted_bytes == len(CONTENT) and "hedged" in str(tally)
        first, second = (each for each in store.log if each.stop == STALLED + PART)
        assert first.start == STALLED <= second.start <= STALLED + 20_000


def test_what_has_arrived_of_a_stalled_range_is_not_asked_for_again(unhurried, monkeypatch):
    """It is silent from when its part is there and everything else is."""
    made = RangeFetcher(delays=())

    def silent_seconds(_: object) -> float:
        left = [(race.start, race.arrived) for race in made._races]
        return 0.0 if left == [(STALLED, 20_000)] else float("inf")

    monkeypatch.setattr(fetcher.Durations, "silent_seconds", property(silent_seconds))
    with ObjectStore({NAME: CONTENT}, fault=stalled_once) as store:
        assert read_all(store, made) == CONTENT
        first, second = (each for each in store.log if each.stop == STALLED + PART)
    assert (first.start, second.start) == (STALLED, STALLED + 20_000)
    tally = made.tally
    assert (tally.hedged, tally.hedges_won, tally.retried, tally.extra_bytes) == (1, 1, 0, 0)


@pytest.mark.parametrize("fault", [Fault(end_after=20_000), Fault(reset_after=20_000)], ids=["closed", "reset"])
def test_a_range_that_broke_off_goes_on_where_it_was(fault, unhurried):
    made = RangeFetcher(delays=(0.01,))
    with ObjectStore({NAME: CONTENT}, fault=lambda r: fault if r.start == MIDDLE and not r.seen else None) as store:
        assert read_all(store, made) == CONTENT
        asked = [each for each in store.log if each.stop == MIDDLE + PART]
    assert len(asked) == 2
    # A reset may take with it what had arrived and nobody had read.
    assert asked[1].start == MIDDLE + 20_000 or (fault.reset_after and MIDDLE <= asked[1].start < MIDDLE + 20_000)
    assert made.tally.extra_bytes == 0


def test_a_line_that_breaks_often_brings_a_long_range_in_the_end(unhurried):
    """Far more often than there are delays: each request brings something."""
    made = RangeFetcher(delays=(0.01,))
    broken = Fault(end_after=fetcher.ANEW_BYTES)
    with ObjectStore({NAME: CONTENT}, fault=lambda request: broken if request.start else None) as store:
        file = remote_file(f"{store.url}/{NAME}", Connections())
        file.describe()
        buffer = bytearray(len(CONTENT) - 1)
        made.fetch(file, 1, memoryview(buffer))
    assert bytes(buffer) == CONTENT[1:] and made.tally.retried == len(CONTENT) // fetcher.ANEW_BYTES
    assert made.tally.extra_bytes == 0


def test_refusals_of_large_requests_take_nothing_from_small_ones(unhurried, monkeypatch):
    """Each large one is refused once, twenty in all, one after another; the small ones are as many as before."""
    monkeypatch.setattr(fetcher, "REFUSED_DELAY", 0.0)
    large = fetcher.SMALL_BYTES + 1
    made = RangeFetcher(delays=(0.001,))
    refused = Fault(status=503, headers={"Retry-After": "0"})
    with ObjectStore({NAME: CONTENT}, fault=lambda r: refused if r.start == 7 and not r.seen else None) as store:
        file = remote_file(f"{store.url}/{NAME}", Connections())
        file.describe()
        for _ in range(20):
            store.seen.clear()
            made.fetch(file, 7, memoryview(bytearray(large)))
    assert made.tally.retried == 20
    assert made._small.pace.limit == FIRST_REQUESTS


def test_a_refusal_now_and_then_takes_no_connections(unhurried):
    """One range in thirty is refused, as large stores do; all others go on as they were."""
    made = RangeFetcher(delays=(0.01,))
    refused = Fault(status=503)
    with ObjectStore({NAME: CONTENT}, fault=lambda r: refused if r.start == MIDDLE and not r.seen else None) as store:
        for _ in range(3):
            store.seen.clear()
            assert read_all(store, made) == CONTENT
    assert made.tally.retried == 3 and made._small.pace.limit >= FIRST_REQUESTS


def slow_once(monkeypatch: pytest.MonkeyPatch, begun: threading.Event, seconds: float) -> None:
    """Requests are slow so soon, once the server has one; else the second for a range might come before the first."""
    own = {True: seconds, False: float("inf")}
    monkeypatch.setattr(fetcher.Durations, "slow_seconds", lambda durations, nbytes: own[begun.is_set()])


def test_a_second_request_that_is_stalled_too_loses_and_costs_no_more_than_its_bytes(unhurried, monkeypatch):
    """The first, slow but alive, comes home."""
    first, second = threading.Event(), threading.Event()
    slow_once(monkeypatch, first, 0.2)

    def fault(request: Request) -> Fault | None:
        if request.start != STALLED:
            return None
        if request.seen:
            second.set()
            return Fault(stall_after=0)
        first.set()
        second.wait(100)  # slow: until it is asked for again
        return None

    made = RangeFetcher(delays=())
    with ObjectStore({NAME: CONTENT}, fault=fault) as store:
        assert read_all(store, made) == CONTENT
    # On a busy machine others may have been slow too.
    assert made.tally.hedged >= 1 and made.tally.hedges_won < made.tally.hedged


def test_a_second_request_that_falls_silent_is_followed_by_a_third(unhurried, monkeypatch):
    """Neither it nor the first one ever ends."""
    monkeypatch.setattr(fetcher.Durations, "silent_seconds", property(lambda _: 0.2))
    asked: list[int] = []

    def fault(request: Request) -> Fault | None:
        if request.stop != STALLED + PART:
            return None
        asked.append(request.start)
        return Fault(stall_after=10_000) if len(asked) <= 3 else None

    made = RangeFetcher(delays=())
    with ObjectStore({NAME: CONTENT}, fault=fault) as store:
        assert read_all(store, made) == CONTENT
    assert len(asked) >= 4 and min(asked[1:]) > STALLED
    assert made.tally.hedged >= 3 and made.tally.hedges_won >= 1 and made.tally.retried == 0


def test_not_everything_is_asked_for_twice_when_everything_is_slow(monkeypatch):
    """A share of the bytes, and a few at a time: a server in trouble gets no second crowd."""
    monkeypatch.setattr(fetcher, "PART_BYTES", PART)
    # Whatever this machine is busy with: a range of an unhurried server takes 1.7 s.
    monkeypatch.setattr(fetcher.Durations, "slow_seconds", lambda durations, nbytes: 0.5)
    slow = Fault(rate=30_000.0)
    made, hedges = RangeFetcher(most=8, delays=()), []
    begin_second = fetcher.HedgedRequest.begin_second

    def begin_and_count(race: fetcher.HedgedRequest, now: float):
        second = begin_second(race, now)
        hedges.append(sum(race.second is not None for race in made._races))
        return second

    monkeypatch.setattr(fetcher.HedgedRequest, "begin_second", begin_and_count)
    with ObjectStore({NAME: CONTENT}, fault=lambda r: slow if r.start >= 20 * PART else None) as store:
        assert read_all(store, made) == CONTENT
    allowed = fetcher.HEDGES * PART + fetcher.HEDGED_SHARE * len(CONTENT)
    assert made.tally.hedged and made.tally.extra_bytes <= allowed, made.tally
    assert max(hedges) <= fetcher.HEDGES


def test_how_many_are_under_way_is_bounded(unhurried):
    """The first five are answered once all of them are there; a sixth never is."""
    made, together = RangeFetcher(most=5, delays=()), threading.Barrier(5)

    def fault(request: Request) -> None:
        if 1 <= request.number <= 5:  # the one before asks what file it is
            together.wait(100)

    with ObjectStore({NAME: CONTENT}, fault=fault) as store:
        assert read_all(store, made) == CONTENT
    assert store.most == 5


def test_small_requests_do_not_wait_for_large_ones(unhurried):
    """With room for one of each: the large one is stalled for an hour, and not hedged; the small ones are answered."""
    large = fetcher.SMALL_BYTES + 1
    made = RangeFetcher(most=1, delays=())
    stalled = Fault(stall_after=10)
    with ObjectStore({NAME: CONTENT}, fault=lambda r: stalled if r.start == 7 else None) as store:
        file = remote_file(f"{store.url}/{NAME}", Connections())
        file.describe()
        failures = []

        def read_large() -> None:
            try:
                made.fetch(file, 7, memoryview(bytearray(large)))
            except RangeError as error:
                failures.append(str(error))

        thread = threading.Thread(target=read_large)
        thread.start()
        while not any(request.start == 7 for request in store.log):
            time.sleep(0.01)
        buffer = bytearray(2 * PART)
        made.fetch_all(file, parts(buffer))
        assert bytes(buffer) == CONTENT[: 2 * PART] and thread.is_alive()
        made.interrupt()
        thread.join(60)
    assert failures and "reading was interrupted" in failures[0]


def test_a_second_request_fills_the_same_pieces_of_memory(unhurried, monkeypatch):
    first = threading.Event()
    slow_once(monkeypatch, first, 0.1)

    def fault(request: Request) -> Fault | None:
        # The second one asks for the whole range if no byte of the first has been read by then.
        if request.start != 5 or request.seen:
            return None
        first.set()
        return Fault(stall_after=20_000)

    made = RangeFetcher(delays=())
    with ObjectStore({NAME: CONTENT}, fault=fault) as store:
        file = remote_file(f"{store.url}/{NAME}", Connections())
        file.describe()
        buffers = [bytearray(size) for size in (10, 30_000, 20_000)]
        made.fetch(file, 5, *map(memoryview, buffers))
    assert b"".join(buffers) == CONTENT[5:50_015] and made.tally.hedges_won == 1


@pytest.mark.parametrize("where", ["stalled", "refused"])
def test_an_interrupt_ends_everything_at_once(where):
    """In the middle of a body that does not come, and in the middle of a delay before another try."""
    fault = Fault(stall_after=10_000) if where == "stalled" else Fault(status=500)
    made = RangeFetcher(delays=(3600.0,))
    failures = []
    with ObjectStore({NAME: CONTENT}, fault=lambda r: fault if r.start else None) as store:
        file = remote_file(f"{store.url}/{NAME}", Connections())
        file.describe()

        def read(at: int) -> None:
            try:
                made.fetch(file, at, memoryview(bytearray(PART)))
            except RangeError as error:
                failures.append(str(error))

        threads = [threading.Thread(target=read, args=(at,)) for at in range(PART, 30 * PART, PART)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 100
        while store.requests < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        made.interrupt()
        # Each of them would take an hour.
        for thread in threads:
            thread.join(100)
        assert not any(thread.is_alive() for thread in threads)
        assert len(failures) == len(threads) and all("reading was interrupted" in each for each in failures)
        with pytest.raises(RangeError, match="interrupted"):
            made.fetch(file, 0, memoryview(bytearray(PART)))
        made.resume()
        buffer = bytearray(PART)
        made.fetch(file, 0, memoryview(buffer))
        assert bytes(buffer) == CONTENT[:PART]


def test_nobody_is_left_behind():
    """Threads that look for slow requests end when there are none."""
    made = RangeFetcher(most=2, delays=())
    with ObjectStore({NAME: CONTENT}) as store:
        file = remote_file(f"{store.url}/{NAME}", Connections())
        made.fetch(file, 0, memoryview(bytearray(PART)))
    deadline = time.monotonic() + 100
    while any(thread.name == "slow-ranges" for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(thread.name == "slow-ranges" for thread in threading.enumerate())
