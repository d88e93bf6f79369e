"""Reports current activity on standard error, so that nothing is silent for long."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

LOGGED = 5
"""In a log, only every so many ticks are written."""


@contextmanager
def ticking(stream: IO[str], *, every: float = 2.0) -> Iterator[Callable[[str], None]]:
    """Prints the current activity on `stream`, and how long it has taken; on a terminal in one line.

    Args:
        stream: standard error.
        every: seconds between two updates.
    """
    began = since = time.monotonic()
    doing = ""
    done = threading.Event()
    on_terminal = stream.isatty()

    def write(text: str) -> None:
        stream.write(("\x1b[2K" if on_terminal else "") + text)
        stream.flush()

    def say(what: str) -> None:
        nonlocal doing, since
        doing, since = what, time.monotonic()
        write(f"[{since - began:5.1f} s] {what}\n")

    def tick() -> None:
        while not done.wait(every):
            now = time.monotonic()
            if now - since < every:
                continue
            text = f"[{now - began:5.1f} s] … {doing} ({now - since:.0f} s)"
            if on_terminal:
                # At most one terminal line, or the carriage return would not reach its beginning.
                write(text[: shutil.get_terminal_size().columns - 1] + "\r")
            elif int((now - since) / every) % LOGGED == 0:
                write(text + "\n")

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield say
    finally:
        done.set()
        ticker.join()
        write("")
