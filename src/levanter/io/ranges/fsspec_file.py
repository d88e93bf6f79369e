"""A file that is read through a client library: any URL that fsspec supports and that is not of a web server."""

import asyncio
import concurrent.futures
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import Protocol, TypeVar, cast

from levanter.io.ranges.request import (
    Attempt,
    FileIdentity,
    GivenUpError,
    Pieces,
    RangeError,
    ReplacedError,
    TransientError,
    spread,
)

_TAGS = ("generation", "VersionId", "version_id", "ETag", "etag", "ino")
_DATES = ("mtime", "LastModified", "last_modified", "updated", "modified")
_FAILURES = (
    ("aiohttp", "ClientError"),
    ("httpx", "TransportError"),
    ("httpx2", "TransportError"),
    ("requests", "RequestException"),
    ("gcsfs.retry", "HttpError"),
    ("botocore.exceptions", "BotoCoreError"),
)
"""The errors that libraries raise for a failed request, besides `OSError`."""
R = TypeVar("R")
ANSWER_SECONDS = 300.0
"""Seconds after which a request for one range counts as failed."""


def transient_errors() -> tuple[type[BaseException], ...]:
    """The error types of network failures that may pass, of the client libraries that are imported."""
    errors: list[type[BaseException]] = [OSError, TimeoutError]
    for module, name in _FAILURES:
        # Looks only at libraries that are imported already: what is not loaded cannot have raised, and imports cost
        # seconds.
        if module in sys.modules:
            errors.append(getattr(sys.modules[module], name))
    return tuple(errors)


class Library(Protocol):
    """The methods of an fsspec file system that are used here."""

    def info(self, path: str) -> Mapping[str, object]:
        """The metadata of a file."""
        ...

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        """Bytes `[start, end)` of a file."""
        ...


class AsyncLibrary(Protocol):
    """The members that are used of an asynchronous file system in addition."""

    loop: asyncio.AbstractEventLoop

    def _cat_file(self, path: str, start: int, end: int) -> Coroutine[None, None, bytes]: ...


class LibraryFile:
    """A file of an fsspec file system; requests of an asynchronous library can be cancelled.

    Attributes:
        name: the file's name in messages.
        filesystem: the fsspec file system.
        path: the path without the protocol.
        can_be_cut_short: whether a cancelled attempt ends at once.
    """

    def __init__(self, filesystem: Library, path: str, name: str):
        self.name = name
        self.filesystem, self.path = filesystem, path
        self.can_be_cut_short = bool(getattr(filesystem, "async_impl", False)) and hasattr(filesystem, "loop")
        self._identity: FileIdentity | None = None

    def describe(self) -> FileIdentity:
        """The file's size and version by the library's metadata.

        Raises:
            FileNotFoundError: it does not exist.
            RangeError: access is refused, or the size is unknown.
            TransientError: a later attempt may succeed.
        """
        self._identity = self._described()
        return self._identity

    def check_unchanged(self) -> None:
        """Reads size and version again, because the library returns ranges without them.

        Raises:
            ReplacedError: the version differs from the one of `describe`.
            TransientError: a later attempt may succeed.
        """
        # fsspec caches metadata, which would show the file as it was.
        invalidate = getattr(self.filesystem, "invalidate_cache", None)
        if invalidate is not None:
            invalidate()
        before = self._identity
        try:
            differs = None if before is None else before.differs(self._described())
        except FileNotFoundError:
            differs = "it no longer exists"
        if differs is not None:
            raise ReplacedError(
                f"{self.name}: it was replaced while it was read: {differs}\n"
                "  → load again when no process writes the file; it must not change while it is read"
            )

    def fetch(self, start: int, into: Pieces, attempt: Attempt) -> None:
        """Fills the pieces with the bytes from `start` on; see `RangeSource`.

        Raises:
            TransientError: another attempt may succeed.
            GivenUpError: the attempt was cancelled.
            RangeError: access is refused.
        """
        size = sum(map(len, into))
        stop = start + size
        attempt.check()
        if self.can_be_cut_short:
            content = self._call(lambda: self._cut_short(start, stop, attempt))
        else:
            content = self._call(lambda: self.filesystem.cat_file(self.path, start=start, end=stop))
        # A library may return fewer bytes without an error, for instance where the file has become shorter.
        if len(content) != size:
            raise TransientError(f"it answered with {len(content):,} of {size:,} bytes")
        spread(content, into)
        attempt.received += len(content)
        attempt.is_over()

    def _cut_short(self, start: int, stop: int, attempt: Attempt) -> bytes:
        library = cast(AsyncLibrary, self.filesystem)
        # The coroutine itself, not `cat_file`: only a future can be cancelled from another thread.
        content = library._cat_file(self.path, start=start, end=stop)
        future = asyncio.run_coroutine_threadsafe(content, library.loop)
        attempt.stops_by(future.cancel)
        try:
            return future.result(ANSWER_SECONDS)
        except concurrent.futures.CancelledError:
            raise GivenUpError from None
        except TimeoutError:
            # The timeout is ours: the coroutine still runs in the library's loop.
            future.cancel()
            raise

    def _described(self) -> FileIdentity:
        info = self._call(lambda: self.filesystem.info(self.path))
        size = info.get("size")
        if size is None:
            raise RangeError(f"{self.name}: the server does not report the file's size, so ranges cannot be read")
        tag = next((str(info[key]) for key in _TAGS if info.get(key) is not None), None)
        date = next((str(info[key]) for key in _DATES if info.get(key) is not None), None)
        return FileIdentity(size=int(str(size)), tag=tag, modified=date)

    def _call(self, action: Callable[[], R]) -> R:
        try:
            return action()
        # Before `OSError` below, of which the first and the last are subclasses: another attempt would not help.
        except (FileNotFoundError, GivenUpError, RangeError):
            raise
        except PermissionError as error:
            reason = error.strerror or str(error)
            raise RangeError(f"{self.name}: access is refused ({reason})\n  → check the credentials") from error
        except transient_errors() as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise TransientError(reason[:200], overloaded=_is_overload(error)) from error


def _is_overload(error: BaseException) -> bool:
    # Libraries agree on no error type for overload, so its text is searched.
    text = f"{getattr(error, 'code', '')} {error}".lower()
    return any(word in text for word in ("429", "503", "slow down", "slowdown", "rate limit", "too many requests"))
