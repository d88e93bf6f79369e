"""Standard streams that cannot show output: no reader (`… | head`), no stream (`2>&-`), a limited encoding.

A process prepares its standard streams once (`prepare_streams`). While it does work that must not be lost, the loss of
its terminal, or of the reader of its pipe, does not end it (`printing_may_fail`).
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

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""Control characters of ASCII and Latin-1, which a terminal would execute, as they are shown."""
_CONTROLS_OF_TEXT = {code: shown for code, shown in _CONTROLS.items() if chr(code) != "\r"}
READABLE = "levanter.readable"
"""The name of the error handler of encodings that replaces characters which the terminal's encoding lacks."""
_ASCII = {
    **dict.fromkeys("–—−─━═┄┅┈┉╌╍╴╶", "-"),
    **dict.fromkeys("│┃║┆┇┊┋╎╏", "|"),
    **{"×": "x", "→": "->", "←": "<-", "…": "...", "≥": ">=", "≤": "<=", "≈": "~", "·": ".", "•": "*", "√": "sqrt"},
    **{"“": '"', "”": '"', "‘": "'", "’": "'", "τ": "tau", "Σ": "sum", "°": "deg", "µ": "u", "μ": "u", "⋅": "."},
}


STANDARD_OUTPUT = "standard output"


def printable(text: str) -> str:
    """The text with its control characters shown: names of files, tasks and tokens may hold sequences for terminals.

    >>> printable("books/\\x1b]0;title\\x07.txt")
    'books/\\\\x1b]0;title\\\\x07.txt'
    """
    return text if text.isprintable() else text.translate(_CONTROLS)


def prepare_streams() -> None:
    """Makes printing work in whatever state the process got its standard streams.

    A closed stream is replaced by `/dev/null`: otherwise the next file that is opened would get its number, and output
    of C++ libraries would go into it. Characters that the encoding lacks are replaced by similar ones.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # `open` returns the lowest free descriptor. All lower ones are open, so that is this one.
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
    """The stream for errors: standard error, or standard output if the process was started without one."""
    # `sys.__stderr__` is the stream at the start: `prepare_streams` has put `/dev/null` in the place of a missing one.
    return sys.stdout if sys.__stderr__ is None and sys.__stdout__ is not None else sys.stderr


def _readable(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(map(_ascii_text, error.object[error.start : error.end])), error.end


def _ascii_text(character: str) -> str:
    """The ASCII text that replaces a character."""
    if character in _ASCII:
        return _ASCII[character]
    if 0x2500 <= ord(character) < 0x25A0:  # corners of tables, and bars
        return "+" if ord(character) < 0x2580 else "#"
    # `é` is an `e` with an accent, `²` a small `2`.
    return unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode() or ascii(character)[1:-1]


@contextmanager
def printing_may_fail() -> Iterator[None]:
    """Ignores failures of printing in the block: the terminal or the pipe's reader is gone, or the disk is full.

    The first failure is logged once; later output to that stream is dropped.
    """
    before = sys.stdout, sys.stderr
    ours: tuple[Any, Any] = (
        _TolerantStream(sys.stdout, STANDARD_OUTPUT),
        _TolerantStream(sys.stderr, "standard error"),
    )
    sys.stdout, sys.stderr = ours
    try:
        yield
    finally:
        for stream in ours:
            stream.flush()
        # Code in the block may have replaced the stream; then its replacement stays.
        sys.stdout = before[0] if sys.stdout is ours[0] else sys.stdout
        sys.stderr = before[1] if sys.stderr is ours[1] else sys.stderr


class _TolerantStream:
    """A stream that drops all output after its first failure; standard output shows control characters."""

    def __init__(self, stream: IO[str], name: str):
        self._stream, self._name, self._lost = stream, name, False
        self._stdout = name == STANDARD_OUTPUT

    def write(self, text: str) -> int:
        # Results and generated text go to standard output; a progress bar moves the cursor on standard error.
        shown = text.translate(_CONTROLS_OF_TEXT) if self._stdout and not text.isprintable() else text
        try:
            if not self._lost:
                self._stream.write(shown)
            return len(text)
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
            # The buffer may still hold text that Python flushes at exit; it then goes to `/dev/null`.
            _silence(self._stream)
        logger.warning(
            "%s accepts no more output (%s); the run continues without it", self._name, error.strerror or error
        )

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def output_is_lost(error: BaseException | None = None) -> bool:
    """Flushes the standard streams; returns whether some of the output was lost.

    Later output, including Python's own flush at exit, is then dropped instead of raising an error.

    Args:
        error: the error that ended printing, if any: the stream that raised it may have an empty buffer by now.
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
            # A full disk behind a redirection, or a closed terminal.
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
    # The write end of a pipe reports POLLERR once its read end is closed, without a byte written.
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _silence(stream: IO[str]) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    # The descriptor, not only the Python object, so that C++ libraries and Python's flush at exit do not fail either.
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
