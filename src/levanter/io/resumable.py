"""Parts of a result, with which a run goes on where a killed one stopped: whose they are, and which there are.

A *part* is one file with a piece of a result, which appears complete or not at all. What it contains, and whether that
is believed, is the business of who writes it. Parts are in a folder of their own, beside `run.json`: the *identity* of
the run, every fact that the result depends on. A run with another identity neither goes on with parts nor adds to them.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from levanter.base.json_types import Json
from levanter.io.atomic import atomic_write, remove_stale_temporaries
from levanter.io.lease import Lease
from levanter.io.paths import base_name, exists, filesystem, join, open_read

IDENTITY = "run.json"
_PART = re.compile(r"part-(\d+)\..*")


class OtherRunError(ValueError):
    """A folder holds results of another run; the message lists what differs, and what to do."""


@dataclass(frozen=True, kw_only=True)
class PartFolder:
    """The folder of a run's parts.

    Attributes:
        path: of the folder.
        identity: what the result depends on, as JSON values.
        digits: of a part's number in its name, at least.
        ending: of a part's name.
        writer: what writes them, for people.
        advice: what helps who meets another run's.
        lease: of the folder, in the process that writes; None if nobody else can write there.
    """

    path: str
    identity: Mapping[str, Json] = field(repr=False)
    digits: int
    ending: str
    writer: str
    advice: str
    lease: Lease | None = field(default=None, repr=False)

    def begin(self) -> None:
        """Records the identity, and removes what killed writers left behind."""
        self.check_lease()
        remove_stale_temporaries(self.path)
        with atomic_write(join(self.path, IDENTITY)) as file:
            # Paths may contain what no text has, which JSON can say only in ASCII.
            file.write(json.dumps(dict(self.identity), indent=2, sort_keys=True).encode() + b"\n")

    def has_begun(self, holds: str) -> bool:
        """Whether a run has begun here, which is this one.

        Args:
            holds: what is said of another run's folder, up to its "another run".

        Raises:
            OtherRunError: it is another one.
        """
        path = join(self.path, IDENTITY)
        if not exists(path):
            return False
        self.require_same(self.read_json(path), holds)
        return True

    def require_same(self, stored: object, holds: str) -> None:
        """Returns if `stored`, read from a file, is this run's identity.

        Raises:
            OtherRunError: it is not.
        """
        stored_fields = stored if isinstance(stored, Mapping) else {}
        ours = json.loads(json.dumps(dict(self.identity)))
        keys = sorted(key for key in {*stored_fields, *ours} if stored_fields.get(key) != ours.get(key))
        if keys:
            lines = [f"  {key}: there {stored_fields.get(key)!r}, now {ours.get(key)!r}" for key in keys]
            raise OtherRunError(
                f"{holds} another run, which this one cannot continue:\n" + "\n".join([*lines, f"  → {self.advice}"])
            )

    def read_json(self, path: str) -> object:
        """What one of the run's JSON files says.

        Raises:
            OtherRunError: it is no JSON.
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
        """The paths of the parts that are there, by their numbers, in that order."""
        fs, folder = filesystem(self.path)
        if not fs.isdir(folder):
            return {}
        # Listings of object stores are cached; another process may have written since.
        fs.invalidate_cache()
        names = {base_name(entry) for entry in fs.ls(folder, detail=False)}
        numbers = sorted(int(match[1]) for name in names if (match := _PART.fullmatch(name)))
        return {number: self.at(number) for number in numbers if self._name(number) in names}

    def remove(self) -> None:
        """Removes the parts and their identity."""
        remove(self.path)

    def check_lease(self) -> None:
        """Returns if this process still holds the folder's lease.

        Raises:
            LeaseLostError: another process has taken it over.
        """
        if self.lease is not None:
            self.lease.check()

    def _name(self, number: int) -> str:
        return f"part-{number:0{self.digits}}{self.ending}"


def remove(path: str) -> None:
    """Removes a file or a folder with what is in it; nothing where there is none."""
    fs, name = filesystem(path)
    if fs.exists(name):
        fs.rm(name, recursive=True)
