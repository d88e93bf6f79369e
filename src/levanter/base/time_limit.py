"""`time_limit`: an upper bound on the time that Python code may take."""

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator


class TookTooLong(Exception):
    """The code in a `time_limit` ran longer than the limit."""


class _Watch:
    """Raises `TookTooLong` in threads whose time is up, from one watcher thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: dict[int, float] = {}
        self._thread: threading.Thread | None = None

    def begin(self, seconds: float) -> None:
        with self._lock:
            self._until[threading.get_ident()] = time.monotonic() + seconds
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._look, name="time limits", daemon=True)
                self._thread.start()

    def end(self) -> None:
        # A thread that died, as after a fork, is replaced.
        with self._lock:
            self._until.pop(threading.get_ident(), None)

    def _look(self) -> None:
        while True:
            time.sleep(0.5)
            # The thread may have been interrupted already: then its entry is gone.
            with self._lock:
                now = time.monotonic()
                for thread in [thread for thread, until in self._until.items() if until < now]:
                    # Once only: a second asynchronous exception would hit the handler of the first.
                    del self._until[thread]
                    # Raises in the other thread at its next bytecode instruction. Signals would reach only the main
                    # thread.
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TookTooLong))


_watch = _Watch()


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupts Python code that runs longer; a single call into C is not interrupted, so bound its operands.

    Raises:
        TookTooLong: it does.
    """
    _watch.begin(seconds)
    try:
        yield
    finally:
        _watch.end()
