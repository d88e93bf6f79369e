"""One request for a range of a file: its byte count, its cancellation and its errors.

The code that makes a request gets an `Attempt`, which counts the bytes and which another thread can cancel: the slower
of two hedged requests, or all requests when a user presses Ctrl-C.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Pieces = tuple[memoryview, ...]
"""The destination of one range: several pieces of memory, filled in order."""


def behind(pieces: Pieces, nbytes: int) -> Pieces:
    """The pieces of memory after the first `nbytes` bytes."""
    views: list[memoryview] = []
    for piece in pieces:
        if nbytes < len(piece):
            views.append(piece[nbytes:])
        nbytes = max(nbytes - len(piece), 0)
    return tuple(views)


def spread(content: bytes | bytearray, pieces: Sequence[memoryview]) -> None:
    """Copies a range's bytes into its pieces of memory."""
    offset = 0
    for piece in pieces:
        piece[:] = content[offset : offset + len(piece)]
        offset += len(piece)


class RangeError(OSError, ValueError):
    """A range of a file cannot be read; the message names the range, the reasons and the number of tries."""


class ReplacedError(RangeError):
    """A file was replaced since it was opened."""


class TransientError(Exception):
    """An attempt failed in a way that another attempt may not.

    Attributes:
        reason: what happened, in a few words.
        overloaded: whether the server refused the request because of overload.
        wait_seconds: the delay that the server requests (`Retry-After`); None if it gives none.
    """

    def __init__(self, reason: str, *, overloaded: bool = False, wait_seconds: float | None = None):
        super().__init__(reason)
        self.reason, self.overloaded, self.wait_seconds = reason, overloaded, wait_seconds


class GivenUpError(Exception):
    """An attempt was cancelled."""


class Attempt:
    """A running request that can be cancelled from another thread.

    Attributes:
        received: bytes at the beginning of the range that are in the destination.
        streams: whether `received` grows while the answer arrives; false where a library delivers it at the end.
    """

    def __init__(self) -> None:
        self.received = 0
        self.streams = False
        self._lock = threading.Lock()
        self._stop: Callable[[], object] | None = None
        self._given_up = False

    def give_up(self) -> None:
        """Cancels the attempt: the thread that runs it raises `GivenUpError` soon."""
        with self._lock:
            self._given_up = True
            # X
            # Under the lock, so that `is_over` cannot run in between: a connection that went back to the pool may serve
            # another request by then and must not be shut down.
            if self._stop is not None:
                self._stop()

    def stops_by(self, stop: Callable[[], object]) -> None:
        """Registers the function that interrupts the wait which follows.

        Raises:
            GivenUpError: the attempt was cancelled already.
        """
        with self._lock:
            if not self._given_up:
                # After a cancellation nobody would call it, so `check` below raises instead.
                self._stop = stop
        self.check()

    def is_over(self) -> None:
        """Unregisters the function: the wait is over."""
        with self._lock:
            self._stop = None

    @property
    def given_up(self) -> bool:
        """Whether the attempt was cancelled."""
        return self._given_up

    def check(self) -> None:
        """Raises `GivenUpError` if the attempt was cancelled."""
        if self._given_up:
            raise GivenUpError


@dataclass(frozen=True, kw_only=True)
class FileIdentity:
    """The version of a file, to detect that it was replaced under the same name.

    Attributes:
        size: its bytes.
        tag: the server's name of this version (an ETag, a generation); None if it reports none.
        modified: when it was last written, in the server's format; None if it reports none.
    """

    size: int
    tag: str | None = None
    modified: str | None = None

    def differs(self, other: "FileIdentity") -> str | None:
        """How another answer shows that the file is a different one; None if nothing does."""
        if self.size != other.size:
            return f"it had {self.size:,} bytes and has {other.size:,} now"
        if self.tag and other.tag and self.tag != other.tag:
            return f"its version was {self.tag} and is {other.tag} now"
        # Times count only where tags cannot be compared: a tag is the more exact version.
        if not (self.tag and other.tag) and self.modified and other.modified and self.modified != other.modified:
            return f"it was written {self.modified} and is dated {other.modified} now"
        return None


class RangeSource(Protocol):
    """A file on another machine that can be read by ranges."""

    @property
    def name(self) -> str:
        """The name of the file in messages."""
        ...

    @property
    def can_be_cut_short(self) -> bool:
        """Whether a cancelled attempt ends at once."""
        ...

    def describe(self) -> FileIdentity:
        """The file's size and version; from now on `fetch` refuses any other version.

        Raises:
            FileNotFoundError: it does not exist.
            RangeError: it cannot be read by ranges.
            TransientError: a later attempt may succeed.
        """
        ...

    def fetch(self, start: int, into: Pieces, attempt: Attempt) -> None:
        """Fills the pieces, one after another, with the bytes from `start` on, by one request.

        Raises:
            TransientError: another attempt may succeed.
            GivenUpError: the attempt was cancelled.
            ReplacedError: the file was replaced since `describe`.
            RangeError: no attempt will succeed.
        """
        ...
