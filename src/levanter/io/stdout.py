"""What is printed where it cannot be shown: no reader (`… | head`), no stream (`2>&-`), a terminal of few signs.

A process prepares its standard streams once (`prepare_streams`). While it does work that must not be lost, a terminal
that goes away, or a pipe whose reader does, is no reason to end (`printing_may_fail`).
"""

import codecs
import contextlib
import io
import logging
import os
import select
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

logger = logging.getLogger(__name__)

READABLE = "levanter.readable"
"""The name of the error handler of encodings that prints what is near a sign that a terminal lacks."""
_NEAR = {
    **dict.fromkeys("–—−─━═┄┅┈┉╌╍╴╶", "-"),
    **dict.fromkeys("│┃║┆┇┊┋╎╏", "|"),
    **{"×": "x", "→": "->", "←": "<-", "…": "...", "≥": ">=", "≤": "<=", "≈": "~", "·": ".", "•": "*", "√": "sqrt"},
    **{"“": '"', "”": '"', "‘": "'", "’": "'", "τ": "tau", "Σ": "sum", "°": "deg", "µ": "u", "μ": "u", "⋅": "."},
}


def prepare_streams() -> None:
    """Has printing work whatever the process was started with.

    A stream that is closed is replaced by nothing: the next file that is opened would get its number, and what C++
    libraries print would go into it. Signs that the encoding lacks are printed as what is near them.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free, which is this one.
            os.open(os.devnull, os.O_RDWR)
    codecs.register_error(READABLE, _readable)
    for name in ("stdout", "stderr"):
        stream: IO[str] | None = getattr(sys, name)
        if stream is None:
            nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 — as long as the process lives
            setattr(sys, name, nowhere)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=READABLE)


def for_errors() -> IO[str]:
    """Where errors are told: standard error, or standard output where the process was started without one."""
    return sys.stdout if sys.__stderr__ is None and sys.__stdout__ is not None else sys.stderr


def _readable(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(map(_near, error.object[error.start : error.end])), error.end


def _near(sign: str) -> str:
    """What is printed for a sign, in ASCII."""
    if sign in _NEAR:
        return _NEAR[sign]
    if 0x2500 <= ord(sign) < 0x25A0:  # corners of tables, and bars
        return "+" if ord(sign) < 0x2580 else "#"
    # `é` is an `e` with an accent, `²` a small `2`.
    return unicodedata.normalize("NFKD", sign).encode("ascii", "ignore").decode() or ascii(sign)[1:-1]


@contextmanager
def printing_may_fail() -> Iterator[None]:
    """Goes on where what is printed cannot be: the terminal has gone, the pipe's reader, the room on the disk.

    It is said once, on the other stream, and what is printed afterwards goes nowhere.
    """
    before = sys.stdout, sys.stderr
    ours: tuple[Any, Any] = (_Patient(sys.stdout, "standard output"), _Patient(sys.stderr, "standard error"))
    sys.stdout, sys.stderr = ours
    try:
        yield
    finally:
        for stream in ours:
            stream.flush()
        # Somebody in between may have put another one in its place.
        sys.stdout = before[0] if sys.stdout is ours[0] else sys.stdout
        sys.stderr = before[1] if sys.stderr is ours[1] else sys.stderr


class _Patient:
    """A stream that is written to as long as that works."""

    def __init__(self, stream: IO[str], name: str):
        self._stream, self._name, self._lost = stream, name, False

    def write(self, text: str) -> int:
        try:
            return len(text) if self._lost else self._stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        try:
            if not self._lost:
                self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._lost = True
        with contextlib.suppress(OSError):
            _silence(self._stream)
        logger.warning(
            "%s accepts no more output (%s); the run continues without it", self._name, error.strerror or error
        )

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def output_is_lost(error: BaseException | None = None) -> bool:
    """Writes out what is still held back; whether some of what was printed is not read by anybody.

    What is printed afterwards, Python's own last flush too, then goes nowhere instead of failing.

    Args:
        error: what printing ended with, if it did: the stream that it was raised by may hold nothing back any more.
    """
    lost = False
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue  # a program may be started without one
        try:
            stream.flush()
            gone = isinstance(error, BrokenPipeError) and _has_no_reader(stream)
        except BrokenPipeError:
            gone = True
        except OSError as failed:
            # No room where it is redirected to, or a terminal that has gone.
            gone = True
            name = "standard output" if stream is sys.stdout else "standard error"
            _silence(stream)
            logger.warning("%s cannot be written (%s)", name, failed.strerror or failed)
        if gone:
            lost = True
            _silence(stream)
    return lost


def _has_no_reader(stream: IO[str]) -> bool:
    try:
        number = stream.fileno()
    except OSError:
        return False  # a stream in memory
    poll = select.poll()
    poll.register(number, select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _silence(stream: IO[str]) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
