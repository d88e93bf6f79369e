"""The training loop: steps one after the other, what is said of each, and what happens between two of them.

A step is *dispatched* to the devices and its numbers are *fetched* one step later, so that the host makes the next
batch while the devices work. *Listeners* hear of every step when its numbers are there. *Pauses* (a checkpoint, an
export, an evaluation) see the state between two steps; before one of them, the last step's numbers are fetched and
guarded, so that no state behind a loss that is not a number is ever saved.

The loop knows neither files nor trackers: it is given functions.
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import jax

from levanter.trainer.loss import LmBatch
from levanter.trainer.state import TrainState
from levanter.trainer.step import StepMetrics

Step = Callable[[TrainState, LmBatch], tuple[TrainState, StepMetrics]]


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What is known of a step once its numbers are fetched.

    Attributes:
        step: its number, from 0.
        loss: nats a token.
        weight: sum of the loss weights.
        grad_norm: of the whole gradient, before it is clipped.
        update_norm: of what was added to the parameters.
        parameter_norm: before the step.
        learning_rate: of the step.
        seconds: since the numbers of the step before, pauses left out; of the first, compilation included.
        waited: seconds of them that the loop waited for its batch.
    """

    step: int
    loss: float
    weight: float
    grad_norm: float
    update_norm: float
    parameter_norm: float
    learning_rate: float
    seconds: float
    waited: float

    @property
    def taken(self) -> int:
        """Steps taken when this one was done."""
        return self.step + 1


class NonFiniteError(ValueError):
    """A step gave a number that is none; the run stopped before its state was saved."""


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Ends a run whose numbers are not finite.

    Attributes:
        nan: whether NaN ends it.
        inf: whether infinity ends it.
        last_checkpoint: what to go back to, for the message.
    """

    nan: bool = True
    inf: bool = True
    last_checkpoint: Callable[[], str] = lambda: "no checkpoint was saved"

    def check(self, report: StepReport) -> None:
        """Looks at the loss, the gradient and the update of a step.

        Raises:
            NonFiniteError: one of them is not finite.
        """
        numbers = {"loss": report.loss, "gradient norm": report.grad_norm, "update norm": report.update_norm}
        bad = {
            name: value
            for name, value in numbers.items()
            if (self.nan and math.isnan(value)) or (self.inf and math.isinf(value))
        }
        if not bad:
            return
        found = ", ".join(f"{name} {value}" for name, value in bad.items())
        others = ", ".join(f"{name} {value:.6g}" for name, value in numbers.items() if name not in bad)
        raise NonFiniteError(
            f"step {report.step}: {found}{f' ({others})' if others else ''}, learning rate {report.learning_rate:.3g}; "
            f"the state after it was not saved; {self.last_checkpoint()}\n"
            "  → trainer.crash_on_nan, trainer.crash_on_inf: false goes on regardless"
        )


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
class Loop:
    """What the loop is made of.

    Attributes:
        step_of: the step function of a step, by its number.
        listeners: told of every step, in order.
        pauses: asked after every step, in order.
        guard: looks at every step's numbers.
        stopping: whether the run is to stop after the step that is under way.
        clock: seconds, monotonic.
    """

    step_of: Callable[[int], Step]
    listeners: Sequence[Callable[[StepReport], None]] = ()
    pauses: Sequence[Pause] = ()
    guard: Guard = field(default_factory=Guard)
    stopping: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic

    def run(self, state: TrainState, batches: Iterable[tuple[int, LmBatch]], *, first: int) -> Ended:
        """Takes a step with every batch.

        Args:
            state: before step `first`; it is consumed.
            batches: (step, batch), from step `first` on.
            first: the first step's number.

        Raises:
            NonFiniteError: see `guard`.
        """
        taken, since, waited = first, self.clock(), 0.0
        behind: tuple[int, StepMetrics, float] | None = None

        def settle() -> None:
            nonlocal behind, since
            if behind is None:
                return
            (step, metrics, waiting), behind = behind, None
            numbers = {name: float(value) for name, value in vars(jax.device_get(metrics)).items()}
            now = self.clock()
            report = StepReport(step=step, seconds=now - since, waited=waiting, **numbers)
            since = now
            self.guard.check(report)
            for tell in self.listeners:
                tell(report)

        asked = self.clock()
        for step, batch in batches:
            assert step == taken, (step, taken)
            waited = self.clock() - asked
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
                for pause in due:
                    pause(taken, state)
                since += self.clock() - began
            asked = self.clock()
        settle()
        return Ended(state=state, taken=taken, preempted=False)


@contextmanager
def stop_signal(number: int = signal.SIGTERM) -> Iterator[Callable[[], bool]]:
    """Whether the process was told to end, instead of ending at once; for `Loop.stopping`.

    Signals reach a program's main thread only: elsewhere the answer is always no.
    """
    told = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield told.is_set
        return
    before = signal.signal(number, lambda *_: told.set())
    try:
        yield told.is_set
    finally:
        signal.signal(number, before)
