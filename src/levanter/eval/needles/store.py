"""Batches that are answered already, kept so that a killed run goes on where it stopped.

A *part* is a batch's answers: one JSON file in `parts/` beside the results, which appears complete or not at all.
`results.json` is written last, and records the *identity* of the run: every fact that its answers depend on. A run with
another identity neither goes on with parts nor replaces results, unless it is told to.
"""

import json
import logging
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from levanter.eval.needles.results import NeedleAnswer
from levanter.io import Lease, atomic_write, exists, join, open_read
from levanter.io.atomic import remove_left_behind
from levanter.io.paths import base_name, filesystem

logger = logging.getLogger(__name__)

PARTS, IDENTITY, RESULTS = "parts", "run.json", "results.json"
NeedleIdentity = Mapping[str, Any]
"""Every fact that answers depend on, as JSON values."""
_PART = re.compile(r"part-(\d+)\.json")


class OtherNeedlesError(ValueError):
    """The folder holds results of another run."""


@dataclass(frozen=True, kw_only=True)
class NeedleStore:
    """The folder of a run.

    Attributes:
        folder: of its results.
        identity: what they depend on, as JSON values.
        lease: of the folder, in the process that writes.
    """

    folder: str
    identity: NeedleIdentity = field(repr=False)
    lease: Lease | None = field(default=None, repr=False)

    def is_done(self) -> bool:
        """Whether this same run has finished here.

        Raises:
            OtherNeedlesError: another run has finished or begun here; lists what differs.
        """
        path = join(self.folder, RESULTS)
        if exists(path):
            found = _read_json(path)
            self._same(found.get("identity") if isinstance(found, Mapping) else None, "holds the results of")
            return True
        path = join(self.folder, PARTS, IDENTITY)
        if exists(path):
            self._same(_read_json(path), "holds a part of")
        return False

    def begin(self) -> None:
        """Records the identity, and removes what killed writers left behind."""
        self._check()
        remove_left_behind(self.folder)
        remove_left_behind(join(self.folder, PARTS))
        _write_json(join(self.folder, PARTS, IDENTITY), dict(self.identity))

    def write(self, number: int, answers: Sequence[NeedleAnswer]) -> None:
        """Adds the answers of a batch."""
        self._check()
        rows = [{"logprobs": list(each.logprobs), "ranks": list(each.ranks)} for each in answers]
        _write_json(
            join(self.folder, PARTS, f"part-{number:06}.json"), {"rows": rows, "crc32": self._sum(number, rows)}
        )

    def read(self) -> dict[int, tuple[NeedleAnswer, ...]]:
        """The answers that are there, by batch; damaged ones are left out."""
        found = {}
        for number, name in self._names():
            path = join(self.folder, PARTS, name)
            try:
                part = _read_json(path)
                rows = part["rows"]  # pyright: ignore
                if part["crc32"] != self._sum(number, rows):  # pyright: ignore
                    raise ValueError("its checksum differs")
                found[number] = tuple(
                    NeedleAnswer(logprobs=tuple(r["logprobs"]), ranks=tuple(r["ranks"])) for r in rows
                )
            except (ValueError, KeyError, TypeError) as error:
                logger.warning("%s is damaged (%s); its questions are asked again", path, error)
        return found

    def clean(self) -> None:
        """Removes the parts."""
        self._check()
        _remove(join(self.folder, PARTS))

    def start_over(self) -> None:
        """Discards what any run did here."""
        self.clean()
        _remove(join(self.folder, RESULTS))

    def _check(self) -> None:
        if self.lease is not None:
            self.lease.check()

    def _names(self) -> Iterator[tuple[int, str]]:
        fs, name = filesystem(join(self.folder, PARTS))
        if not fs.isdir(name):
            return
        # Listings of object stores are cached; another process may have written since.
        fs.invalidate_cache()
        for each in sorted(base_name(entry) for entry in fs.ls(name, detail=False)):
            if match := _PART.fullmatch(each):
                yield int(match[1]), each

    def _sum(self, number: int, rows: object) -> int:
        said = json.dumps([_plain(self.identity), number, rows], sort_keys=True)
        return zlib.crc32(said.encode())

    def _same(self, there: object, what: str) -> None:
        there = there if isinstance(there, Mapping) else {}
        ours = _plain(self.identity)
        keys = sorted(key for key in {*there, *ours} if there.get(key) != ours.get(key))
        if keys:
            lines = [f"  {key}: there {there.get(key)!r}, now {ours.get(key)!r}" for key in keys]
            raise OtherNeedlesError(
                f"output_path: {self.folder} {what} another run, which this one cannot continue:\n"
                + "\n".join(lines)
                + "\n  → another output_path, or if_exists: replace"
            )


def _plain(identity: NeedleIdentity) -> dict[str, Any]:
    return json.loads(json.dumps(dict(identity)))


def _write_json(path: str, value: object) -> None:
    with atomic_write(path) as file:
        file.write(json.dumps(value, ensure_ascii=False).encode())


def _read_json(path: str) -> object:
    with open_read(path) as file:
        content = file.read()
    try:
        return json.loads(content)
    except ValueError as error:
        raise OtherNeedlesError(
            f"{path}: not written by eval_needles ({error})\n  → another output_path, or if_exists: replace"
        ) from error


def _remove(path: str) -> None:
    fs, name = filesystem(path)
    if fs.exists(name):
        fs.rm(name, recursive=True)
