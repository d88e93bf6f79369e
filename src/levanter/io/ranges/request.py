"""One attempt at a range of a file, and what can become of it.

An `Attempt` is handed to whoever makes a request, counts what arrives, and can be given up from another thread: the
request that lost a race, or everything at once when a user presses Ctrl-C.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Pieces = tuple[memoryview, ...]
"""Memory that one range fills, piece after piece."""


def behind(pieces: Pieces, nbytes: int) -> Pieces:
    """What of a range's pieces of memory comes behind its first bytes."""
    views: list[memoryview] = []
    for piece in pieces:
        if nbytes < len(piece):
            views.append(piece[nbytes:])
        nbytes = max(nbytes - len(piece), 0)
    return tuple(views)


def spread(content: bytes | bytearray, pieces: Sequence[memoryview]) -> None:
    """Copies a range's bytes into its pieces of memory."""
    at = 0
    for piece in pieces:
        piece[:] = content[at : at + len(piece)]
        at += len(piece)


class RangeError(OSError, ValueError):
    """A range of a file cannot be read; says which, why, and what was tried."""


class ReplacedError(RangeError):
    """A file is another one than when it was opened."""


class TransientError(Exception):
    """An attempt failed in a way that another attempt may not.

    Attributes:
        reason: what happened, in a few words.
        overloaded: whether the server asks for fewer requests.
        wait_seconds: how long it asks to be left alone; None where it does not say.
    """

    def __init__(self, reason: str, *, overloaded: bool = False, wait_seconds: float | None = None):
        super().__init__(reason)
        self.reason, self.overloaded, self.wait_seconds = reason, overloaded, wait_seconds


class GivenUpError(Exception):
    """An attempt ended because somebody gave it up."""


class Attempt:
    """A request under way.

    Attributes:
        received: the first bytes of the range that have arrived, and are in their place.
        streams: whether that number grows while the answer comes, and not only once all of it is there.
    """

    def __init__(self) -> None:
        self.received = 0
        self.streams = False
        self._lock = threading.Lock()
        self._stop: Callable[[], object] | None = None
        self._given_up = False

    def give_up(self) -> None:
        """Ends the attempt: whoever carries it out raises `GivenUpError` soon."""
        with self._lock:
            self._given_up = True
            # Within the lock: a connection that has gone back to others must not be cut.
            if self._stop is not None:
                self._stop()

    def stops_by(self, stop: Callable[[], object]) -> None:
        """Says how to cut short what is about to be waited for.

        Raises:
            GivenUpError: it is too late.
        """
        with self._lock:
            if not self._given_up:
                self._stop = stop
        self.check()

    def is_over(self) -> None:
        """Nothing is waited for any more."""
        with self._lock:
            self._stop = None

    @property
    def given_up(self) -> bool:
        """Whether somebody gave it up."""
        return self._given_up

    def check(self) -> None:
        """Raises `GivenUpError` if it was given up."""
        if self._given_up:
            raise GivenUpError


@dataclass(frozen=True, kw_only=True)
class FileIdentity:
    """What tells a file from another one of its name.

    Attributes:
        size: its bytes.
        tag: what the server calls this version of it (an ETag, a generation); None where it does not say.
        modified: when it was last written, as the server spells it; None where it does not say.
    """

    size: int
    tag: str | None = None
    modified: str | None = None

    def differs(self, other: "FileIdentity") -> str | None:
        """How another answer shows that the file is a different one; None where nothing shows it."""
        if self.size != other.size:
            return f"it had {self.size:,} bytes and has {other.size:,} now"
        if self.tag and other.tag and self.tag != other.tag:
            return f"its version was {self.tag} and is {other.tag} now"
        if not (self.tag and other.tag) and self.modified and other.modified and self.modified != other.modified:
            return f"it was written {self.modified} and is dated {other.modified} now"
        return None


class RangeSource(Protocol):
    """A file of another machine that answers for ranges."""

    @property
    def name(self) -> str:
        """How messages call it."""
        ...

    @property
    def can_be_cut_short(self) -> bool:
        """Whether an attempt that is given up ends at once."""
        ...

    def describe(self) -> FileIdentity:
        """Which file it is, from now on: one that is another is not read.

        Raises:
            FileNotFoundError: it is not there.
            RangeError: it cannot be read by ranges.
            TransientError: perhaps it can be asked again.
        """
        ...

    def fetch(self, start: int, into: Pieces, attempt: Attempt) -> None:
        """Fills the pieces, one after another, with the bytes from `start` on, by one request.

        Raises:
            TransientError: another attempt may succeed.
            GivenUpError: the attempt was given up.
            ReplacedError: the file is another one by now.
            RangeError: no attempt will succeed.
        """
        ...
