"""The watchdog: when a step is taken to hang, and what is written then."""

import threading
from datetime import timedelta

import pytest

from levanter.trainer.config_blocks import ProgressWatchdogConfig
from levanter.trainer.report import StepReport
from levanter.trainer.watchdog import Watchdog

pytestmark = pytest.mark.quick


def report(step, seconds):
    return StepReport(
        step=step,
        loss=1.0,
        weight=1.0,
        grad_norm=1.0,
        update_norm=1.0,
        parameter_norm=1.0,
        learning_rate=0.1,
        seconds=seconds,
        waited=0.0,
    )


@pytest.fixture
def now():
    return [0.0]


@pytest.fixture
def dog(tmp_path, now):
    return Watchdog(file=tmp_path / "logs/stacks.txt", least=5.0, clock=lambda: now[0])


def step(dog, now, number, seconds):
    now[0] += seconds
    dog(report(number, seconds))


def test_ten_times_the_median_writes_the_stacks_of_all_threads_once(dog, now):
    inside, let_go = threading.Event(), threading.Event()

    def stands_here_for_the_test():
        inside.set()
        let_go.wait(30)

    other = threading.Thread(target=stands_here_for_the_test)
    other.start()
    assert inside.wait(30)
    try:
        # The first step compiles: neither judged nor counted.
        for number, seconds in enumerate([100.0, 1.0, 1.0, 3.0]):
            step(dog, now, number, seconds)
        assert dog.limit == 10.0
        now[0] += 9.9
        assert not dog.look()
        now[0] += 0.2
        assert dog.look() and dog.dumps == 1
        now[0] += 1000.0
        assert not dog.look()
        text = dog.file.read_text()
        assert "step 4 has taken 10 s, and 1 s is usual" in text
        assert "stands_here_for_the_test" in text and "test_watchdog.py" in text
        # The next step is judged anew.
        step(dog, now, 4, 1.0)
        now[0] += 10.1
        assert dog.look() and dog.dumps == 2
    finally:
        let_go.set()
        other.join()


def test_short_steps_have_half_a_minute_or_what_is_given(dog, now):
    for number in range(5):
        step(dog, now, number, 0.01)
    assert dog.limit == 5.0
    assert Watchdog(file=dog.file).least == 30.0


def test_pauses_are_no_steps(dog, now):
    for number in range(5):
        step(dog, now, number, 1.0)
    with dog.resting():
        now[0] += 1000.0
        assert not dog.look()
    now[0] += 9.0
    assert not dog.look()
    now[0] += 1.1
    assert dog.look()


def test_nothing_is_judged_before_there_is_a_median(dog, now):
    for number in range(3):
        step(dog, now, number, 1.0)
        now[0] += 1000.0
        assert dog.limit is None and not dog.look()


def test_its_thread_looks_by_itself_and_ends(tmp_path):
    dog = Watchdog(file=tmp_path / "stacks.txt", least=0.0, factor=1.0, tick=0.01)
    with dog:
        for number in range(5):
            dog(report(number, 0.001))
        waiting = threading.Event()
        for _ in range(500):
            if dog.dumps:
                break
            waiting.wait(0.01)
    assert dog.dumps == 1 and dog.file.exists()
    assert not any(thread.name == "step-watchdog" for thread in threading.enumerate())


def test_a_folder_that_cannot_be_written_is_no_reason_to_end_a_run(tmp_path, now):
    (tmp_path / "file").write_text("")
    dog = Watchdog(file=tmp_path / "file/stacks.txt", least=0.0, clock=lambda: now[0])
    for number in range(5):
        step(dog, now, number, 1.0)
    now[0] += 11.0
    assert dog.look() and dog.dumps == 0


def limited(tmp_path, now, **limits):
    """A watchdog that notes exit codes instead of ending the process."""
    codes: list[int] = []
    config = ProgressWatchdogConfig(**{name: timedelta(seconds=seconds) for name, seconds in limits.items()})
    dog = Watchdog(file=tmp_path / "stacks.txt", limits=config, terminate=codes.append, tick=0.01, clock=lambda: now[0])
    return dog, codes


def test_no_limit_is_set_by_default(tmp_path, now):
    dog, _ = limited(tmp_path, now)
    now[0] += 1e9
    assert dog.overdue() is None
    step(dog, now, 0, 1.0)
    now[0] += 1e9
    assert dog.overdue() is None


def test_the_first_step_has_a_limit_of_its_own(tmp_path, now):
    dog, _ = limited(tmp_path, now, startup_timeout=100, step_timeout=1, startup_grace_period=0)
    now[0] += 99.0
    assert dog.overdue() is None
    now[0] += 1.0
    assert "the first step has not ended after 100 s, and trainer.progress_watchdog.startup_timeout" in dog.overdue()
    step(dog, now, 0, 0.5)
    assert dog.overdue() is None


def test_a_step_and_a_pause_have_their_limits_after_the_grace_period(tmp_path, now):
    dog, _ = limited(tmp_path, now, step_timeout=10, process_timeout=50, startup_grace_period=100)
    step(dog, now, 0, 1.0)
    now[0] += 99.0
    assert dog.overdue() is None
    step(dog, now, 1, 1.0)
    now[0] += 9.0
    assert dog.overdue() is None
    now[0] += 1.0
    assert "step_timeout is 10 s" in dog.overdue()
    with dog.resting():
        now[0] += 49.0
        assert dog.overdue() is None
        now[0] += 1.0
        assert "no progress since step 2 after 50 s" in dog.overdue()
    # The end of a pause is progress, and a step begins.
    now[0] += 9.0
    assert dog.overdue() is None


def test_a_run_that_passes_a_limit_leaves_its_stacks_and_exit_code_5(tmp_path, now):
    dog, codes = limited(tmp_path, now, step_timeout=10, startup_grace_period=0)
    with dog:
        step(dog, now, 0, 1.0)
        now[0] += 10.0
        dog._thread.join(30)
    assert codes == [5] and "step_timeout" in dog.file.read_text()
