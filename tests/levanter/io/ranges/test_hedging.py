"""What of a range is there, by hand: pieces of memory, an attempt's bytes, a clock that is told."""

import pytest
from helpers.object_store import ObjectStore

from levanter.io.ranges import Connections, remote_file
from levanter.io.ranges.hedging import HedgedRequest, Underway
from levanter.io.ranges.request import Attempt, behind

pytestmark = pytest.mark.quick


def a_race(*sizes: int) -> tuple[HedgedRequest, list[bytearray]]:
    buffers = [bytearray(size) for size in sizes]
    with ObjectStore({"file": b"x"}) as store:
        return HedgedRequest(
            remote_file(f"{store.url}/file", Connections()), 100, tuple(map(memoryview, buffers))
        ), buffers


def test_memory_behind_the_first_bytes():
    pieces = tuple(memoryview(bytes(range(at, at + size))) for at, size in ((0, 3), (3, 0), (3, 4), (7, 1)))
    for nbytes in range(10):
        found = behind(pieces, nbytes)
        assert b"".join(found) == bytes(range(nbytes, 8)) and all(len(each) for each in found if nbytes > 3)


def test_what_requests_brought_one_after_another_adds_up():
    race, _ = a_race(30, 70)
    first = Attempt()
    race.begin(first, 1.0)
    first.received = 40
    assert (race.arrived, race.missing, race.kept) == (40, 60, 0)
    assert race.end(3.5).began == 1.0
    assert (race.arrived, race.missing, sum(map(len, race.rest))) == (40, 60, 60)
    second = Attempt()
    race.begin(second, 5.0)
    second.received = 10
    assert (race.arrived, race.missing) == (50, 50)


def test_how_long_it_is_silent_is_counted_from_the_last_byte():
    attempt = Attempt()
    request = Underway(attempt, 10.0)
    assert request.look(10.2) == 10.2 - 10.0
    attempt.received = 1
    assert request.look(10.5) == 0.0 and request.silence == 0.5
    assert request.look(10.75) == 0.25
    request.look(12.0)
    assert request.silence == 1.5


def test_second_requests_are_counted():
    race, _ = a_race(100)
    race.begin(Attempt(), 1.0)
    assert race.begin_second(2.0).began == 2.0 and race.second_requests == 1
    race.second = None
    assert race.begin_second(3.0) is race.second and race.second_requests == 2


def test_what_the_second_request_brought_lies_where_it_began():
    race, buffers = a_race(3, 5, 2)
    buffers[0][:] = b"abc"
    buffers[1][:1] = b"d"
    race.won = 4, bytearray(b"efghij")
    race.take()
    assert b"".join(buffers) == b"abcdefghij"
