"""Progress: rates and times by hand, lines in the log, and the bar on a terminal."""

import io
import logging
import time

import pytest

from levanter.io.progress import Meter, Progress, amount, duration

pytestmark = pytest.mark.quick


class FakeClock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_rates_and_time_left():
    clock = FakeClock()
    meter = Meter(total=1000, unit="tokens", clock=clock)
    assert meter.describe() == "0 tokens / 1,000 tokens, 0 %, 0 tokens/s, time left unknown"
    for _ in range(10):
        clock.now += 1
        meter.advance_to(meter.done + 10)
    assert meter.rate == pytest.approx(10) and meter.seconds_left == pytest.approx(90)
    assert meter.describe() == "100 tokens / 1,000 tokens, 10 %, 10 tokens/s, 1:30 left"
    meter.advance_to(50)  # never backwards
    assert meter.done == 100


def test_the_rate_forgets_the_distant_past():
    clock = FakeClock()
    meter = Meter(total=None, unit="bytes", clock=clock)
    for seconds, per_second in ((100, 1.0), (100, 5.0)):
        for _ in range(seconds):
            clock.now += 1
            meter.advance_to(meter.done + per_second)
    assert meter.rate == pytest.approx(5) and meter.average_rate == pytest.approx(3)
    assert meter.seconds_left is None


def test_a_job_that_stands_still_shows_it():
    clock = FakeClock()
    meter = Meter(total=100, unit="rows", clock=clock)
    clock.now += 5
    meter.advance_to(50)
    clock.now += 600
    meter.advance_to(50)
    clock.now += 60
    meter.advance_to(50)
    assert meter.rate < 0.1


def test_a_hundred_percent_means_done():
    clock = FakeClock()
    meter = Meter(total=1000, unit="rows", clock=clock)
    meter.advance_to(999)
    assert "99 %" in meter.describe()
    clock.now += 10
    meter.advance_to(1000)
    assert meter.summary() == "1,000 rows in 0:10, 100 rows/s" and meter.seconds_left == 0


def test_the_log_gets_a_line_at_once_and_then_every_ten_seconds(caplog):
    caplog.set_level(logging.INFO)
    clock = FakeClock()
    with Progress("loading", total=2**30, unit="bytes", bar=False, clock=clock) as progress:
        assert len(caplog.records) == 1
        progress._stop.set()  # its own thread would look between two lines of this test
        for second in range(1, 31):
            clock.now += 1
            progress.advance_to(second * 2**20, note=f"layer {second}")
            progress.tick()
        assert len(caplog.records) == 4
        assert caplog.messages[1] == "loading: 10.00 MiB / 1.00 GiB, 0 %, 1.00 MiB/s, 16:54 left (layer 10)"
    assert caplog.messages[-1] == "loading: done, 30.00 MiB / 1.00 GiB in 0:30, 1.00 MiB/s"


def test_an_idle_job_still_writes_lines(caplog):
    caplog.set_level(logging.INFO)
    with Progress("compiling", total=None, unit="programs", bar=False, interval=0.05):
        deadline = time.monotonic() + 100
        while len(caplog.records) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert sum("compiling: 0 programs" in message for message in caplog.messages) >= 3


def test_a_failed_job_says_where_it_stopped(caplog):
    caplog.set_level(logging.INFO)

    def fail():
        with Progress("evaluating", total=10, unit="rows", bar=False) as progress:
            progress.advance(3)
            raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        fail()
    assert caplog.messages[-1] == "evaluating: stopped at 3 rows / 10 rows"


def test_other_processes_are_silent(caplog):
    caplog.set_level(logging.INFO)
    stream = io.StringIO()
    with Progress("loading", total=10, unit="rows", show=False, bar=True, stream=stream) as progress:
        progress.advance(10)
    assert not caplog.records and not stream.getvalue()


def test_a_lazy_one_is_silent_until_there_is_something(caplog):
    caplog.set_level(logging.INFO)
    with Progress("building", total=None, unit="tokens", bar=False, lazy=True):
        pass
    assert not caplog.records
    with Progress("building", total=None, unit="tokens", bar=False, lazy=True) as progress:
        progress.advance_to(7)
        assert len(caplog.records) == 1
    assert caplog.messages[-1].startswith("building: done, 7 tokens")


def test_the_bar_shows_the_numbers():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    with Progress("loading", total=4 * 2**30, unit="bytes", stream=stream) as progress:
        progress.advance_to(2**30, note="transformer.layers")
        progress.tick()
        progress.advance_to(4 * 2**30)
    shown = stream.getvalue()
    assert "loading" in shown and "1.00 GiB / 4.00 GiB, 25 %" in shown and "100 %" in shown


@pytest.mark.parametrize(
    ("count", "unit", "expected"),
    [
        (0, "bytes", "0 B"),
        (1536, "bytes", "1.50 KiB"),
        (811.7e9, "bytes", "755.95 GiB"),
        (12345, "tokens", "12,345 tokens"),
        (2_500_000, "tokens", "2.50M tokens"),
        (0.5, "rows", "0.5 rows"),
    ],
)
def test_amounts(count, unit, expected):
    assert amount(count, unit) == expected


def test_durations():
    assert [duration(s) for s in (0, 7.4, 750, 3723)] == ["0:00", "0:07", "12:30", "1:02:03"]


@pytest.mark.parametrize("step", [7.0, 20.0, 45.0])
def test_the_time_left_of_a_steady_job_falls_steadily(step):
    """Units arrive in steps (batches); between them the rate up to now falls, but the time left must not rise."""
    clock = FakeClock()
    meter = Meter(total=1000, unit="tokens", clock=clock)
    shown = []
    for second in range(1, int(10 * step)):
        clock.now += 1
        if second % step == 0:
            meter.advance_to(meter.done + 100)
        if meter.done:
            shown.append((second, meter.seconds_left))
    # The end is at 10 steps, and every estimate says so.
    assert len(shown) > 50 and all(left == pytest.approx(10 * step - second, abs=0.01) for second, left in shown)


def test_a_line_that_did_not_change_is_repeated_ever_more_rarely(caplog):
    clock = FakeClock()
    with caplog.at_level(logging.INFO):
        progress = Progress("scoring", total=100, unit="rows", clock=clock, bar=False)
        for second in range(600):
            clock.now += 1
            if second == 300:
                progress.advance(10)
            progress.tick()
    lines = [record.message for record in caplog.records]
    # After 0, 10, 30, 70 and 150 seconds, at the change, and then again.
    assert [line.split("/")[0] for line in lines] == ["scoring: 0 rows "] * 5 + ["scoring: 10 rows "] * 5
