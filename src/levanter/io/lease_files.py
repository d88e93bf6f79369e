"""The files of a lease on a disk or behind a URL: exclusive create, list, read, touch, remove.

    <place>/.lease/000003.json              the third claim: names the holder; written once
    <place>/.lease/000003.5f0c19be.beat     that holder's heartbeat; only the holder writes it

Of two processes that create the same claim only one may succeed. Disks guarantee that (a hard link to a complete file,
or an exclusive create), and so do `gs://` and `s3://` (conditional writes). On other storage it is emulated: read,
write, wait `SETTLE_SECONDS`, read again. If two writes are further apart than that, both processes may believe that
they hold the lease until they read the claim again, which then names the later one.
"""

import contextlib
import errno
import os
import re
import secrets
import time
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from levanter.io.paths import base_name, filesystem, is_remote

CLAIM = re.compile(r"(\d{6,})\.json")
CONDITIONAL = ("gs", "gcs", "s3", "s3a", "memory")
"""Protocols whose server makes `pipe_file(mode="create")` atomic (`memory://` has a single process)."""
SETTLE_SECONDS = 1.0
"""Seconds between the write and the check of an emulated exclusive create."""
_CREATE_ATTEMPTS = 100
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


@dataclass(frozen=True)
class Claim:
    """A claim as stored: its number, its bytes, and a text that changes with every heartbeat."""

    number: int
    content: bytes
    beat: str


class LeaseFiles(Protocol):
    """The operations of a file system that a lease needs."""

    folder: str

    def newest(self) -> Claim | None:
        """The claim of the highest number, or None."""
        ...

    def create(self, number: int, content: bytes) -> bool:
        """Creates a claim; returns False if the number exists already."""
        ...

    def touch(self, number: int, holder: str, count: int) -> None:
        """Writes the holder's heartbeat."""
        ...

    def age(self, claim: Claim, holder: str | None) -> float | None:
        """Seconds since the last heartbeat by the storage's clock; None where the storage reports no times."""
        ...

    def keep_only(self, number: int) -> None:
        """Removes all files except those of one claim; all files for 0."""
        ...

    def remove(self, number: int, holder: str) -> None:
        """Removes a claim and its heartbeat, and the folder if it is empty then."""
        ...


def lease_files(folder: str) -> LeaseFiles:
    """The files of the lease in a folder or below a URL."""
    return _Remote(folder) if is_remote(folder) else _Local(folder)


def claim_name(number: int) -> str:
    """The file name of a claim."""
    return f"{number:06d}.json"


def beat_name(number: int, holder: str) -> str:
    """The file name of a heartbeat."""
    return f"{number:06d}.{holder}.beat"


def _newest_in(names: list[str]) -> int:
    return max((int(match.group(1)) for name in names if (match := CLAIM.fullmatch(name))), default=0)


class _Local:
    def __init__(self, folder: str):
        self.folder = filesystem(folder)[1]
        self._created_folders: list[str] = []

    def _at(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def newest(self) -> Claim | None:
        while True:
            try:
                names = os.listdir(self.folder)
            except FileNotFoundError:
                return None
            number = _newest_in(names)
            if not number:
                return None
            # Usually one file. A holder that lost a race for the number leaves none: only the creator of a claim writes
            # a beat.
            beats = sorted(name for name in names if name.startswith(f"{number:06d}.") and name.endswith(".beat"))
            with contextlib.suppress(FileNotFoundError):  # the claim was released since the listing; list again
                with open(self._at(claim_name(number)), "rb") as file:
                    # Bounded: anybody with access to the folder may have put a large file there.
                    content = file.read(1 << 16)
                # The text is only compared with an earlier one, so any format does that changes with the time of a
                # beat.
                beat_texts = [f"{name} {self._modified(name)}" for name in beats]
                return Claim(number, content, " ".join(beat_texts))

    def _modified(self, name: str) -> int:
        # NFS clients cache the result of `stat`; an open asks the server (close-to-open consistency).
        with open(self._at(name), "rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns

    def create(self, number: int, content: bytes) -> bool:
        for attempt in range(_CREATE_ATTEMPTS):
            # Recorded before the first attempt, so that `remove` deletes only the folders that this process created.
            self._created_folders = self._created_folders or _missing(self.folder)
            # Another process that releases its lease removes its empty folders, and may do so while `makedirs` creates
            # them here or before the file is in them; then start over. A file system that never creates a folder
            # reports the same error.
            try:
                os.makedirs(self.folder, exist_ok=True)
                return self._link(self._at(claim_name(number)), content)
            except FileNotFoundError:
                if attempt == _CREATE_ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    def _link(self, target: str, content: bytes) -> bool:
        temporary = self._at(f".{secrets.token_hex(8)}.tmp")
        with open(temporary, "xb") as file:
            file.write(content)
        try:
            # A hard link fails if the target exists, and readers never see a partial file, unlike with
            # `open(…, "x")`.
            os.link(temporary, target)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return self._create_exclusively(target, content)
        finally:
            os.unlink(temporary)
        return True

    def _create_exclusively(self, target: str, content: bytes) -> bool:
        """For file systems without hard links: a reader may see the file before its content."""
        try:
            with open(target, "xb") as file:
                file.write(content)
        except FileExistsError:
            return False
        return True

    def touch(self, number: int, holder: str, count: int) -> None:
        del count
        path = self._at(beat_name(number, holder))
        try:
            # Only the time changes: `utime` without a time sets it by the clock of the storage (of the server, on NFS).
            os.utime(path)
        except FileNotFoundError:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))

    def age(self, claim: Claim, holder: str | None) -> float | None:
        probe = self._at(f".{secrets.token_hex(8)}.tmp")
        try:
            with open(probe, "xb") as file:
                # The time of a new file is the clock of the storage, which also set the times of the claim and the
                # beat.
                storage_time = os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            return None
        finally:
            with contextlib.suppress(OSError):
                os.unlink(probe)
        names = [claim_name(claim.number), *([] if holder is None else [beat_name(claim.number, holder)])]
        times = []
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                times.append(self._modified(name))
        # A beat later than the probe means that the clock of the storage cannot be trusted; then the age is unknown.
        return (storage_time - max(times)) / 1e9 if times and max(times) <= storage_time else None

    def keep_only(self, number: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.folder):
                if not name.startswith(f"{number:06d}."):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(self._at(name))

    def remove(self, number: int, holder: str) -> None:
        for name in (claim_name(number), beat_name(number, holder)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._at(name))
        # Remove the folders that were created for the lease, up to the first that is not empty.
        with contextlib.suppress(OSError):
            for folder in dict.fromkeys((self.folder, *self._created_folders)):
                os.rmdir(folder)


def _missing(folder: str) -> list[str]:
    """The folders that `makedirs` would create, the innermost first."""
    missing = []
    while not os.path.exists(folder) and folder != os.path.dirname(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    return missing


class _Remote:
    def __init__(self, folder: str):
        self.folder = folder.rstrip("/")
        self._fs, self._root = filesystem(self.folder)
        protocols = self._fs.protocol
        names = (protocols,) if isinstance(protocols, str) else tuple(protocols)
        self._conditional = any(name in CONDITIONAL for name in names)

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _names(self) -> list[str]:
        # fsspec caches listings; another process may have written since.
        self._fs.invalidate_cache()
        try:
            return [base_name(path) for path in self._fs.ls(self._root, detail=False)]
        except FileNotFoundError:
            return []

    def _read(self, name: str) -> bytes | None:
        try:
            return bytes(self._fs.cat_file(self._at(name)))
        except FileNotFoundError:
            return None

    def newest(self) -> Claim | None:
        while True:
            names = self._names()
            number = _newest_in(names)
            if not number:
                return None
            # The claim may be released between the listing and the read; then list again.
            content = self._read(claim_name(number))
            if content is not None:
                # A remote beat is a counter, because not every store reports a time, or one that is finer than a
                # second.
                beats = sorted(name for name in names if name.startswith(f"{number:06d}.") and name.endswith(".beat"))
                beat_texts = [f"{name} {self._read(name)!r}" for name in beats]
                return Claim(number, content, " ".join(beat_texts))

    def create(self, number: int, content: bytes) -> bool:
        path = self._at(claim_name(number))
        self._fs.makedirs(self._root, exist_ok=True)
        if not self._conditional:
            # Without `mode="create"`: an implementation that does not know it overwrites silently.
            if self._read(claim_name(number)) is None:
                self._fs.pipe_file(path, content)
                time.sleep(SETTLE_SECONDS)
            return self._read(claim_name(number)) == content
        try:
            self._fs.pipe_file(path, content, mode="create")
        except OSError:
            # Stores raise different errors for an existing object; its content tells which process created it.
            existing = self._read(claim_name(number))
            if existing is None:
                raise
            return existing == content
        return True

    def touch(self, number: int, holder: str, count: int) -> None:
        self._fs.pipe_file(self._at(beat_name(number, holder)), str(count).encode())

    def age(self, claim: Claim, holder: str | None) -> float | None:
        probe = self._at(f".{secrets.token_hex(8)}.tmp")
        try:
            self._fs.pipe_file(probe, b"0")
            # As on a disk, a new file shows the clock of the storage.
            storage_time = self._modified(probe)
        finally:
            with contextlib.suppress(OSError):
                self._fs.rm_file(probe)
        names = [claim_name(claim.number), *([] if holder is None else [beat_name(claim.number, holder)])]
        times = [time for name in names if (time := self._modified(self._at(name))) is not None]
        if storage_time is None or not times or max(times) > storage_time:
            return None
        return (storage_time - max(times)).total_seconds()

    def _modified(self, path: str) -> datetime | None:
        self._fs.invalidate_cache()
        try:
            modified: object = self._fs.modified(path)
        except (NotImplementedError, KeyError, OSError):
            return None
        return modified if isinstance(modified, datetime) else None

    def keep_only(self, number: int) -> None:
        for name in self._names():
            if not name.startswith(f"{number:06d}."):
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(self._at(name))

    def remove(self, number: int, holder: str) -> None:
        for name in (claim_name(number), beat_name(number, holder)):
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._at(name))
        # Object stores have no folders; other file systems refuse to remove one that is not empty.
        with contextlib.suppress(OSError, NotImplementedError):
            self._fs.rmdir(self._root)
