"""Byte ranges of a file, wherever it is, straight into memory that the caller owns.

A `ByteReader` knows the size of one file and fills buffers from it. A local file is read with `preadv` (no shared
file position, the GIL is released, no copy); a remote one with fsspec range requests, several in flight, each tried
again after a transient failure. Readers are thread-safe and hold no open file between calls.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from levanter.compat.hf.errors import CorruptFileError, MissingCheckpointFileError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

REMOTE_PART_BYTES = 8 << 20
REMOTE_PARALLEL = 16
RETRY_DELAYS = (0.2, 0.8, 2.4, 6.0)


class ByteReader(Protocol):
    """One file that can be read by ranges."""

    @property
    def name(self) -> str:
        """How messages call it."""
        ...

    @property
    def max_gap(self) -> int:
        """Bytes that are cheaper to read than to skip between two wanted ranges."""
        ...

    @property
    def page(self) -> int:
        """Granularity in which the storage moves bytes anyway."""
        ...

    @property
    def size(self) -> int:
        """Bytes of the file."""
        ...

    def peek(self, start: int, stop: int) -> bytes:
        """A few bytes of metadata; never fetches the whole file."""
        ...

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fills `buffer` with the bytes from `start` on."""
        ...

    def read_blocks(self, starts: Iterable[int], span: int, buffer: memoryview) -> None:
        """Fills `buffer` with the `span` bytes at each of `starts`, one after another."""
        ...


@dataclass(frozen=True)
class LocalFile:
    """A file on a mounted file system."""

    path: Path
    max_gap: int = 512
    page: int = 4096

    @property
    def name(self) -> str:
        """The path."""
        return str(self.path)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._size

    @cached_property
    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            raise MissingCheckpointFileError(self.path, "there is no such file") from None

    @contextlib.contextmanager
    def _open(self):
        try:
            descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except FileNotFoundError:
            raise MissingCheckpointFileError(self.path, "there is no such file") from None
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _fill(self, descriptor: int, start: int, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            got = os.preadv(descriptor, [buffer[done:]], start + done)
            if got == 0:
                raise CorruptFileError(
                    self.path, f"the file ends at byte {start + done}, inside a range to byte {start + len(buffer)}"
                )
            done += got

    def peek(self, start: int, stop: int) -> bytes:
        """The bytes `[start, stop)`."""
        buffer = bytearray(stop - start)
        self.read_into(start, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fills `buffer` with the bytes from `start` on."""
        with self._open() as descriptor:
            self._fill(descriptor, start, buffer)

    def read_blocks(self, starts: Iterable[int], span: int, buffer: memoryview) -> None:
        """Fills `buffer` with blocks of `span` bytes, one at each start."""
        with self._open() as descriptor:
            for i, start in enumerate(starts):
                self._fill(descriptor, start, buffer[i * span : (i + 1) * span])


def _transient() -> tuple[type[BaseException], ...]:
    """What a network can throw without meaning it, of the libraries that are loaded."""
    found: list[type[BaseException]] = [OSError, TimeoutError]
    for module, name in (
        ("aiohttp", "ClientError"),
        ("httpx", "TransportError"),
        ("httpx2", "TransportError"),
        ("requests", "RequestException"),
        ("gcsfs.retry", "HttpError"),
        ("botocore.exceptions", "BotoCoreError"),
    ):
        if module in sys.modules:
            found.append(getattr(sys.modules[module], name))
    return tuple(found)


R = TypeVar("R")


def with_retry(action: Callable[[], R], *, what: str, delays: Iterable[float] = RETRY_DELAYS) -> R:
    """Calls `action`, again after each of `delays` seconds when a transient error ends it.

    A missing file or a refused permission is not transient and is raised at once.
    """
    waits = list(delays)
    while True:
        try:
            return action()
        except (FileNotFoundError, PermissionError):
            raise
        except _transient() as error:
            if not waits:
                error.add_note(f"while reading {what}")
                raise
            time.sleep(waits.pop(0))


@dataclass(frozen=True)
class RemoteFile:
    """A file behind an fsspec file system: gs://, s3://, hf://, http(s)://, memory://, …"""

    filesystem: "AbstractFileSystem"
    path: str
    name: str
    max_gap: int = 256 << 10
    page: int = 1
    delays: tuple[float, ...] = RETRY_DELAYS
    _pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(REMOTE_PARALLEL), repr=False, compare=False
    )

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._size

    @cached_property
    def _size(self) -> int:
        try:
            size = with_retry(lambda: self.filesystem.size(self.path), what=self.name, delays=self.delays)
        except FileNotFoundError:
            raise MissingCheckpointFileError(self.name, "there is no such file") from None
        if size is None:
            raise CorruptFileError(self.name, "the server does not report the file's size, so ranges cannot be read")
        return int(size)

    def _part(self, start: int, buffer: memoryview) -> None:
        def once() -> bytes:
            found = cast(bytes, self.filesystem.cat_file(self.path, start=start, end=start + len(buffer)))
            if len(found) != len(buffer):
                raise OSError(f"asked for {len(buffer)} bytes at {start}, got {len(found)}")
            return found

        buffer[:] = with_retry(once, what=f"{self.name} from byte {start}", delays=self.delays)

    def peek(self, start: int, stop: int) -> bytes:
        """The bytes `[start, stop)`, by one request or a few."""
        buffer = bytearray(stop - start)
        self.read_into(start, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fills `buffer` with the bytes from `start` on, by requests side by side."""
        self._all((start + at, buffer[at : at + REMOTE_PART_BYTES]) for at in range(0, len(buffer), REMOTE_PART_BYTES))

    def read_blocks(self, starts: Iterable[int], span: int, buffer: memoryview) -> None:
        """Fills `buffer` with blocks of `span` bytes, one at each start, by requests side by side."""

        def parts():
            for i, start in enumerate(starts):
                for at in range(0, span, REMOTE_PART_BYTES):
                    stop = min(span, at + REMOTE_PART_BYTES)
                    yield start + at, buffer[i * span + at : i * span + stop]

        self._all(parts())

    def _all(self, parts: Iterable[tuple[int, memoryview]]) -> None:
        wanted = list(parts)
        if len(wanted) == 1:
            self._part(*wanted[0])
            return
        for future in [self._pool.submit(self._part, *part) for part in wanted]:
            future.result()
