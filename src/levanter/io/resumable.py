"""Resumable results: partial results of an interrupted run, and the identity of the run that may continue them.

A *part* is one file with a piece of a result, written atomically. Its format is that of the package that writes it.
Parts are in a folder together with `run.json`, the *identity* of the run: every fact that the result depends on. A run
with another identity neither continues from the parts nor adds to them. When a run has finished, a *marker* file next
to the parts folder records its identity, and the parts are removed.
"""

import abc
import json
import logging
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from levanter.base.bounded_json import Json
from levanter.io.atomic import atomic_write, remove_stale_temporaries
from levanter.io.lease import Lease
from levanter.io.paths import base_name, exists, filesystem, join, open_read

logger = logging.getLogger(__name__)

IDENTITY, PART_FOLDER = "run.json", "parts"
T = TypeVar("T")
_PART = re.compile(r"part-(\d+)\..*")


class OtherRunError(ValueError):
    """A folder contains results of another run; the message lists the differences and what to do."""


@dataclass(frozen=True, kw_only=True)
class PartFolder:
    """The folder of a run's parts.

    Attributes:
        path: of the folder.
        identity: what the result depends on, as JSON values.
        digits: minimum number of digits of a part's number in its name.
        ending: of a part's name.
        writer: name of the command, for errors.
        advice: what to do if the folder contains another run's parts.
        lease: of the folder, in the process that writes; None if no other process can write there.
    """

    path: str
    identity: Mapping[str, Json] = field(repr=False)
    digits: int
    ending: str
    writer: str
    advice: str
    lease: Lease | None = field(default=None, repr=False)

    def begin(self) -> None:
        """Records the identity, and removes temporary files of interrupted writers."""
        self.check_lease()
        remove_stale_temporaries(self.path)
        with atomic_write(join(self.path, IDENTITY)) as file:
            # Paths may contain surrogates, which UTF-8 cannot encode: JSON escapes them in ASCII.
            file.write(json.dumps(dict(self.identity), indent=2, sort_keys=True).encode() + b"\n")

    def has_begun(self, holds: str) -> bool:
        """Whether this run has begun here.

        Args:
            holds: the beginning of the error's message, up to "another run".

        Raises:
            OtherRunError: another run has begun here.
        """
        path = join(self.path, IDENTITY)
        if not exists(path):
            return False
        self.require_same(self.read_json(path), holds)
        return True

    def require_same(self, stored: object, holds: str) -> None:
        """Compares `stored`, read from a file, with this run's identity.

        Args:
            stored: the content of the file.
            holds: the beginning of the error's message, up to "another run".

        Raises:
            OtherRunError: they differ.
        """
        # A file that is no JSON object differs in every key, and the message then lists them all.
        stored_fields = stored if isinstance(stored, Mapping) else {}
        # Through JSON, so that tuples and lists, and int and str keys, compare as they are stored.
        ours = json.loads(json.dumps(dict(self.identity)))
        keys = sorted(key for key in {*stored_fields, *ours} if stored_fields.get(key) != ours.get(key))
        if keys:
            lines = [f"  {key}: there {stored_fields.get(key)!r}, now {ours.get(key)!r}" for key in keys]
            raise OtherRunError(
                f"{holds} another run, which this one cannot continue:\n" + "\n".join([*lines, f"  → {self.advice}"])
            )

    def read_json(self, path: str) -> object:
        """The content of one of the run's JSON files.

        Raises:
            OtherRunError: it is not JSON.
        """
        with open_read(path) as file:
            content = file.read()
        try:
            return json.loads(content)
        except ValueError as error:
            raise OtherRunError(f"{path}: not written by {self.writer} ({error})\n  → {self.advice}") from error

    def at(self, number: int) -> str:
        """The path of a part."""
        return join(self.path, self._name(number))

    def numbered(self) -> dict[int, str]:
        """Number → path of the existing parts, in ascending order."""
        fs, folder = filesystem(self.path)
        if not fs.isdir(folder):
            return {}
        # fsspec caches listings of object stores; another process may have written in the meantime.
        fs.invalidate_cache()
        names = {base_name(entry) for entry in fs.ls(folder, detail=False)}
        numbers = sorted(int(match[1]) for name in names if (match := _PART.fullmatch(name)))
        # A part with another number of digits or ending is not this run's; it is ignored.
        return {number: self.at(number) for number in numbers if self._name(number) in names}

    def remove(self) -> None:
        """Removes the parts and their identity."""
        remove(self.path)

    def check_lease(self) -> None:
        """Checks that this process still holds the folder's lease.

        Raises:
            LeaseLostError: another process has taken it over.
        """
        if self.lease is not None:
            self.lease.check()

    def _name(self, number: int) -> str:
        return f"part-{number:0{self.digits}}{self.ending}"


@dataclass(frozen=True, kw_only=True)
class ResumableResults(abc.ABC):
    """A folder with the results of a run that can be interrupted and resumed.

    A subclass sets the class attributes, reads the identity from its marker, and adds methods that write and read its
    parts.

    Attributes:
        folder: of the results; the parts are in its subfolder `parts`.
        identity: every fact that the results depend on, as JSON values.
        lease: of the folder, in the process that writes; None if no other process can write there.
    """

    marker: ClassVar[str]
    """Name of the file that a finished run writes last."""
    digits: ClassVar[int]
    ending: ClassVar[str]
    writer: ClassVar[str]
    advice: ClassVar[str]
    """See `PartFolder`."""
    key: ClassVar[str] = ""
    """The beginning of errors: the configuration key that names the folder."""

    folder: str
    identity: Mapping[str, Json] = field(repr=False)
    lease: Lease | None = field(default=None, repr=False)

    @abc.abstractmethod
    def finished_identity(self, marker: object) -> object:
        """The identity in the content of a marker."""

    @property
    def part_folder(self) -> PartFolder:
        """The folder of the parts."""
        return PartFolder(
            path=join(self.folder, PART_FOLDER),
            identity=self.identity,
            digits=self.digits,
            ending=self.ending,
            writer=self.writer,
            advice=self.advice,
            lease=self.lease,
        )

    def is_done(self) -> bool:
        """Whether this run has finished here.

        Raises:
            OtherRunError: another run has finished or begun here; lists the differences.
        """
        part_folder, path = self.part_folder, join(self.folder, self.marker)
        # The marker is written after all parts, so it decides even if the removal of the parts was interrupted.
        if exists(path):
            identity = self.finished_identity(part_folder.read_json(path))
            part_folder.require_same(identity, f"{self.key}{self.folder} holds the results of")
            return True
        part_folder.has_begun(f"{self.key}{self.folder} holds a part of")
        return False

    def begin(self) -> None:
        """Records the identity, and removes temporary files of interrupted writers."""
        self.check_lease()
        # The temporary file of a marker is in the folder itself, those of parts in the subfolder.
        remove_stale_temporaries(self.folder)
        self.part_folder.begin()

    def clean(self) -> None:
        """Removes the parts, and temporary files of interrupted writers."""
        self.check_lease()
        remove_stale_temporaries(self.folder)
        self.part_folder.remove()

    def start_over(self) -> None:
        """Removes the parts and the marker of any run; its results are overwritten when this run finishes."""
        self.clean()
        remove(join(self.folder, self.marker))

    def check_lease(self) -> None:
        """Checks that this process still holds the folder's lease.

        Raises:
            LeaseLostError: another process has taken it over.
        """
        self.part_folder.check_lease()

    def write_rows(self, number: int, rows: Json) -> None:
        """Writes a part in JSON, with a checksum of its rows and of the identity."""
        part_folder = self.part_folder
        part_folder.check_lease()
        with atomic_write(part_folder.at(number)) as file:
            file.write(json.dumps({"rows": rows, "crc32": self._checksum(number, rows)}).encode())

    def read_rows(self, parse: Callable[[Any], T], *, consequence: str) -> dict[int, T]:
        """Part number → parsed rows of the parts that `write_rows` wrote; damaged parts are omitted with a warning.

        Args:
            parse: rows → value; raises ValueError, KeyError or TypeError for invalid rows.
            consequence: what the run does about a damaged part, for the warning.
        """
        part_folder = self.part_folder
        values: dict[int, T] = {}
        for number, path in part_folder.numbered().items():
            try:
                part: Any = part_folder.read_json(path)
                if part["crc32"] != self._checksum(number, part["rows"]):
                    raise ValueError("its checksum differs")
                values[number] = parse(part["rows"])
            except (ValueError, KeyError, TypeError) as error:
                logger.warning("%s is damaged (%s); %s", path, error, consequence)
        return values

    def _checksum(self, number: int, rows: object) -> int:
        # The identity is part of the checksum, so that a part that was copied from another run's folder is rejected.
        identity = json.loads(json.dumps(dict(self.identity)))
        return zlib.crc32(json.dumps([identity, number, rows], sort_keys=True).encode())


def remove(path: str) -> None:
    """Removes a file, or a folder with its contents; does nothing if it does not exist."""
    fs, name = filesystem(path)
    if fs.exists(name):
        fs.rm(name, recursive=True)
