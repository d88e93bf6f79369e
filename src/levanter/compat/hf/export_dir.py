"""Export directories, local or at a URL, and how a complete export is told from a partial one.

A folder on a disk is written as `<name>.incomplete` and renamed once it is complete, so a folder with the final name
is complete. Object stores rename no folders. There a file `export.incomplete` says that an export is under way: it is
written first and deleted last, after `config.json`, without which no reader takes the folder for a checkpoint. A killed
export leaves that file, and the next export to the same URL replaces its files.
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
    """The export directory exists already."""


class ExportDir(Protocol):
    """The directory of one export."""

    @property
    def lease(self) -> str:
        """The folder of its lease, which is no part of the export."""
        ...

    @property
    def name(self) -> str:
        """How messages call it."""
        ...

    def refuse_existing(self) -> None:
        """Checks that the directory does not exist.

        Raises:
            ExportPathError: it does.
        """
        ...

    def recover(self) -> None:
        """Completes or undoes a replacement that a killed export left half done."""
        ...

    def begin(self) -> None:
        """Creates the directory; deletes what a killed export left."""
        ...

    def open(self, file: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """A file of the export, for writing."""
        ...

    def written(self) -> Repository:
        """What is there so far, for reading."""
        ...

    def finish(self) -> None:
        """Declares it complete."""
        ...


def export_dir(folder: str | Path) -> ExportDir:
    """The place that a path or URL names."""
    if is_remote(str(folder)):
        return RemoteExportDir(str(folder).rstrip("/"))
    return LocalExportDir(Path(local_path(str(folder))))


def is_complete(folder: str) -> bool:
    """Whether a path or URL holds a complete export."""
    if not is_remote(folder):
        return bool(_names_in(local_path(folder)))
    names = _remote_names(folder)
    return bool(names & {CONFIG, ADAPTER_CONFIG}) and MARK not in names


def exports_in(folder: str) -> list[str]:
    """What lies in a folder for exports, those left out that were killed half-way; nothing where there is no folder."""
    if not is_remote(folder):
        return [name for name in _names_in(local_path(folder)) if not name.endswith((INCOMPLETE, LEASE))]
    files = _remote_names(folder)
    return sorted({top for file in files if f"{(top := file.partition('/')[0])}/{MARK}" not in files})


def _names_in(path: str) -> list[str]:
    """What a local folder holds, or itself where it is a file."""
    if os.path.isdir(path):
        return sorted(os.listdir(path))
    return [os.path.basename(path)] if os.path.exists(path) else []


def _remote_names(url: str) -> frozenset[str]:
    """The files below a URL, relative to it; those of leases left out."""
    fs, root = filesystem(url)
    # fsspec caches listings; another process may have written since.
    fs.invalidate_cache()
    try:
        paths = fs.find(root)
    except FileNotFoundError:
        return frozenset()
    inside = root.strip("/") + "/"
    names = (path.lstrip("/").removeprefix(inside) for path in paths if path.lstrip("/").startswith(inside))
    return frozenset(name for name in names if LEASE not in name.split("/"))


class LocalExportDir:
    """A folder on a disk, which gets its name by a rename.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path):
        self._path = path
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
        """Refuses a path where a folder is, or the one that a killed export was about to replace."""
        if self._path.exists() or self._replaced.exists():
            raise exists_error(self.name)

    def recover(self) -> None:
        """Puts the folder back that a killed export had moved aside, or drops it if the new one is complete."""
        if not self._replaced.exists():
            return
        if self._path.exists():
            shutil.rmtree(self._replaced)
        else:
            os.replace(self._replaced, self._path)

    def begin(self) -> None:
        """Makes an empty folder beside the final one."""
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)

    def open(self, file: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """A file of that folder, which appears there only once it is complete."""
        return atomic_write(str(self._partial / file))

    def written(self) -> Repository:
        """The folder beside the final one, as a repository."""
        return LocalFolder(self._partial)

    def finish(self) -> None:
        """Renames the folder into place; another export that is there is moved aside first and dropped last."""
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
        """Below the URL, where no other list of files has it."""
        return join(self._url, LEASE)

    @property
    def name(self) -> str:
        """The URL."""
        return self._url

    def refuse_existing(self) -> None:
        """Refuses a URL below which files are, unless they are of an export that was not finished."""
        names = _remote_names(self._url)
        if names and MARK not in names:
            raise exists_error(self.name)

    def recover(self) -> None:
        """Does nothing: a URL has no rename that could have been interrupted."""
        pass  # It is no checkpoint any more, and its files may be anybody's: the next export begins anew.

    def begin(self) -> None:
        """Writes the mark of an unfinished export, then removes what is there."""
        names = _remote_names(self._url)
        self._fs.makedirs(self._root, exist_ok=True)
        self._fs.pipe_file(self._at(MARK), b"an export is in progress or was killed: this folder is incomplete\n")
        # First what makes the rest a checkpoint.
        for file in sorted(names - {MARK}, key=lambda file: file not in (CONFIG, ADAPTER_CONFIG)):
            self._fs.rm_file(self._at(file))

    @contextlib.contextmanager
    def open(self, file: str) -> Iterator[IO[bytes]]:
        """A file below the URL; where writing it fails, it is discarded if the file system can."""
        opened = self._fs.open(self._at(file), "wb", block_size=UPLOAD_BYTES)
        try:
            yield opened
        except BaseException:
            with contextlib.suppress(OSError, AttributeError, NotImplementedError):
                opened.discard()
            raise
        opened.close()

    def written(self) -> Repository:
        """The files below the URL, as a repository."""
        self._fs.invalidate_cache()
        return RemoteFolder(self._url)

    def finish(self) -> None:
        """Removes the mark: from now on the export is complete."""
        self._fs.rm_file(self._at(MARK))

    def _at(self, file: str) -> str:
        return f"{self._root.rstrip('/')}/{file}"


def exists_error(name: str) -> ExportPathError:
    """The error for an export directory that exists already."""
    return ExportPathError(name, "it exists already", suggestion="choose another folder, or allow it to be replaced")
