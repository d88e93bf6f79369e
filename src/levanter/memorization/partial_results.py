"""Parts: the windows of a book that are scored already, kept so that a killed run resumes where it stopped.

A *part* is a run of windows with their scores, one Parquet file that appears complete or not at all. Parts are stored
in `parts/` beside the book's results, with `run.json`: the *identity* of the run, every fact that its results depend on
(text, tokenizer, model, windows, precision, mesh, batch). A run with another identity may not add to them.

A part records its identity and a checksum of its numbers; one that does not match them is scored again. When the book's
results are written, `.success` records the identity and the size and digest of each result, and the parts are removed.
"""

import hashlib
import json
import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from levanter.io import Lease, PartFolder, atomic_write, exists, file_size, join, open_read
from levanter.io.atomic import remove_stale_temporaries
from levanter.io.resumable import remove
from levanter.memorization.results import MANIFEST, WINDOWS, Scores, as_json_bytes, score_columns, scores_of

logger = logging.getLogger(__name__)

PARTS, DONE, RESULTS = "parts", ".success", "results"
PartsIdentity = Mapping[str, Any]


class UnwritableFolderError(OSError, ValueError):
    """The folder for the results cannot be written."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PartStore:
    """The parts of one book.

    Attributes:
        folder: the book's folder.
        identity: what the results depend on: dotted keys, JSON values.
        windows: how many the book has.
        suffix_tokens: k.
        lease: of the folder, in the process that writes; None if nobody else can write there.
    """

    folder: str
    identity: PartsIdentity = field(repr=False)
    windows: int
    suffix_tokens: int
    lease: Lease | None = field(default=None, repr=False)

    @property
    def parts(self) -> PartFolder:
        """Where its parts are."""
        return PartFolder(
            path=join(self.folder, PARTS),
            identity=self.identity,
            digits=9,
            ending=".parquet",
            writer="a memorization run",
            advice="set another output_base_path, or if_exists: replace",
            lease=self.lease,
        )

    def is_done(self) -> bool:
        """Whether this same run has finished here.

        Raises:
            OtherRunError: another run has finished or begun here; lists what differs.
        """
        parts, path = self.parts, join(self.folder, DONE)
        if exists(path):
            parts.require_same(_without_results(parts.read_json(path)), f"{self.folder} holds the results of")
            return True
        parts.has_begun(f"{self.folder} holds a part of")
        return False

    def begin(self) -> None:
        """Records the identity, and removes what killed writers left behind.

        Raises:
            UnwritableFolderError: the folder is not writable.
        """
        self.check_lease()
        try:
            remove_stale_temporaries(self.folder)
            self.parts.begin()
        except OSError as error:
            raise UnwritableFolderError(
                f"{self.folder}: the results cannot be written there ({error.strerror or error})"
            ) from error

    def write(self, first: int, scores: Scores) -> None:
        """Adds the windows from `first` on."""
        self.check_lease()
        meta = {"identity": _digest(self.identity), "first": first, "rows": len(scores), "crc32": _checksum(scores)}
        table = pa.table(score_columns(scores)).replace_schema_metadata({b"part": json.dumps(meta).encode()})
        with atomic_write(self.parts.at(first)) as file:
            pq.write_table(table, file, compression="zstd")

    def read(self) -> list[Scores]:
        """The existing parts, from window 0 on, up to the first that is missing or damaged."""
        paths = self.parts.numbered()
        found: list[Scores] = []
        done = 0
        while done in paths and done < self.windows:
            part = self._read_part(paths[done], done)
            if part is None:
                logger.warning("%s is damaged; its windows are scored again", paths[done])
                break
            found.append(part)
            done += len(part)
        return found

    def finish(self, results: Sequence[str] = ()) -> None:
        """Marks the results as written, and removes the parts.

        Args:
            results: the names of their files, which are read once more for their digests.
        """
        self.check_lease()
        record = {name: _found(join(self.folder, name)) for name in results}
        with atomic_write(join(self.folder, DONE)) as file:
            file.write(as_json_bytes({**self.identity, RESULTS: record}))
        self.clean()

    def lost(self) -> dict[str, str]:
        """Results of a finished run that are missing or changed: name → what is wrong, in words."""
        value = self.parts.read_json(join(self.folder, DONE))
        record = value.get(RESULTS) if isinstance(value, Mapping) else None
        if not isinstance(record, Mapping):
            logger.warning("%s: finished by an earlier version, which recorded no digests; unverified", self.folder)
            record = {name: None for name in (WINDOWS, MANIFEST)}
        wrong = {name: _difference(join(self.folder, name), told) for name, told in record.items()}
        return {name: what for name, what in wrong.items() if what is not None}

    def clean(self) -> None:
        """Removes the parts, and what killed writers left behind."""
        remove_stale_temporaries(self.folder)
        self.parts.remove()

    def start_over(self) -> None:
        """Discards what any run did here; existing results are overwritten at the end."""
        self.clean()
        remove(join(self.folder, DONE))

    def check_lease(self) -> None:
        """Returns if this process still holds the folder's lease.

        Raises:
            LeaseLostError: another process has taken it over.
        """
        self.parts.check_lease()

    def _read_part(self, path: str, first: int) -> Scores | None:
        with open_read(path) as file:
            content = file.read()
        try:
            table = pq.read_table(pa.BufferReader(content))
            meta = json.loads((table.schema.metadata or {})[b"part"])
            scores = scores_of(table, self.suffix_tokens)
        except (pa.ArrowException, OSError, ValueError, KeyError):
            return None
        expected = {"identity": _digest(self.identity), "first": first, "rows": len(scores)}
        good = meta == {**expected, "crc32": _checksum(scores)}
        return scores if good and len(scores) and first + len(scores) <= self.windows else None


def _without_results(value: object) -> object:
    return {key: each for key, each in value.items() if key != RESULTS} if isinstance(value, Mapping) else value


def _found(path: str) -> dict[str, int | str]:
    """Size and digest of a file."""
    digest, size = hashlib.sha256(), 0
    with open_read(path) as file:
        while block := file.read(1 << 22):
            digest.update(block)
            size += len(block)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _difference(path: str, told: object) -> str | None:
    """What is wrong with a file, in words; None for nothing."""
    if not exists(path):
        return "gone"
    if not isinstance(told, Mapping):
        return None
    size = file_size(path)
    if size != told.get("bytes"):
        return f"{size:,} bytes, {told.get('bytes')} were written"
    return None if _found(path) == told else "its content has changed since it was written"


def _digest(identity: PartsIdentity) -> str:
    return hashlib.sha256(as_json_bytes(identity)).hexdigest()


def _checksum(scores: Scores) -> int:
    value = 0
    for name, array in sorted(scores.arrays.items()):
        value = zlib.crc32(array.tobytes(), zlib.crc32(name.encode(), value))
    return value
