"""What went wrong with writing, said with the path, what was being done, and what to do about it."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from levanter.io.paths import is_remote, local_path
from levanter.io.progress import amount

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class OutputError(OSError, ValueError):
    """Something cannot be written; the message says where, why, and what to do.

    Attributes:
        errno: of the system's error, where there was one.
    """


def output_error(path: str, error: OSError, *, doing: str = "written", needed: int | None = None) -> OutputError:
    """The error for a user, of an error of the system.

    Args:
        path: the file or folder, as the user knows it.
        error: what the system said.
        doing: what it cannot be.
        needed: bytes that the whole of it takes, as far as that is known.
    """
    # Making a folder where a file is says that something "exists".
    reason = os.strerror(errno.ENOTDIR) if error.errno == errno.EEXIST else error.strerror or str(error)
    translated = OutputError(
        f"{path}: cannot be {doing} ({reason or type(error).__name__}){advice(path, error, needed)}"
    )
    translated.errno = error.errno
    return translated


@contextmanager
def output_errors(path: str, doing: str) -> Iterator[None]:
    """Errors of the system in the block are told as errors of writing `path`.

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
    """What to do about an error of the system: text that follows the error's, or nothing.

    Args:
        path: what was to be written.
        error: what the system said.
        needed: bytes that all of it takes, where that is known.
    """
    takes = "" if needed is None else f"; it takes {amount(needed, 'bytes')}"
    if error.errno in NO_SPACE:
        free = free_bytes(path)
        free_text = "" if free is None else f", where {amount(free, 'bytes')} are free"
        return f"{takes}\n  → make room on the disk of {nearest_folder(path)}{free_text}, or name another place"
    if error.errno == errno.EFBIG:
        return f"{takes}\n  → raise the limit on the size of files (ulimit -f), or name a place that takes more"
    if is_remote(path):
        return "\n  → check the address and the credentials, or name another place"
    free_text = nearest_folder(path)
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"\n  → this user may not write in {free_text}; change its permissions, or name another place"
    if error.errno == errno.EROFS:
        return f"\n  → {free_text} is on a read-only file system; name another place"
    if error.errno in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
        return f"\n  → {_in_the_way(path)}"
    if error.errno == errno.ENAMETOOLONG:
        longest = max(os.path.normpath(local_path(path)).split(os.sep), key=lambda part: len(part.encode()))
        return f"\n  → a shorter name: {longest[:20]}… has {len(longest.encode())} bytes, most disks take 255"
    if error.errno == errno.ELOOP:
        return "\n  → it is a link that leads back to itself; remove it, or name another place"
    return ""


def _in_the_way(path: str) -> str:
    at = os.path.abspath(local_path(path))
    if os.path.isdir(at):
        return f"{at} is a folder, and a file is to be written; name a file in it"
    while at != os.path.dirname(at) and not os.path.lexists(at):
        at = os.path.dirname(at)
    return f"{at} is a file, not a folder; name another place"


def nearest_folder(path: str) -> str:
    """The folder that a local file lies in, or the first above it that there is; URLs stay what they are."""
    if is_remote(path):
        return path
    at = os.path.dirname(os.path.abspath(local_path(path)))
    while not os.path.isdir(at) and at != os.path.dirname(at):
        at = os.path.dirname(at)
    return at


def free_bytes(path: str) -> int | None:
    """Bytes that are free where a local path lies; None for URLs and where the system does not say."""
    if is_remote(path):
        return None
    try:
        return shutil.disk_usage(nearest_folder(path)).free
    except OSError:
        return None
