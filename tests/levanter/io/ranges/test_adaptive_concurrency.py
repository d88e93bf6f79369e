"""How many requests side by side: a simulated network says what it gives, arithmetic by hand what should come of it."""

import pytest

from levanter.io.ranges.concurrency import FIRST_REQUESTS, WINDOW_SECONDS, AdaptiveConcurrency, Durations

pytestmark = pytest.mark.quick


def played(
    pace: AdaptiveConcurrency, seconds: float, *, each: float, total: float, nbytes: int = 1 << 20, begin: float = 0.0
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
    pace = AdaptiveConcurrency(256)
    played(pace, 6.0, each=each, total=total)
    assert pace.limit * each >= 0.95 * min(total, 256 * each)
    # A few too many cost nothing; four times as many as it takes are memory and a crowd for the server.
    assert pace.limit <= max(4 * total / each, 2 * FIRST_REQUESTS)


def test_it_looks_again_for_room_that_came_later():
    pace = AdaptiveConcurrency(256)
    now = played(pace, 5.0, each=20e6, total=200e6)
    before = pace.limit
    played(pace, 40.0, each=20e6, total=2e9, begin=now)
    assert before < 50 <= pace.limit


def test_what_nobody_waits_for_says_nothing():
    pace = AdaptiveConcurrency(64)
    for step in range(1000):
        pace.finished(1 << 20, step * 0.01, waiting=False)
    assert pace.limit == FIRST_REQUESTS


def test_a_server_that_is_overloaded_is_asked_less_and_a_burst_of_refusals_is_one():
    pace = AdaptiveConcurrency(64)
    for refusal in range(20):
        pace.overloaded(10 + refusal * 0.001)
    assert pace.limit == round(0.6 * FIRST_REQUESTS)
    for later in range(1, 20):
        pace.overloaded(10 + 2 * WINDOW_SECONDS * later)
    assert pace.limit == 2


@pytest.mark.parametrize("every", [120, 40])
def test_a_refusal_now_and_then_is_no_overload(every):
    pace, now = AdaptiveConcurrency(256), 0.0
    for number in range(4000):
        now += (1 << 20) / min(200e6, pace.limit * 20e6)
        if number % every:
            pace.finished(1 << 20, now, waiting=True)
        else:
            pace.overloaded(now)
        assert pace.limit >= FIRST_REQUESTS
    assert pace.limit * 20e6 >= 200e6


def asked(pace: AdaptiveConcurrency, seconds: float, *, room: int, begin: float = 0.0) -> tuple[float, float]:
    """Lets requests of a tenth of a second go to a server that refuses what is more than `room` at a time.

    Returns:
        When it was over, and the answers a second in its second half.
    """
    now, answers = begin, 0
    while now < begin + seconds:
        now += 0.1
        served = min(pace.limit, room)
        for _ in range(pace.limit - served):
            pace.overloaded(now)
        for _ in range(served):
            pace.finished(1 << 20, now, waiting=True)
        answers += served * (now > begin + seconds / 2)
    return now, answers / (seconds / 2)


def test_a_server_with_room_for_few_is_given_few_and_more_once_it_has_room():
    pace = AdaptiveConcurrency(128)
    now, rate = asked(pace, 60.0, room=12)
    assert rate >= 0.6 * 120, "most of what it has room for is used"
    assert pace.limit <= 2 * 12
    now, _ = asked(pace, 60.0, room=1, begin=now)
    assert pace.limit <= 4
    asked(pace, 40.0, room=100, begin=now)
    assert pace.limit >= 50


@pytest.mark.parametrize("most", [1, 2, 7])
def test_the_most_is_kept_to(most):
    pace = AdaptiveConcurrency(most)
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


def test_a_request_is_silent_by_how_long_others_were():
    durations = Durations()
    durations.add(0.45, 4 << 20, 0.05)
    assert durations.silent_seconds == 5.0, "nothing is known"
    for _ in range(100):
        durations.add(0.45, 4 << 20, 0.05)
    assert durations.silent_seconds == 0.3
    for _ in range(300):
        durations.add(3.0, 4 << 20, 0.4)
    assert durations.silent_seconds == pytest.approx(1.2)
    for _ in range(300):
        durations.add(3.0, 4 << 20)
    assert durations.silent_seconds == pytest.approx(1.2), "who is told of a range once it is there knows nothing of it"
