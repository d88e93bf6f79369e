"""What is being done, said on standard error while it is done, so that nothing is silent for long."""

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
    """Says what is being done on `stream`, and while it takes long, for how long; on a terminal in one line.

    Args:
        stream: standard error.
        every: seconds between two signs of life.
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
                # One line of the terminal, or the carriage would not return to where it began.
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
