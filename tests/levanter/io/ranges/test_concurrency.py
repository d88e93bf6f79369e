"""Who gets room for a request, and in which order: threads that wait, one after another."""

import threading
import time

import pytest

from levanter.io.ranges.concurrency import ConcurrencyLimit
from levanter.io.ranges.request import GivenUpError

pytestmark = pytest.mark.quick


def waits(
    lane: ConcurrencyLimit, said: list[str], name: str, stop: threading.Event, *, again: bool
) -> threading.Thread:
    """A thread that waits for room, and is known to wait."""
    before = lane.waiting

    def ask() -> None:
        try:
            with lane.slot(stop, again=again):
                said.append(name)
        except GivenUpError:
            said.append(f"{name} was stopped")

    thread = threading.Thread(target=ask)
    thread.start()
    deadline = time.monotonic() + 100
    while lane.waiting == before and time.monotonic() < deadline:
        time.sleep(0.005)
    assert lane.waiting == before + 1
    return thread


def test_what_broke_off_goes_before_what_was_never_asked_for():
    lane, stop, said = ConcurrencyLimit(1), threading.Event(), list[str]()
    with lane.slot(stop, again=False):
        threads = [
            waits(lane, said, "first", stop, again=False),
            waits(lane, said, "second", stop, again=False),
            waits(lane, said, "broken", stop, again=True),
            waits(lane, said, "broken later", stop, again=True),
        ]
    for thread in threads:
        thread.join(100)
    assert said == ["broken", "broken later", "first", "second"]
    assert (lane.under_way, lane.waiting) == (0, 0)


def test_room_is_never_left_with_somebody_waiting():
    """Many who come, go and come again: nobody is forgotten, and never are there more than may be."""
    lane, stop, most, lock = ConcurrencyLimit(3), threading.Event(), [0], threading.Lock()

    def work(number: int) -> None:
        for turn in range(40):
            with lane.slot(stop, again=(number + turn) % 5 == 0):
                with lock:
                    most[0] = max(most[0], lane.under_way)
                time.sleep(0.0001)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not any(thread.is_alive() for thread in threads)
    assert most[0] <= 3 and (lane.under_way, lane.waiting) == (0, 0)


@pytest.mark.parametrize("again", [False, True])
def test_a_stop_ends_the_waiting(again):
    lane, stop, said = ConcurrencyLimit(1), threading.Event(), list[str]()
    with lane.slot(stop, again=False):
        thread = waits(lane, said, "it", stop, again=again)
        stop.set()
        lane.stopped()
        thread.join(100)
    assert said == ["it was stopped"]
