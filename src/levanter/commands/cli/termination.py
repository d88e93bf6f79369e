"""Termination (SIGTERM, SIGHUP) of a process with nothing to save: it releases its leases and dies of the signal.

A run that saves itself first handles these signals (`trainer.loop.stop_signal`), so `ends` checks who handles them. The
main thread may be inside a compiler for minutes, so the thread that reads the process's signals does this.
"""

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from levanter.io import release_all

POLITE = (signal.SIGTERM, signal.SIGHUP)
SECONDS = 5.0
"""Seconds that releasing leases may take: the storage itself may be what fails."""


def _left_to_a_thread(number: int, frame: FrameType | None) -> None:
    """Handles a signal by letting Python write it into the pipe that the thread reads."""
    del number, frame


@contextmanager
def polite_ends() -> Iterator[None]:
    """Takes over the signals that have no handler; only the main thread can."""
    taken = [number for number in POLITE if signal.getsignal(number) == signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _left_to_a_thread)
    try:
        yield
    finally:
        for number in taken:
            if signal.getsignal(number) is _left_to_a_thread:
                signal.signal(number, signal.SIG_DFL)


def ends(number: int) -> bool:
    """Ends the process by a signal, from any thread, if that signal was taken over; else returns False."""
    if number not in POLITE or signal.getsignal(number) is not _left_to_a_thread:
        return False
    giving = threading.Thread(target=release_all, daemon=True, name="releasing leases")
    giving.start()
    giving.join(SECONDS)
    # Python sets actions in the main thread only. Whoever waits for this process sees that it died of the signal.
    ctypes.CDLL(None).signal(number, 0)
    os.kill(os.getpid(), number)
    return True
