"""Ctrl-C and termination signals: no interrupt is lost, and SIGTERM releases leases before the process dies of it.

Python raises `KeyboardInterrupt` wherever the main thread happens to be. Inside a callback that may not raise (one of
the garbage collector's, which JAX installs, or a destructor) the exception is dropped with a note and the program
continues; it is then raised once more. While the main thread is inside a library (a compiler runs for minutes) or waits
for a checkpoint to be written, the exception is not raised before that call returns. A second thread, which receives
the signal at once through a pipe, then prints what the process is waiting for, and a second Ctrl-C ends the process.

SIGTERM and SIGHUP end a process with nothing to save: the same thread releases its leases and re-raises the signal. A
run that saves itself first handles these signals on its own (`trainer.loop.stop_signal`), so `terminate` checks whose
handler is installed.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from levanter.io import release_all

RERAISE_SECONDS = 0.05
"""Seconds until a dropped interrupt is raised again."""
MESSAGE_SECONDS = 1.0
"""Seconds until a message is printed if an interrupt has not ended the program."""
INTERRUPTED = 130
PENDING_MESSAGE = (
    "interrupted: ending as soon as the current operation returns (the compiler, or a checkpoint being written); "
    "press Ctrl-C again to end at once"
)

TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a process without an error of its own."""
RELEASE_SECONDS = 5.0
"""Seconds that releasing leases may take at termination: the storage itself may be what fails."""


@dataclass
class Interrupts:
    """The interrupts that a program has received.

    Attributes:
        received: whether an interrupt was received.
        delegated: whether a session handles interrupts itself and continues.
    """

    received: bool = False
    delegated: bool = False


_current = Interrupts()


def raise_if_interrupted() -> None:
    """Raises an interrupt that a library caught and swallowed; called between two phases of the work.

    Libraries swallow interrupts around imports that may fail, and in callbacks.

    Raises:
        KeyboardInterrupt: an interrupt was received since `interrupts_retained` began.
    """
    if _current.received:
        raise KeyboardInterrupt


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Raises an interrupt after the block instead of inside it: for imports, which cannot handle interrupts.

    Some modules swallow them, and C++ modules that are interrupted during initialization abort the process. If the
    block takes long, a message is printed, and a second Ctrl-C ends the process.

    Raises:
        KeyboardInterrupt: an interrupt was received inside the block.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def record(number: int, frame: FrameType | None) -> None:
        del number, frame
        _current.received = True

    signal.signal(signal.SIGINT, record)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    raise_if_interrupted()


@contextmanager
def interrupts_delegated(handle: Callable[[], object]) -> Iterator[None]:
    """Calls `handle` for every Ctrl-C in the block, on the main thread, instead of raising: for a terminal session.

    Args:
        handle: called without arguments; may raise KeyboardInterrupt.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def handler(number: int, frame: FrameType | None) -> None:
        del number, frame
        handle()

    signal.signal(signal.SIGINT, handler)
    _current.delegated = True
    try:
        yield
    finally:
        _current.delegated = False
        signal.signal(signal.SIGINT, before)


@contextmanager
def interrupts_retained(
    *, message_seconds: float = MESSAGE_SECONDS, end: Callable[[int], object] = os._exit
) -> Iterator[Interrupts]:
    """Raises a dropped interrupt once more in the main thread, and ends the process at the second Ctrl-C.

    Args:
        message_seconds: seconds until a message about a pending interrupt.
        end: ends the process with an exit code, without cleaning up.
    """
    injected = _Counter()
    _current.received = False
    # Python calls this hook for exceptions that it cannot raise: in destructors and GC callbacks.
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if unraisable.exc_type is None or not issubclass(unraisable.exc_type, KeyboardInterrupt):
            before(unraisable)
            return
        # An exception raised inside this hook would be dropped as well, so a timer sends the signal again.
        main = threading.main_thread().ident
        assert main is not None

        def raise_again() -> None:
            injected.add()
            signal.pthread_kill(main, signal.SIGINT)

        timer = threading.Timer(RERAISE_SECONDS, raise_again)
        timer.daemon = True
        timer.start()

    sys.unraisablehook = hook
    try:
        with _receipt_recorded(), _signals_watched(injected, message_seconds, end):
            yield _current
    finally:
        if sys.unraisablehook is hook:
            sys.unraisablehook = before


@contextmanager
def _receipt_recorded() -> Iterator[None]:
    """Records each interrupt before Python's own handler raises it."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield
        return

    def handler(number: int, frame: FrameType | None) -> None:
        _current.received = True
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Counter:
    """Counts SIGINTs that this module sent itself, so that they are not taken for a second Ctrl-C."""

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0

    def add(self) -> None:
        with self._lock:
            self._count += 1

    def take(self) -> bool:
        with self._lock:
            pending = self._count > 0
            self._count -= pending
            return pending


@contextmanager
def _signals_watched(injected: _Counter, message_seconds: float, end: Callable[[int], object]) -> Iterator[None]:
    """Runs a thread that reads the signals of the process from the wakeup pipe, as they arrive."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # The C-level signal handler writes each signal number here even while the main thread runs native code.
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    over = threading.Event()

    def print_pending() -> None:
        if not over.wait(message_seconds):
            print(f"\n{PENDING_MESSAGE}", file=sys.stderr, flush=True)

    def watch() -> None:
        presses = 0
        while number := os.read(read_end, 1):
            # Signals that this module sent itself, and those that a session handles, are not a user's second Ctrl-C.
            if terminate(number[0]) or number[0] != signal.SIGINT or injected.take() or _current.delegated:
                continue
            presses += 1
            if presses == 1:
                threading.Thread(target=print_pending, daemon=True, name="interrupted").start()
            else:
                end(INTERRUPTED)
        os.close(read_end)

    thread = threading.Thread(target=watch, daemon=True, name="interrupts")
    thread.start()
    try:
        with termination_handled():
            yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        # The thread ends with the pipe.
        os.close(write_end)
        thread.join()


def _deferred_handler(number: int, frame: FrameType | None) -> None:
    """Does nothing: Python also writes the signal number into the wakeup pipe, which the thread reads."""
    del number, frame


@contextmanager
def termination_handled() -> Iterator[None]:
    """Installs a handler for termination signals that have none; only the main thread may."""
    handled = [number for number in TERMINATION_SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    for number in handled:
        signal.signal(number, _deferred_handler)
    try:
        yield
    finally:
        for number in handled:
            if signal.getsignal(number) is _deferred_handler:
                signal.signal(number, signal.SIG_DFL)


def terminate(number: int) -> bool:
    """Ends the process by a signal, from any thread; returns False if `termination_handled` does not handle it."""
    if number not in TERMINATION_SIGNALS or signal.getsignal(number) is not _deferred_handler:
        return False
    releasing = threading.Thread(target=release_all, daemon=True, name="releasing leases")
    releasing.start()
    releasing.join(RELEASE_SECONDS)
    # Python sets handlers only in the main thread, so libc resets the default one. The parent process then sees that
    # this process died of the signal.
    ctypes.CDLL(None).signal(number, 0)
    os.kill(os.getpid(), number)
    return True
