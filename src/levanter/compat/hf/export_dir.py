"""Export directories, local or at a URL; a reader can tell a complete export from a partial one.

A folder on a disk is written as `<name>.incomplete` and renamed once it is complete, so a folder with the final name
is complete. Object stores cannot rename folders. There, a file `export.incomplete` marks an unfinished export: it is
written first and deleted last, after `config.json` is written, without which no reader accepts the folder as a
checkpoint. A killed export leaves that file, and the next export to the same URL replaces its files.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Protocol

from levanter.compat.hf.errors import CheckpointError
from levanter.compat.hf.repository import LocalFolder, RemoteFolder, Repository
from levanter.io import atomic_write, is_remote, join, local_path
from levanter.io.lease import LEASE
from levanter.io.paths import filesystem

INCOMPLETE = ".incomplete"
REPLACED = ".replaced"
MARK = "export.incomplete"
CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
UPLOAD_BYTES = 32 << 20
"""Bytes sent to an object store at once."""


class ExportPathError(CheckpointError):
    """The export directory already exists."""


class ExportDir(Protocol):
    """The directory of one export."""

    @property
    def lease(self) -> str:
        """The folder of its lease, which is not part of the export."""
        ...

    @property
    def name(self) -> str:
        """Its name in messages."""
        ...

    def refuse_existing(self) -> None:
        """Checks that the directory does not exist.

        Raises:
            ExportPathError: the directory exists.
        """
        ...

    def recover(self) -> None:
        """Completes or undoes a replacement that a killed export left unfinished."""
        ...

    def begin(self) -> None:
        """Creates the directory; deletes the files of a killed export."""
        ...

    def open(self, file: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """Opens a file of the export for writing."""
        ...

    def written(self) -> Repository:
        """The files written so far, for reading."""
        ...

    def finish(self) -> None:
        """Marks the export complete."""
        ...


def export_dir(folder: str | Path) -> ExportDir:
    """The export directory of a path or URL."""
    if is_remote(str(folder)):
        return RemoteExportDir(str(folder).rstrip("/"))
    return LocalExportDir(Path(local_path(str(folder))))


def is_complete(folder: str) -> bool:
    """Whether a path or URL holds a complete export."""
    if not is_remote(folder):
        return bool(_names_in(local_path(folder)))
    names = _remote_names(folder)
    # Both conditions: the mark is deleted last, and a mark that was never written (a plain upload) leaves no config.
    return bool(names & {CONFIG, ADAPTER_CONFIG}) and MARK not in names


def exports_in(folder: str) -> list[str]:
    """The complete exports in a folder; unfinished ones are left out. Empty if there is no folder."""
    if not is_remote(folder):
        # Locally an unfinished export is recognized by its name, since the rename comes last.
        return [name for name in _names_in(local_path(folder)) if not name.endswith((INCOMPLETE, LEASE))]
    files = _remote_names(folder)
    return sorted({top for file in files if f"{(top := file.partition('/')[0])}/{MARK}" not in files})


def _names_in(path: str) -> list[str]:
    """The entries of a local folder, or the name of a file."""
    if os.path.isdir(path):
        return sorted(os.listdir(path))
    return [os.path.basename(path)] if os.path.exists(path) else []


def _remote_names(url: str) -> frozenset[str]:
    """The files below a URL, relative to it; without those of leases."""
    fs, root = filesystem(url)
    # fsspec caches listings; another process may have written since.
    fs.invalidate_cache()
    try:
        paths = fs.find(root)
    except FileNotFoundError:
        return frozenset()
    inside = root.strip("/") + "/"
    names = (path.lstrip("/").removeprefix(inside) for path in paths if path.lstrip("/").startswith(inside))
    # A lease lies below the URL while an export runs; it must not make the folder look used.
    return frozenset(name for name in names if LEASE not in name.split("/"))


class LocalExportDir:
    """A folder on a disk, which gets its final name by a rename.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path):
        self._path = path
        # In the same parent folder, so that the final rename stays on one file system and is atomic.
        self._partial = path.with_name(path.name + INCOMPLETE)
        self._replaced = path.with_name(path.name + REPLACED)

    @property
    def lease(self) -> str:
        """A folder beside the final one."""
        return str(self._path.with_name(f".{self._path.name}{LEASE}"))

    @property
    def name(self) -> str:
        """The path."""
        return str(self._path)

    def refuse_existing(self) -> None:
        """Refuses an existing folder, or one that a killed export was replacing."""
        if self._path.exists() or self._replaced.exists():
            raise exists_error(self.name)

    def recover(self) -> None:
        """Restores the folder that a killed export had moved aside, or deletes it if the new one is in place."""
        if not self._replaced.exists():
            return
        # The new folder got its name, so only the deletion of the old one was missing.
        if self._path.exists():
            shutil.rmtree(self._replaced)
        else:
            os.replace(self._replaced, self._path)

    def begin(self) -> None:
        """Creates an empty folder next to the final one."""
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)

    def open(self, file: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """Opens a file of that folder, which appears there once it is complete."""
        return atomic_write(str(self._partial / file))

    def written(self) -> Repository:
        """The unfinished folder, as a repository."""
        return LocalFolder(self._partial)

    def finish(self) -> None:
        """Renames the folder into place; an existing export is moved aside first and deleted last."""
        if self._path.exists():
            # A folder cannot be renamed over another one. Between the two renames no folder has the final name;
            # `recover` finishes the replacement if the process is killed there.
            os.replace(self._path, self._replaced)
            os.replace(self._partial, self._path)
            shutil.rmtree(self._replaced)
        else:
            os.replace(self._partial, self._path)


class RemoteExportDir:
    """A folder of an object store, or of any other file system that fsspec knows.

    Args:
        url: the folder.
    """

    def __init__(self, url: str):
        self._url = url
        self._fs, self._root = filesystem(url)

    @property
    def lease(self) -> str:
        """A folder below the URL, which listings of the export leave out."""
        return join(self._url, LEASE)

    @property
    def name(self) -> str:
        """The URL."""
        return self._url

    def refuse_existing(self) -> None:
        """Refuses a URL with files below it, unless they belong to an unfinished export."""
        names = _remote_names(self._url)
        if names and MARK not in names:
            raise exists_error(self.name)

    def recover(self) -> None:
        """Does nothing: a URL has no rename that could have been interrupted."""
        pass  # An unfinished export is no checkpoint, and its files are not reused: `begin` deletes them.

    def begin(self) -> None:
        """Writes the mark of an unfinished export, then deletes the existing files."""
        names = _remote_names(self._url)
        self._fs.makedirs(self._root, exist_ok=True)
        # The mark comes before the first deletion: killed at any point, the folder never looks complete.
        self._fs.pipe_file(self._at(MARK), b"an export is in progress or was killed: this folder is incomplete\n")
        # The config first: without it, no reader accepts the rest as a checkpoint.
        for file in sorted(names - {MARK}, key=lambda file: file not in (CONFIG, ADAPTER_CONFIG)):
            self._fs.rm_file(self._at(file))

    @contextlib.contextmanager
    def open(self, file: str) -> Iterator[IO[bytes]]:
        """Opens a file below the URL; after a failed write, it is discarded if the file system can."""
        opened = self._fs.open(self._at(file), "wb", block_size=UPLOAD_BYTES)
        try:
            yield opened
        except BaseException:
            # discard aborts a multipart upload, so that no truncated object appears; not every file system has it.
            with contextlib.suppress(OSError, AttributeError, NotImplementedError):
                opened.discard()
            raise
        opened.close()

    def written(self) -> Repository:
        """The files below the URL, as a repository."""
        # A listing from before the writes would hide the new files.
        self._fs.invalidate_cache()
        return RemoteFolder(self._url)

    def finish(self) -> None:
        """Removes the mark, which makes the export complete."""
        self._fs.rm_file(self._at(MARK))

    def _at(self, file: str) -> str:
        return f"{self._root.rstrip('/')}/{file}"


def exists_error(name: str) -> ExportPathError:
    """The error for an export directory that already exists."""
    return ExportPathError(name, "it exists already", suggestion="choose another folder, or set overwrite: true")
