"""The training loop: runs the steps, reports the numbers of each, and pauses between steps.

A step is *dispatched* to the devices, and its numbers are *fetched* one step later, so that the host prepares the next
batch while the devices compute. *Listeners* are called for every step once its numbers are on the host. *Pauses* (a
checkpoint, an export, an evaluation) get the state between two steps. Before a pause, the numbers of the last step are
fetched and checked, so that no state after a NaN loss is ever saved.

The loop itself uses no files and no trackers: it calls functions.
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
    """An action between two steps."""

    def due(self, taken: int) -> bool:
        """Whether the pause is due after `taken` steps; called once after each step."""
        ...

    def __call__(self, taken: int, state: TrainState) -> None:
        """Performs the action. The state must not be kept: the next step consumes it."""
        ...


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the loop ended.

    Attributes:
        state: after the last step.
        taken: steps taken since the beginning of the run.
        preempted: whether a stop was requested before the last step.
    """

    state: TrainState
    taken: int
    preempted: bool


@dataclass(frozen=True, kw_only=True)
class Loop(Generic[B]):
    """The training loop, for batches of type `B`.

    Attributes:
        step_of: step number → step function.
        listeners: called with the report of every step, in order.
        pauses: checked after every step, in order.
        guard: checks the numbers of every step.
        around_pauses: a context for the duration of the pauses.
        watched: step number → whether the watched numbers of the step are fetched.
        stopping: whether the run must stop after the current step.
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

        # Fetches and reports the numbers of the last dispatched step, if that has not happened yet.
        def settle() -> None:
            nonlocal behind, since, paused
            if behind is None:
                return
            (step, metrics, waiting), behind = behind, None
            if not self.watched(step):
                # Not fetched: the watched vectors stay on the device and are freed.
                metrics = replace(metrics, watched=None)
            # Blocks until the step is done: this is where the host waits for the devices.
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
            # The guard first: a step that ends the run is not logged as one of it.
            self.guard.check(report)
            for tell in self.listeners:
                tell(report)

        wait_started = self.clock()
        for step, batch in batches:
            assert step == taken, (step, taken)
            waited = self.clock() - wait_started
            # Dispatch step n, then fetch the numbers of step n − 1: the devices never wait for the host's reports.
            state, metrics = self.step_of(step)(state, batch)
            settle()
            behind, taken = (step, metrics, waited), step + 1
            due = [pause for pause in self.pauses if pause.due(taken)]
            stop = self.stopping()
            if due or stop:
                # Checks this step's numbers before anyone sees its state.
                settle()
            if stop:
                # A preempted process has seconds left. The caller saves the state; pauses that are due are skipped.
                return Ended(state=state, taken=taken, preempted=True)
            if due:
                began = self.clock()
                with self.around_pauses():
                    for pause in due:
                        pause(taken, state)
                paused = self.clock() - began
                # The time of the pause belongs to no step.
                since += paused
            wait_started = self.clock()
        settle()
        return Ended(state=state, taken=taken, preempted=False)


STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""The signals of schedulers, and of a terminal that closes."""


@contextmanager
def stop_signal(numbers: Sequence[int] = STOP_SIGNALS) -> Iterator[Callable[[], bool]]:
    """Replaces the default action of some signals by a request to stop; yields a function for `Loop.stopping`.

    Python handles signals in the main thread only; in other threads no stop is ever requested. Signals that the process
    was started to ignore (`nohup`) stay ignored.
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
