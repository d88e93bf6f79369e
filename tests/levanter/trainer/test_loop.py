"""The loop with steps of pure Python: what is told, saved and stopped, and when."""

import os
import signal
import threading
from contextlib import contextmanager
from dataclasses import replace

import jax.numpy as jnp
import pytest

from levanter.trainer.hooks import Every
from levanter.trainer.loop import Guard, Loop, NonFiniteError, stop_signal
from levanter.trainer.step import StepMetrics

pytestmark = pytest.mark.quick


def metrics_of(step, **changed):
    numbers = {
        "loss": 10.0 - step,
        "weight": 4.0,
        "grad_norm": 1.0,
        "update_norm": 0.5,
        "parameter_norm": 2.0,
        "learning_rate": 0.1,
    }
    return StepMetrics(**{name: jnp.float32(value) for name, value in {**numbers, **changed}.items()})


class Steps:
    """A state is the list of the batches it has seen."""

    def __init__(self, bad=None, **changed):
        self.bad, self.changed, self.seen = bad, changed, []

    def __call__(self, step):
        def run(state, batch):
            self.seen.append(step)
            return [*state, batch], metrics_of(step, **(self.changed if step == self.bad else {}))

        return run


class Record:
    """A pause that keeps what it saw."""

    def __init__(self, every):
        self.every, self.saw = every, {}

    def due(self, taken):
        return taken % self.every == 0

    def __call__(self, taken, state):
        self.saw[taken] = list(state)


def batches(first, stop):
    return ((n, f"batch {n}") for n in range(first, stop))


def test_every_step_is_told_once_in_order_and_pauses_see_the_state_between():
    told, record = [], Record(3)
    loop = Loop(step_of=Steps(), listeners=[told.append], pauses=[record])
    ended = loop.run([], batches(0, 7), first=0)
    assert (ended.taken, ended.preempted) == (7, False)
    assert [report.step for report in told] == list(range(7))
    assert [report.loss for report in told] == [10.0 - n for n in range(7)]
    assert record.saw == {taken: [f"batch {n}" for n in range(taken)] for taken in (3, 6)}


def test_numbers_are_fetched_a_step_behind_but_before_a_pause():
    steps, order = Steps(), []
    told = lambda report: order.append((report.step, len(steps.seen)))  # noqa: E731
    Loop(step_of=steps, listeners=[told], pauses=[Record(4)]).run([], batches(0, 6), first=0)
    # (step, how many steps had been dispatched when its numbers were there)
    assert order == [(0, 2), (1, 3), (2, 4), (3, 4), (4, 6), (5, 6)]


def test_a_run_that_resumes_counts_on():
    told = []
    ended = Loop(step_of=Steps(), listeners=[told.append]).run([], batches(4, 6), first=4)
    assert ended.taken == 6 and [report.taken for report in told] == [5, 6]
    nothing = Loop(step_of=Steps()).run(["as it was"], batches(6, 6), first=6)
    assert nothing.state == ["as it was"] and nothing.taken == 6


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"loss": float("nan")}, r"step 3: loss nan \(gradient norm 1, update norm 0\.5\)"),
        ({"loss": float("inf")}, r"step 3: loss inf"),
        ({"grad_norm": float("nan"), "update_norm": float("nan")}, r"gradient norm nan, update norm nan \(loss 7\)"),
    ],
)
@pytest.mark.parametrize("every", [1, 2])
def test_nothing_is_saved_behind_a_bad_number(changed, message, every):
    record = Record(every)
    guard = Guard(last_checkpoint=lambda: f"the last checkpoint is of step {max(record.saw)}")
    loop = Loop(step_of=Steps(bad=3, **changed), pauses=[record], guard=guard)
    with pytest.raises(NonFiniteError, match=message) as caught:
        loop.run([], batches(0, 9), first=0)
    # Step 3 is the fourth: what is there is from before it.
    assert max(record.saw) == (3 if every == 1 else 2)
    assert f"the last checkpoint is of step {max(record.saw)}" in str(caught.value)


def test_a_guard_that_is_off_goes_on():
    told = []
    off = Guard(nan=False, inf=True)
    Loop(step_of=Steps(bad=1, loss=float("nan")), listeners=[told.append], guard=off).run([], batches(0, 3), first=0)
    assert [report.loss == report.loss for report in told] == [True, False, True]
    with pytest.raises(NonFiniteError, match="loss inf"):
        Loop(step_of=Steps(bad=1, loss=float("inf")), guard=off).run([], batches(0, 3), first=0)


def test_the_time_of_pauses_is_not_the_time_of_steps():
    now = [0.0]

    class Slow(Record):
        def __call__(self, taken, state):
            now[0] += 100.0

    def step_of(step):
        def run(state, batch):
            now[0] += 1.0
            return state, metrics_of(step)

        return run

    told = []
    Loop(step_of=step_of, listeners=[told.append], pauses=[Slow(2)], clock=lambda: now[0]).run(
        [], batches(0, 6), first=0
    )
    assert sum(report.seconds for report in told) == 6.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_behind_the_step_that_is_under_way(number):
    before = signal.getsignal(number)
    told = []

    def tell(report):
        told.append(report.step)
        if report.step == 2:
            os.kill(os.getpid(), number)

    slow = Record(4)
    with stop_signal() as stopping:
        assert not stopping()
        loop = Loop(step_of=Steps(), listeners=[tell], pauses=[slow], stopping=stopping)
        ended = loop.run([], batches(0, 100), first=0)
    # Saving is the caller's; nothing else is begun.
    assert not slow.saw
    assert ended.preempted and ended.taken == 4 == len(ended.state)
    assert told == [0, 1, 2, 3]
    assert signal.getsignal(number) is before


def test_what_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signal() as stopping:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stopping()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread_there_are_no_signals():
    answers = []

    def ask():
        with stop_signal() as stopping:
            answers.append(stopping())

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert answers == [False]


def test_every_leaves_the_end_to_the_run():
    every = Every(steps=5, action=lambda taken, state: None, until=10)
    assert [n for n in range(1, 11) if every.due(n)] == [5]


def test_what_was_watched_is_fetched_only_when_it_is_due():
    from levanter.trainer.watch import Watched

    def step_of(step):
        watched = Watched(norms={"grads": jnp.full(2, step)}, histograms={})
        return lambda state, batch: (state, replace(metrics_of(step), watched=watched))

    told = []
    Loop(step_of=step_of, listeners=[told.append], watched=lambda step: step % 3 == 0).run([], batches(0, 5), first=0)
    seen = {r.step: None if r.watched is None else r.watched.norms["grads"].tolist() for r in told}
    assert seen == {0: [0, 0], 1: None, 2: None, 3: [3, 3], 4: None}


def test_pauses_are_told_to_whoever_watches_the_time():
    order = []

    @contextmanager
    def around():
        order.append("rest")
        yield
        order.append("go on")

    class Note(Record):
        def __call__(self, taken, state):
            order.append(taken)

    Loop(step_of=Steps(), pauses=[Note(2)], around_pauses=around).run([], batches(0, 5), first=0)
    assert order == ["rest", 2, "go on", "rest", 4, "go on"]
