"""A file behind a client library: whatever fsspec knows and is no web address."""

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
"""What libraries raise when a request failed, beside `OSError`."""
R = TypeVar("R")
ANSWER_SECONDS = 300.0
"""An answer to one range that takes longer is taken for none."""


def transient_errors() -> tuple[type[BaseException], ...]:
    """What a network can throw without meaning it, of the libraries that are loaded."""
    errors: list[type[BaseException]] = [OSError, TimeoutError]
    for module, name in _FAILURES:
        if module in sys.modules:
            errors.append(getattr(sys.modules[module], name))
    return tuple(errors)


class Library(Protocol):
    """What is used of an fsspec file system."""

    def info(self, path: str) -> Mapping[str, object]:
        """What is known of a file."""
        ...

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        """Bytes `[start, end)` of a file."""
        ...


class AsyncLibrary(Protocol):
    """What is used, beside, of one that works asynchronously."""

    loop: asyncio.AbstractEventLoop

    def _cat_file(self, path: str, start: int, end: int) -> Coroutine[None, None, bytes]: ...


class LibraryFile:
    """A file of an fsspec file system; a library that works asynchronously can be cut short.

    Attributes:
        name: how messages call it.
        filesystem: of fsspec.
        path: as the file system spells it.
        can_be_cut_short: whether an attempt that is given up ends at once.
    """

    def __init__(self, filesystem: Library, path: str, name: str):
        self.name = name
        self.filesystem, self.path = filesystem, path
        self.can_be_cut_short = bool(getattr(filesystem, "async_impl", False)) and hasattr(filesystem, "loop")
        self._identity: FileIdentity | None = None

    def describe(self) -> FileIdentity:
        """What the library knows of the file.

        Raises:
            FileNotFoundError: it is not there.
            RangeError: it is refused, or of unknown size.
            TransientError: perhaps it can be asked again.
        """
        self._identity = self._described()
        return self._identity

    def check_unchanged(self) -> None:
        """Asks again which file it is, since the library's answers to ranges do not say.

        Raises:
            ReplacedError: it is another one than `describe` told.
            TransientError: perhaps it can be asked again.
        """
        invalidate = getattr(self.filesystem, "invalidate_cache", None)
        if invalidate is not None:
            invalidate()
        before = self._identity
        try:
            differs = None if before is None else before.differs(self._described())
        except FileNotFoundError:
            differs = "it is gone"
        if differs is not None:
            raise ReplacedError(
                f"{self.name}: it was replaced while it was read: {differs}\n"
                "  → load again once nobody writes there any more; a file must stay as it is while it is read"
            )

    def fetch(self, start: int, into: Pieces, attempt: Attempt) -> None:
        """Fills the pieces with the bytes from `start` on; see `RangeSource`.

        Raises:
            TransientError: another attempt may succeed.
            GivenUpError: the attempt was given up.
            RangeError: it is refused.
        """
        size = sum(map(len, into))
        stop = start + size
        attempt.check()
        if self.can_be_cut_short:
            content = self._call(lambda: self._cut_short(start, stop, attempt))
        else:
            content = self._call(lambda: self.filesystem.cat_file(self.path, start=start, end=stop))
        if len(content) != size:
            raise TransientError(f"it answered with {len(content):,} of {size:,} bytes")
        spread(content, into)
        attempt.received += len(content)
        attempt.is_over()

    def _cut_short(self, start: int, stop: int, attempt: Attempt) -> bytes:
        library = cast(AsyncLibrary, self.filesystem)
        content = library._cat_file(self.path, start=start, end=stop)
        future = asyncio.run_coroutine_threadsafe(content, library.loop)
        attempt.stops_by(future.cancel)
        try:
            return future.result(ANSWER_SECONDS)
        except concurrent.futures.CancelledError:
            raise GivenUpError from None
        except TimeoutError:
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
        except (FileNotFoundError, GivenUpError, RangeError):
            raise
        except PermissionError as error:
            reason = error.strerror or str(error)
            raise RangeError(f"{self.name}: access is refused ({reason})\n  → check the credentials") from error
        except transient_errors() as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise TransientError(reason[:200], overloaded=_is_overload(error)) from error


def _is_overload(error: BaseException) -> bool:
    text = f"{getattr(error, 'code', '')} {error}".lower()
    return any(word in text for word in ("429", "503", "slow down", "slowdown", "rate limit", "too many requests"))
