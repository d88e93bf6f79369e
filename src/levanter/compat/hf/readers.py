"""Reads byte ranges of local and remote files into memory that the caller owns.

A `ByteReader` reports the size of one file and fills buffers from it. A local file is read with `preadv` (no shared
file position, the GIL is released, no copy); a remote one by range requests, many in flight (`levanter.io.ranges`).
Readers are thread-safe and hold no open file between calls.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol, TypeVar

from levanter.compat.hf.errors import CorruptFileError, MissingCheckpointFileError
from levanter.io import ranges

RETRY_DELAYS = (0.2, 0.8, 2.4, 6.0)


class ByteReader(Protocol):
    """One file that can be read by ranges."""

    @property
    def name(self) -> str:
        """Its name in messages."""
        ...

    @property
    def max_gap(self) -> int:
        """The largest gap between two requested ranges, in bytes, that is cheaper to read than to skip."""
        ...

    @property
    def page(self) -> int:
        """The unit, in bytes, in which the storage transfers data."""
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
    # A second preadv costs about as much as copying this many more bytes.
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
            # Opened for each call: thousands of shards would exceed the limit of open files otherwise.
            descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except FileNotFoundError:
            raise MissingCheckpointFileError(self.path, "there is no such file") from None
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _fill(self, descriptor: int, start: int, buffer: memoryview) -> None:
        filled = 0
        # `preadv` may return fewer bytes than asked for, most often where a range exceeds 2 GiB.
        while filled < len(buffer):
            count = os.preadv(descriptor, [buffer[filled:]], start + filled)
            # End of file before the buffer is full: the file shrank after its header was read.
            if count == 0:
                raise CorruptFileError(
                    self.path, f"the file ends at byte {start + filled}, inside a range to byte {start + len(buffer)}"
                )
            filled += count

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
        except ranges.transient_errors() as error:
            if not waits:
                error.add_note(f"while reading {what}")
                raise
            # The delays grow, so that an overloaded server gets time to recover.
            time.sleep(waits.pop(0))


@dataclass(frozen=True)
class RemoteFile:
    """A remote file: on a web server, or behind gs://, s3://, hf://, memory://, …"""

    file: "ranges.RangeSource"
    fetcher: "ranges.RangeFetcher"
    # A request's latency is worth about 256 KiB of transfer.
    max_gap: int = 256 << 10
    page: int = 1

    @property
    def name(self) -> str:
        """The URL."""
        return self.file.name

    @property
    def size(self) -> int:
        """Bytes of the file; from this call on, a replacement of the file is detected."""
        return self._size

    @cached_property
    def _size(self) -> int:
        try:
            return self.fetcher.ask(self.file.describe, what=self.name).size
        except FileNotFoundError:
            raise MissingCheckpointFileError(self.name, "there is no such file") from None

    def peek(self, start: int, stop: int) -> bytes:
        """The bytes `[start, stop)`, by one request or a few."""
        buffer = bytearray(stop - start)
        self.read_into(start, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fills `buffer` with the bytes from `start` on, by concurrent requests."""
        self.read_blocks((start,), len(buffer), buffer)

    def read_range(self, start: int, *pieces: memoryview) -> None:
        """Fills pieces of memory, one after another, with the bytes from `start` on, by one request."""
        self.fetcher.fetch(self.file, start, *pieces)

    def read_blocks(self, starts: Iterable[int], span: int, buffer: memoryview) -> None:
        """Fills `buffer` with blocks of `span` bytes, one at each start, by concurrent requests."""
        # Long blocks are split: every request is at most `read_bytes` long, so that many connections share one block.
        part = self.fetcher.read_bytes
        self.fetcher.fetch_all(
            self.file,
            (
                # Request (i, at): bytes [start + at, …) of block i go to
                # offset i · span + at; the last part of a block may be short.
                (start + at, buffer[i * span + at : i * span + min(span, at + part)])
                for i, start in enumerate(starts)
                for at in range(0, span, part)
            ),
        )


@dataclass(frozen=True)
class RemoteFiles:
    """All remote files of a checkpoint: read limits, interrupts, and the final check that none was replaced."""

    files: tuple[RemoteFile, ...]

    @property
    def _fetcher(self) -> "ranges.RangeFetcher":
        return self.files[0].fetcher

    @property
    def reads_at_once(self) -> int:
        """The number of reads that wait for the network at once."""
        return self._fetcher.reads_at_once

    @property
    def read_bytes(self) -> int:
        """Bytes of one read."""
        return self._fetcher.read_bytes

    @property
    def hedge_bytes(self) -> int:
        """The largest memory, in bytes, of second requests for slow ranges."""
        return self._fetcher.hedge_bytes

    @property
    def tally(self) -> "ranges.FetchStats":
        """Counts of requests and bytes so far."""
        return self._fetcher.tally

    def interrupt(self) -> None:
        """Aborts every read in progress and every later one, until `resume`."""
        self._fetcher.interrupt()

    def resume(self) -> None:
        """Ends an interrupt."""
        self._fetcher.resume()

    def settle(self) -> None:
        """Checks at the end that no file was replaced, for sources whose range responses do not identify the file.

        Raises:
            ReplacedError: a file was replaced.
        """
        with ThreadPoolExecutor(max_workers=min(16, len(self.files))) as pool:
            futures = [pool.submit(self._unchanged, file) for file in self.files]
            for future in futures:
                future.result()

    def _unchanged(self, file: RemoteFile) -> None:
        # HTTP responses carry an ETag with each range; these clients do not, so the metadata is compared once.
        if isinstance(file.file, (ranges.LibraryFile, ranges.StoreFile)):
            self._fetcher.ask(file.file.check_unchanged, what=file.name)

    def __str__(self) -> str:
        return str(self._fetcher)
