"""Atomic writes: a file has either its old content or the complete new content, even after a crash.

`atomic_write` writes every file that is written as a whole. It never replaces special files: it follows links, writes
into pipes and terminals, and refuses block devices and sockets.
"""

import contextlib
import errno
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

from levanter.io.paths import base_name, filesystem, is_remote, local_path, process_descriptor, special_kind
from levanter.io.write_errors import NO_SPACE, OutputError, output_error, output_errors

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem
    from fsspec.spec import AbstractBufferedFile

_LEFT_BEHIND = re.compile(r"\.(.*)\.\d+-[0-9a-f]{8}\.tmp")


@contextlib.contextmanager
def atomic_write(path: str, *, needed: int | None = None) -> Iterator[IO[bytes]]:
    """Opens a file for writing bytes that appears under its name only when the block ends well.

    The bytes go to a temporary name in the same folder (which is created where needed). Local files are flushed to the
    disk and renamed, and the rename is flushed too; remote ones are uploaded and then moved. If the block raises, the
    temporary file is removed and the old file stays as it was. If the path is a pipe or a terminal (`/dev/stdout`,
    `>(gzip > x.gz)`, a FIFO that somebody reads), the bytes are written to it directly.

    Args:
        path: a local path or a URL.
        needed: the total number of bytes, if known; for the message about a full disk.

    Raises:
        OutputError: the path cannot be written: no permission, no space, a disk or a socket.
    """
    # Decide by the file itself before anything is opened: opening a FIFO or truncating a device has effects that cannot
    # be undone.
    kind = None if is_remote(path) else special_kind(path)
    writer = _remote(path) if is_remote(path) else _local(path) if kind is None else _into(path, kind)
    try:
        with writer as file:
            yield file
    except OutputError:
        raise
    except OSError as error:
        # The block may also read other files, so only errors that a write alone can cause are attributed to this path.
        if error.errno in (*NO_SPACE, errno.EFBIG) or (kind and error.errno in (errno.EPIPE, errno.EIO)):
            raise output_error(path, error, needed=needed) from error
        raise


def check_special(path: str, kind: str) -> None:
    """Refuses files that must not be written to; opens nothing, because the reader of a pipe would see it end.

    Raises:
        OutputError: a disk or a socket, or no permission.
    """
    if kind in ("disk", "socket"):
        raise OutputError(f"{path}: is a {kind}, which cannot be written to\n  → name a file")
    if not os.access(local_path(path), os.W_OK):
        raise output_error(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


@contextlib.contextmanager
def _into(path: str, kind: str) -> Iterator[IO[bytes]]:
    """Writes into a pipe, a terminal, or an open file of the process."""
    check_special(path, kind)
    inherited = process_descriptor(os.path.abspath(local_path(path)))
    try:
        if inherited is not None:
            # Flush, so that the output keeps the order of the program.
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            # A duplicate, so that closing it below leaves the process its standard output.
            descriptor = os.dup(inherited)
        else:
            # Opening a FIFO without a reader would block; with O_NONBLOCK it fails with ENXIO.
            descriptor = os.open(local_path(path), os.O_WRONLY | os.O_NONBLOCK | os.O_APPEND)
            os.set_blocking(descriptor, True)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OutputError(
                f"{path}: is a pipe without a reader\n  → start the reader first, or name a file"
            ) from error
        raise output_error(path, error) from error
    with os.fdopen(descriptor, "wb") as file:
        yield file


def temporary_name(path: str) -> str:
    """A new, hidden name in the folder of a path."""
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}.{_short(name)}.{os.getpid()}-{secrets.token_hex(4)}.tmp"


def _short(name: str) -> str:
    """The first 200 bytes of a name: file systems allow 255, and the suffix needs some of them."""
    # A name may have bytes that are not UTF-8, which are left out.
    return name.encode(errors="ignore")[:200].decode(errors="ignore")


def remove_stale_temporaries(folder: str, *, of: str | None = None) -> None:
    """Removes the temporary files of writers that were killed; no other process may be writing to the folder.

    Args:
        folder: local or a URL; may be missing.
        of: only temporary files of this file name; None for all.
    """
    fs, path = filesystem(folder)
    if not fs.exists(path):
        return
    # fsspec caches listings, and the writers that were killed were other processes.
    fs.invalidate_cache(path)
    for name in fs.ls(path, detail=False):
        if (match := _LEFT_BEHIND.fullmatch(base_name(name))) and (of is None or match[1] == _short(of)):
            fs.rm_file(name)


@contextlib.contextmanager
def _local(destination: str) -> Iterator[IO[bytes]]:
    with output_errors(destination, "written"):
        path = _target(local_path(destination))
        folder = os.path.dirname(path)
        os.makedirs(folder, exist_ok=True)
        temporary = temporary_name(path)
        # In the same folder, because a rename is atomic only within one file system.
        # Exclusive creation: the random suffix must not meet a file that exists.
        file = open(temporary, "xb")  # noqa: SIM115 — closed below
    try:
        with file:
            # Before the content, so that a file that was private is never readable by others.
            _keep_mode(path, file)
            yield file
            with output_errors(destination, "written"):
                file.flush()
                # Before the rename: a crash could otherwise leave the new name with empty content.
                os.fsync(file.fileno())
        with output_errors(destination, "written"):
            os.replace(temporary, path)
    # `BaseException`, so that Ctrl-C leaves no temporary file either.
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    # Flush the rename. The file is complete; some file systems cannot flush a folder, which is no error.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _keep_mode(path: str, file: IO[bytes]) -> None:
    """Gives the new file the permissions of the one that it replaces."""
    with contextlib.suppress(OSError):
        os.fchmod(file.fileno(), stat.S_IMODE(os.stat(path).st_mode))


def _target(path: str) -> str:
    """The file that is replaced: links stay, and what they lead to is written.

    Raises:
        OSError: links that lead in a circle, or the target is a folder.
    """
    target = os.path.realpath(path)
    if os.path.islink(target):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if os.path.isdir(target) or path.endswith("/"):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return target


@contextlib.contextmanager
def _remote(path: str) -> Iterator[IO[bytes]]:
    with output_errors(path, "written"):
        fs, name = filesystem(path)
        temporary = temporary_name(name)
        fs.makedirs(name.rpartition("/")[0], exist_ok=True)
        file = fs.open(temporary, "wb")
    try:
        yield file
        with output_errors(path, "written"):
            # Closing completes the upload; many stores show the object only then. Stores without a rename copy it to
            # its name, which is atomic there too.
            file.close()
            fs.mv(temporary, name)
    except BaseException:
        _abandon(fs, file, temporary)
        raise


def _abandon(fs: "AbstractFileSystem", file: "AbstractBufferedFile", temporary: str) -> None:
    """Drops an upload, and the temporary object where it exists already."""
    with contextlib.suppress(OSError, NotImplementedError):
        # Aborts a multipart upload: its parts would otherwise be stored, and paid for, without an object.
        file.discard()
    with contextlib.suppress(OSError):
        fs.rm(temporary)
