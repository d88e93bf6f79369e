"""Prints the current activity on standard error at intervals, so that a command is never silent for long."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from levanter.io import printable

LOG_EVERY = 5
"""In a log file, only every so many ticks are written."""


@contextmanager
def heartbeat(stream: IO[str], *, every: float = 2.0) -> Iterator[Callable[[str], None]]:
    """Prints the current activity on `stream` and how long it has taken; a terminal shows one updated line.

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

    def start(what: str) -> None:
        nonlocal doing, since
        doing, since = what, time.monotonic()
        write(f"[{since - began:5.1f} s] {printable(what)}\n")

    def tick() -> None:
        while not done.wait(every):
            now = time.monotonic()
            # The activity has just been printed by `start`.
            if now - since < every:
                continue
            text = f"[{now - began:5.1f} s] … {doing} ({now - since:.0f} s)"
            if on_terminal:
                # Cut to one terminal line, or the carriage return would not reach its beginning.
                write(text[: shutil.get_terminal_size().columns - 1] + "\r")
            elif int((now - since) / every) % LOG_EVERY == 0:
                write(text + "\n")

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield start
    finally:
        done.set()
        ticker.join()
        write("")
