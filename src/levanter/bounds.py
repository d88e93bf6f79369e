"""Bounds on what comes from outside: how large, how deep, how many, how long, for every reader.

A document, a checkpoint, a tokenizer, a template or a data file may be damaged, or made by somebody who wishes us ill.
A reader asks for no memory because a file says so, goes no deeper than this page says, and gives up on what would take
minutes. Every bound is here, far above what is ever needed, and every error prints it.
"""

import contextlib
import ctypes
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

MIB = 1 << 20

DOCUMENT_BYTES = 4 * MIB
"""Of a configuration file."""
DOCUMENT_DEPTH = 64
"""Lists and mappings inside one another in a configuration."""
DOCUMENT_NODES = 200_000
"""Values of a configuration, with everything that aliases repeat."""
DOCUMENT_FILES = 256
"""Files that one configuration extends and includes."""
JSON_BYTES = 512 * MIB
"""Of a JSON file that describes something: config.json, tokenizer.json, an index, metadata."""
JSON_DEPTH = 256
"""Lists and objects inside one another in JSON."""
RECORD_BYTES = 256 * MIB
"""Of a line of a data file, and of a document that was compressed."""
PATTERN_CHARACTERS = 4096
"""Of a path with braces and wildcards."""
PATTERN_DEPTH = 32
"""Braces inside one another."""
PATTERN_FILES = 200_000
"""Files that one pattern may name."""
HINTS = 20
"""Misspelt keys that are compared with those that there are; further ones are only named."""
HINT_CHARACTERS = 80
"""Of a word that is compared with others."""
PROBLEMS = 100
"""Problems that are shown of one document."""
TEMPLATE_CHARACTERS = 16 * MIB
"""Of a chat template's text for one conversation, and of any text that it makes on the way."""
TEMPLATE_ITEMS = 1_000_000
"""Of a list that a chat template makes."""
TEMPLATE_SECONDS = 10.0
"""That a chat template may take for one conversation."""
HEADER_AXES = 4
"""Of a tensor in a GGUF file."""
HEADER_DEPTH = 4
"""Arrays inside one another in the metadata of a GGUF file."""


class OutOfBoundsError(ValueError):
    """Something from outside is larger, deeper or longer than anything that is sensible."""


def read_bounded(file: IO[bytes], limit: int, *, where: str) -> bytes:
    """All of an open file.

    Raises:
        OutOfBoundsError: it has more than `limit` bytes; so many are read of it and no more.
    """
    pieces, rest = [], limit + 1
    while rest > 0 and (piece := file.read(min(rest, 8 * MIB))):
        pieces.append(piece)
        rest -= len(piece)
    if rest <= 0:
        raise OutOfBoundsError(f"{where}: more than {shown_bytes(limit)}, the limit for such a file")
    return b"".join(pieces)


def shown_bytes(count: int) -> str:
    """A number of bytes that is a power of two, in MiB or KiB."""
    return f"{count // MIB:,} MiB" if count >= MIB else f"{count // 1024:,} KiB"


_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


def parse_json(text: str, *, object_pairs_hook: Callable[[list[tuple[str, Any]]], object] | None = None) -> Any:
    """The value of a JSON text.

    Raises:
        json.JSONDecodeError: it is no JSON.
        OutOfBoundsError: it is nested deeper than `JSON_DEPTH`, or has a number of thousands of digits.
    """
    if text.count("[") + text.count("{") > JSON_DEPTH and _depth(text) > JSON_DEPTH:
        raise OutOfBoundsError(f"lists and objects are nested more than {JSON_DEPTH} deep, the limit for JSON")
    try:
        return json.loads(text, object_pairs_hook=object_pairs_hook)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise OutOfBoundsError(f"lists and objects are nested more than {JSON_DEPTH} deep") from None
    except ValueError as error:
        if object_pairs_hook is not None and "limit" not in str(error):
            raise
        raise OutOfBoundsError(f"a number is longer than the limit ({error})") from error


def _depth(text: str) -> int:
    depth = deepest = 0
    for token in _TOKENS.finditer(text):
        sign = token[0]
        if sign in "[{":
            depth += 1
            if depth > deepest:
                deepest = depth
                if deepest > JSON_DEPTH:
                    return deepest
        elif sign in "]}":
            depth -= 1
    return deepest


def lines_bounded(file: IO[bytes], *, where: str) -> Iterator[bytes]:
    """The lines of a file, with their ends.

    Raises:
        OutOfBoundsError: one has more than `RECORD_BYTES`.
    """
    number = 0
    while line := file.readline(RECORD_BYTES + 1):
        number += 1
        if len(line) > RECORD_BYTES:
            said = f"a line has more than {shown_bytes(RECORD_BYTES)}, the limit for a line"
            raise OutOfBoundsError(f"{where}:{number}: {said}")
        yield line


class TookTooLong(Exception):
    """What runs in a `time_limit` was still running at its end."""


class _Watch:
    """Raises `TookTooLong` in threads whose time is up; one thread for all, started with the first."""

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
        with self._lock:
            self._until.pop(threading.get_ident(), None)

    def _look(self) -> None:
        while True:
            time.sleep(0.5)
            with self._lock:
                now = time.monotonic()
                for thread in [thread for thread, until in self._until.items() if until < now]:
                    del self._until[thread]
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


def capped(lines: Sequence[str], *, most: int = PROBLEMS) -> list[str]:
    """The first lines, and how many more there are."""
    if len(lines) <= most:
        return list(lines)
    return [*lines[:most], f"… and {len(lines) - most:,} more ({most} are shown)"]
