"""Ctrl-C that cannot be lost.

Python raises `KeyboardInterrupt` wherever the main thread happens to be. Inside of a callback that may not raise (one
of the garbage collector's, which JAX has, or a destructor) it is dropped with a note, and the program goes on.
"""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

AGAIN = 0.05
"""Seconds until a dropped interrupt is raised anew."""


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """Raises an interrupt that was dropped once more in the main thread, a moment later."""
    before = sys.unraisablehook

    def hook(found: Any) -> None:
        if found.exc_type is None or not issubclass(found.exc_type, KeyboardInterrupt):
            before(found)
            return
        # Not from here: what is raised inside of this hook is dropped as well.
        main = threading.main_thread().ident
        assert main is not None
        timer = threading.Timer(AGAIN, signal.pthread_kill, (main, signal.SIGINT))
        timer.daemon = True
        timer.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        if sys.unraisablehook is hook:
            sys.unraisablehook = before
