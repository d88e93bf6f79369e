"""A polite end (SIGTERM, SIGHUP) of a process with nothing to save: it gives its leases back and dies of the signal.

A run that saves itself first handles these signals (`trainer.loop.stop_signal`), which is why `ends` looks at who does.
The main thread may be inside of a compiler for minutes, so the thread that reads the process's signals asks.
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
"""So long giving leases back may take: storage may be what is out of order."""


def _left_to_a_thread(number: int, frame: FrameType | None) -> None:
    """Handles a signal by having Python write it into the pipe that the thread reads."""
    del number, frame


@contextmanager
def polite_ends() -> Iterator[None]:
    """Takes over the signals that nobody handles; only the main thread can."""
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
    """Ends the process by a signal, from any thread, if it is one of those that were taken over; else returns False."""
    if number not in POLITE or signal.getsignal(number) is not _left_to_a_thread:
        return False
    giving = threading.Thread(target=release_all, daemon=True, name="giving leases back")
    giving.start()
    giving.join(SECONDS)
    # Python sets actions in the main thread only. Whoever waits for this process sees that it died of the signal.
    ctypes.CDLL(None).signal(number, 0)
    os.kill(os.getpid(), number)
    return True
