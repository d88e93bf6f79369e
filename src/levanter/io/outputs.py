"""`Output`: a file or folder that a run will write, declared in advance and tested before the run's work begins.

A run lists its outputs; `probe` creates the folders and writes and deletes a small file in each. The problems of all
outputs are reported in one error, each with its configuration key.
"""

import errno
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from levanter.io.atomic import check_special
from levanter.io.paths import check_writable, is_remote, join, local_path, special_kind
from levanter.io.progress import amount
from levanter.io.write_errors import OutputError, free_bytes, nearest_folder, output_error


@dataclass(frozen=True, kw_only=True)
class Output:
    """A file or folder that a run writes.

    Attributes:
        key: its configuration key or command-line option.
        path: a local path or a URL.
        kind: a `file`; a `folder` that files are added to; a `new folder`, which is written next to its final name and
            renamed when it is complete.
        nbytes: bytes that will be written there at least, where that is known.
        everywhere: whether every process writes there, not only process 0.
    """

    key: str
    path: str
    kind: Literal["file", "folder", "new folder"]
    nbytes: int | None = None
    everywhere: bool = False


def probe(outputs: Iterable[Output]) -> None:
    """Creates the folders of outputs, and writes and removes a small file in each of them.

    Raises:
        OutputError: naming every output that cannot be written.
    """
    problems: list[str] = []
    tried: set[str] = set()
    for output in outputs:
        try:
            folder = _folder(output)
            # Several outputs often share a folder; one test of it suffices, but each has its own size.
            if folder is not None and folder not in tried:
                _try(output, folder)
                tried.add(folder)
            _check_space(output)
        except (OSError, ValueError) as error:
            problems.append(f"{output.key}: {error}")
    if problems:
        raise OutputError("\n".join(problems))


def _folder(output: Output) -> str | None:
    """The folder in which a file or folder will be created; None where the output is a pipe or a terminal."""
    path = output.path
    if is_remote(path):
        # A `new folder` is assembled in its parent folder, so that one must be writable.
        return path if output.kind == "folder" else path.rstrip("/").rpartition("/")[0]
    absolute = os.path.abspath(local_path(path))
    kind = special_kind(path)
    if output.kind == "file":
        if kind is not None:
            check_special(path, kind)
            return None
        if path.endswith("/") or os.path.isdir(absolute):
            raise output_error(path, IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)))
        _no_circle(path, absolute)
        # `atomic_write` replaces the file that a link leads to, so its folder is the one to test.
        return os.path.dirname(os.path.realpath(absolute))
    _no_circle(path, absolute)
    if kind is not None or (os.path.exists(absolute) and not stat.S_ISDIR(os.stat(absolute).st_mode)):
        raise OutputError(f"{path}: is a {kind or 'file'}, but a folder will be written\n  → name a folder")
    return absolute if output.kind == "folder" else os.path.dirname(absolute)


def _no_circle(path: str, absolute: str) -> None:
    # `realpath` resolves links completely, except where they lead in a circle.
    if os.path.islink(os.path.realpath(absolute)):
        raise output_error(path, OSError(errno.ELOOP, os.strerror(errno.ELOOP)))


def _try(output: Output, folder: str) -> None:
    try:
        check_writable(folder)
    except OSError as error:
        raise output_error(output.path, error) from error
    except ValueError:
        raise
    except Exception as error:
        # Stores have errors of their own, for a refusal too.
        raise OutputError(f"{output.path}: cannot be written ({type(error).__name__}: {error})") from error


def _check_space(output: Output) -> None:
    # `free_bytes` looks at the folder of a file, so a folder is represented by a file in it.
    free = free_bytes(join(output.path, "x") if output.kind == "folder" else output.path)
    if output.nbytes is not None and free is not None and free < output.nbytes:
        raise OutputError(
            f"{output.path}: {amount(output.nbytes, 'bytes')} will be written, but {amount(free, 'bytes')} are free "
            f"on the disk of {nearest_folder(output.path)}\n  → free space there, or choose another path"
        )
