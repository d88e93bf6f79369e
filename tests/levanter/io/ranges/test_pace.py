"""How many requests side by side: a simulated network says what it gives, arithmetic by hand what should come of it."""

import pytest

from levanter.io.ranges.pace import FIRST_REQUESTS, WINDOW_SECONDS, Durations, Pace


def played(
    pace: Pace, seconds: float, *, each: float, total: float, nbytes: int = 1 << 20, begin: float = 0.0
) -> float:
    """Lets requests go over a network that gives `each` bytes a second to one of them and `total` to all."""
    now = begin
    while now < begin + seconds:
        rate = min(total, pace.limit * each)
        now += nbytes / rate
        pace.finished(nbytes, now, waiting=True)
    return now


@pytest.mark.parametrize(("each", "total"), [(20e6, 200e6), (20e6, 2e9), (5e6, 1e9), (100e6, 100e6)])
def test_it_grows_until_the_network_is_full(each, total):
    pace = Pace(256)
    played(pace, 6.0, each=each, total=total)
    assert pace.limit * each >= 0.95 * min(total, 256 * each)
    # A few too many cost nothing; four times as many as it takes are memory and a crowd for the server.
    assert pace.limit <= max(4 * total / each, 2 * FIRST_REQUESTS)


def test_it_looks_again_for_room_that_came_later():
    pace = Pace(256)
    now = played(pace, 5.0, each=20e6, total=200e6)
    before = pace.limit
    played(pace, 40.0, each=20e6, total=2e9, begin=now)
    assert before < 50 <= pace.limit


def test_what_nobody_waits_for_says_nothing():
    pace = Pace(64)
    for step in range(1000):
        pace.finished(1 << 20, step * 0.01, waiting=False)
    assert pace.limit == FIRST_REQUESTS


def test_a_server_that_is_overloaded_is_asked_less_and_a_burst_of_refusals_is_one():
    pace = Pace(64)
    for refusal in range(20):
        pace.overloaded(10 + refusal * 0.001)
    assert pace.limit == round(0.6 * FIRST_REQUESTS)
    for later in range(1, 20):
        pace.overloaded(10 + 2 * WINDOW_SECONDS * later)
    assert pace.limit == 2


@pytest.mark.parametrize("most", [1, 2, 7])
def test_the_most_is_kept_to(most):
    pace = Pace(most)
    played(pace, 5.0, each=20e6, total=2e9)
    assert pace.limit == most
    pace.overloaded(100.0)
    assert 1 <= pace.limit <= most


def test_a_request_is_slow_by_what_others_of_its_size_took():
    durations = Durations()
    assert durations.slow_seconds(4 << 20) == 5.0, "nothing is known"
    for _ in range(100):
        durations.add(0.45, 4 << 20)
    # 4 MiB and what a request costs took 0.45 s; three times that is slow, and half a second never is.
    assert durations.slow_seconds(4 << 20) == pytest.approx(1.35)
    assert durations.slow_seconds(64 << 10) == 0.5
    assert durations.slow_seconds(8 << 20) == pytest.approx(1.35 * 8.5 / 4.5)
    for _ in range(300):
        durations.add(4.5, 4 << 20)
    assert durations.slow_seconds(4 << 20) == pytest.approx(13.5), "a network that became slow is not slow to itself"
