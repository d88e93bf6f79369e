"""Atomic writes: a file is either the old one or the whole new one, whatever happens in between."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from typing import IO

from fsspec import AbstractFileSystem
from fsspec.spec import AbstractBufferedFile

from levanter.io.paths import filesystem, is_remote, local_path


@contextlib.contextmanager
def atomic_write(path: str) -> Iterator[IO[bytes]]:
    """Opens a file for writing bytes that appears under its name only when the block ends well.

    The bytes go to a temporary name in the same folder (which is created where needed). Local files are flushed to the
    disk and renamed, and the rename is flushed too; remote ones are uploaded and then moved. If the block raises, the
    temporary file is removed and what was there before stays as it was.

    Raises:
        OSError: the folder is not writable, the disk is full.
    """
    writer = _remote(path) if is_remote(path) else _local(os.path.realpath(local_path(path)))
    with writer as file:
        yield file


def _temporary_name(path: str) -> str:
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}.{name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"


@contextlib.contextmanager
def _local(path: str) -> Iterator[IO[bytes]]:
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    temporary = _temporary_name(path)
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _remote(path: str) -> Iterator[IO[bytes]]:
    fs, name = filesystem(path)
    temporary = _temporary_name(name)
    fs.makedirs(name.rpartition("/")[0], exist_ok=True)
    file = fs.open(temporary, "wb")
    try:
        yield file
        file.close()
        fs.mv(temporary, name)
    except BaseException:
        _abandon(fs, file, temporary)
        raise


def _abandon(fs: AbstractFileSystem, file: AbstractBufferedFile, temporary: str) -> None:
    """Drops an upload, and the temporary object where it exists already."""
    with contextlib.suppress(OSError, NotImplementedError):
        file.discard()
    with contextlib.suppress(OSError):
        fs.rm(temporary)
