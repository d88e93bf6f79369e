"""Errors of writing: the path, the operation, the reason of the system, and advice."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from levanter.io.paths import is_remote, local_path
from levanter.io.progress import amount

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class OutputError(OSError, ValueError):
    """A file or folder cannot be written; the message has the path, the reason and advice.

    Attributes:
        errno: of the system's error, where there was one.
    """


def output_error(path: str, error: OSError, *, doing: str = "written", needed: int | None = None) -> OutputError:
    """Converts an error of the system into one for the user.

    Args:
        path: the file or folder, as the user named it.
        error: the error of the system.
        doing: the operation that failed, as a participle (`written`).
        needed: the bytes of the whole file or folder; None if unknown.
    """
    # `makedirs` reports a file in the place of a folder as EEXIST, "File exists", which does not name the problem.
    reason = os.strerror(errno.ENOTDIR) if error.errno == errno.EEXIST else error.strerror or str(error)
    translated = OutputError(
        f"{path}: cannot be {doing} ({reason or type(error).__name__}){advice(path, error, needed)}"
    )
    translated.errno = error.errno
    return translated


@contextmanager
def output_errors(path: str, doing: str) -> Iterator[None]:
    """Converts errors of the system in the block into errors of writing `path`.

    Raises:
        OutputError: instead of any other `OSError`.
    """
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        raise output_error(path, error, doing=doing) from error


def advice(path: str, error: OSError, needed: int | None) -> str:
    """Advice about an error of the system, to be appended to its message; empty if there is none.

    Args:
        path: the file or folder to be written.
        error: the error of the system.
        needed: the bytes of the whole file or folder; None if unknown.
    """
    takes = "" if needed is None else f"; it takes {amount(needed, 'bytes')}"
    # EDQUOT too: the disk has room, but this user's quota is used up.
    if error.errno in NO_SPACE:
        free = free_bytes(path)
        free_text = "" if free is None else f", where {amount(free, 'bytes')} are free"
        return f"{takes}\n  → free space on the disk of {nearest_folder(path)}{free_text}, or choose another path"
    if error.errno == errno.EFBIG:
        return f"{takes}\n  → raise the limit on the size of files (ulimit -f), or choose a path that allows more"
    if is_remote(path):
        return "\n  → check the URL and the credentials, or choose another path"
    free_text = nearest_folder(path)
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"\n  → this user may not write in {free_text}; change its permissions, or choose another path"
    if error.errno == errno.EROFS:
        return f"\n  → {free_text} is on a read-only file system; choose another path"
    if error.errno in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
        return f"\n  → {_in_the_way(path)}"
    if error.errno == errno.ENAMETOOLONG:
        longest = max(os.path.normpath(local_path(path)).split(os.sep), key=lambda part: len(part.encode()))
        return f"\n  → use a shorter name: {longest[:20]}… has {len(longest.encode())} bytes, most disks take 255"
    if error.errno == errno.ELOOP:
        return "\n  → it is a link that leads back to itself; remove it, or choose another path"
    return ""


def _in_the_way(path: str) -> str:
    ancestor = os.path.abspath(local_path(path))
    if os.path.isdir(ancestor):
        return f"{ancestor} is a folder, but a file will be written; name a file in it"
    # Upwards to the first path that exists: that file is in the place of a folder.
    while ancestor != os.path.dirname(ancestor) and not os.path.lexists(ancestor):
        ancestor = os.path.dirname(ancestor)
    return f"{ancestor} is a file, not a folder; choose another path"


def nearest_folder(path: str) -> str:
    """The nearest existing folder above a local path; URLs are returned unchanged."""
    if is_remote(path):
        return path
    folder = os.path.dirname(os.path.abspath(local_path(path)))
    while not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    return folder


def free_bytes(path: str) -> int | None:
    """Free bytes on the disk of a local path; None for URLs and where the system reports none."""
    if is_remote(path):
        return None
    try:
        return shutil.disk_usage(nearest_folder(path)).free
    except OSError:
        return None
