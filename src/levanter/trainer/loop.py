"""The training loop: steps one after the other, what is said of each, and what happens between two of them.

A step is *dispatched* to the devices and its numbers are *fetched* one step later, so that the host makes the next
batch while the devices work. *Listeners* hear of every step when its numbers are there. *Pauses* (a checkpoint, an
export, an evaluation) see the state between two steps; before one of them, the last step's numbers are fetched and
guarded, so that no state behind a loss that is not a number is ever saved.

The loop knows neither files nor trackers: it is given functions.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

import jax

from levanter.trainer.nan_guard import Guard as Guard
from levanter.trainer.nan_guard import NonFiniteError as NonFiniteError
from levanter.trainer.report import StepReport as StepReport
from levanter.trainer.step import StepMetrics
from levanter.trainer.train_state import TrainState

B = TypeVar("B")

Step = Callable[[TrainState, B], tuple[TrainState, StepMetrics]]


class Pause(Protocol):
    """Something that happens between two steps."""

    def due(self, taken: int) -> bool:
        """Whether it happens after so many steps; asked once after each."""
        ...

    def __call__(self, taken: int, state: TrainState) -> None:
        """Does it. The state is donated to the next step when this returns."""
        ...


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the loop ended.

    Attributes:
        state: behind the last step.
        taken: steps taken since the beginning of the run.
        preempted: whether it was asked to stop before its last step.
    """

    state: TrainState
    taken: int
    preempted: bool


@dataclass(frozen=True, kw_only=True)
class Loop(Generic[B]):
    """What the loop is made of, for batches of type `B`.

    Attributes:
        step_of: the step function of a step, by its number.
        listeners: told of every step, in order.
        pauses: asked after every step, in order.
        guard: looks at every step's numbers.
        around_pauses: entered for as long as pauses take.
        watched: whether what was watched in a step is fetched, by its number.
        stopping: whether the run is to stop after the current step.
        clock: seconds, monotonic.
    """

    step_of: Callable[[int], Step[B]]
    listeners: Sequence[Callable[[StepReport], None]] = ()
    pauses: Sequence[Pause] = ()
    guard: Guard = field(default_factory=Guard)
    around_pauses: Callable[[], AbstractContextManager[object]] = nullcontext
    watched: Callable[[int], bool] = lambda _: True
    stopping: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic

    def run(self, state: TrainState, batches: Iterable[tuple[int, B]], *, first: int) -> Ended:
        """Takes a step with every batch.

        Args:
            state: before step `first`; it is consumed.
            batches: (step, batch), from step `first` on.
            first: the first step's number.

        Raises:
            NonFiniteError: see `guard`.
        """
        taken, since, waited, paused = first, self.clock(), 0.0, 0.0
        behind: tuple[int, StepMetrics, float] | None = None

        def settle() -> None:
            nonlocal behind, since, paused
            if behind is None:
                return
            (step, metrics, waiting), behind = behind, None
            if not self.watched(step):
                metrics = replace(metrics, watched=None)
            numbers = {name: value for name, value in vars(jax.device_get(metrics)).items() if value is not None}
            watched, skipped = numbers.pop("watched", None), bool(numbers.pop("skipped", False))
            terms = {name: float(value) for name, value in numbers.pop("terms").items()}
            now = self.clock()
            report = StepReport(
                step=step,
                seconds=now - since,
                waited=waiting,
                paused=paused,
                skipped=skipped,
                watched=watched,
                terms=terms,
                **{name: float(value) for name, value in numbers.items()},
            )
            since, paused = now, 0.0
            self.guard.check(report)
            for tell in self.listeners:
                tell(report)

        wait_started = self.clock()
        for step, batch in batches:
            assert step == taken, (step, taken)
            waited = self.clock() - wait_started
            state, metrics = self.step_of(step)(state, batch)
            settle()
            behind, taken = (step, metrics, waited), step + 1
            due = [pause for pause in self.pauses if pause.due(taken)]
            stop = self.stopping()
            if due or stop:
                settle()
            if stop:
                # Who is told to end has seconds: saving is the caller's, everything else can wait.
                return Ended(state=state, taken=taken, preempted=True)
            if due:
                began = self.clock()
                with self.around_pauses():
                    for pause in due:
                        pause(taken, state)
                paused = self.clock() - began
                since += paused
            wait_started = self.clock()
        settle()
        return Ended(state=state, taken=taken, preempted=False)


STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""What schedulers send, and what a terminal that is closed does."""


@contextmanager
def stop_signal(numbers: Sequence[int] = STOP_SIGNALS) -> Iterator[Callable[[], bool]]:
    """Whether the process was told to end, instead of ending at once; for `Loop.stopping`.

    Signals reach a program's main thread only: elsewhere the answer is always no. One that the process was started to
    ignore (`nohup`) stays ignored.
    """
    stop_requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop_requested.is_set
        return
    handled = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda *_: stop_requested.set()) for number in handled}
    try:
        yield stop_requested.is_set
    finally:
        for number, action in before.items():
            signal.signal(number, action)
