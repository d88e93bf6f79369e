"""Ctrl-C that cannot get lost, and that says so if it has to wait.

Python raises `KeyboardInterrupt` wherever the main thread happens to be. Inside a callback that may not raise (one of
the garbage collector's, which JAX installs, or a destructor) it is dropped with a note, and the program continues: then
it is raised once more. While the main thread is inside a library (a compiler takes minutes) or waits for a checkpoint
to be written, it is not raised before that returns: then a second thread, which the signal reaches at once, says what
is being waited for, and ends the process when Ctrl-C is pressed again. Half-written files then count for nothing.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from levanter.commands.cli.termination import ends, polite_ends

AGAIN = 0.05
"""Seconds until a dropped interrupt is raised again."""
PATIENCE = 1.0
"""Seconds that an interrupt may take to end the program before a message is printed."""
INTERRUPTED = 130
WAITING = (
    "interrupted: ending as soon as the current operation returns (the compiler, or a checkpoint being written); "
    "press Ctrl-C again to end at once"
)


@dataclass
class Interrupts:
    """The interrupts that a program has received.

    Attributes:
        received: whether there was one.
        taken: whether somebody deals with them, and goes on.
    """

    received: bool = False
    taken: bool = False


_current = Interrupts()


def raise_if_interrupted() -> None:
    """Raises an interrupt that somebody else caught and swallowed; to be called between two parts of the work.

    Libraries do: around imports that may fail, and in callbacks.

    Raises:
        KeyboardInterrupt: there was one since `interrupts_kept` began.
    """
    if _current.received:
        raise KeyboardInterrupt


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Raises an interrupt after the block instead of inside it: for imports, which cannot handle it.

    Some swallow it, and C++ modules that are interrupted during initialization abort the process. If it takes long,
    the user is told, and the second Ctrl-C ends the process.

    Raises:
        KeyboardInterrupt: there was one.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        del number, frame
        _current.received = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    raise_if_interrupted()


@contextmanager
def interrupts_taken(take: Callable[[], object]) -> Iterator[None]:
    """Hands every Ctrl-C in the block to `take`, on the main thread, and to nobody else: a session at a terminal.

    Args:
        take: what one does; it may raise KeyboardInterrupt.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def handler(number: int, frame: FrameType | None) -> None:
        del number, frame
        take()

    signal.signal(signal.SIGINT, handler)
    _current.taken = True
    try:
        yield
    finally:
        _current.taken = False
        signal.signal(signal.SIGINT, before)


@contextmanager
def interrupts_kept(*, patience: float = PATIENCE, end: Callable[[int], object] = os._exit) -> Iterator[Interrupts]:
    """Raises a dropped interrupt once more in the main thread, and ends the process at the second Ctrl-C.

    Args:
        patience: seconds until a message about a waiting interrupt.
        end: ends the process with an exit code, without cleaning up.
    """
    own = _Count()
    _current.received = False
    before = sys.unraisablehook

    def hook(found: Any) -> None:
        if found.exc_type is None or not issubclass(found.exc_type, KeyboardInterrupt):
            before(found)
            return
        # Not from here: what is raised inside this hook is dropped as well.
        main = threading.main_thread().ident
        assert main is not None

        def raise_again() -> None:
            own.add()
            signal.pthread_kill(main, signal.SIGINT)

        timer = threading.Timer(AGAIN, raise_again)
        timer.daemon = True
        timer.start()

    sys.unraisablehook = hook
    try:
        with _noted(), _watched(own, patience, end):
            yield _current
    finally:
        if sys.unraisablehook is hook:
            sys.unraisablehook = before


@contextmanager
def _noted() -> Iterator[None]:
    """Notes each interrupt before Python's own handler raises it."""
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


class _Count:
    """Interrupts that come from here, and not from a user."""

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0

    def add(self) -> None:
        with self._lock:
            self._count += 1

    def take(self) -> bool:
        with self._lock:
            self._count -= 1 if (found := self._count > 0) else 0
            return found


@contextmanager
def _watched(own: _Count, patience: float, end: Callable[[int], object]) -> Iterator[None]:
    """Has a thread read the signals of the process, which the system writes into a pipe as they arrive."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    over = threading.Event()

    def say() -> None:
        if not over.wait(patience):
            print(f"\n{WAITING}", file=sys.stderr, flush=True)

    def watch() -> None:
        presses = 0
        while number := os.read(reading, 1):
            if ends(number[0]) or number[0] != signal.SIGINT or own.take() or _current.taken:
                continue
            presses += 1
            if presses == 1:
                threading.Thread(target=say, daemon=True, name="interrupted").start()
            else:
                end(INTERRUPTED)
        os.close(reading)

    thread = threading.Thread(target=watch, daemon=True, name="interrupts")
    thread.start()
    try:
        with polite_ends():
            yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        # The thread ends with the pipe.
        os.close(writing)
        thread.join()
