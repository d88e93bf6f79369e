"""Partial results of a book: the scores of windows that an interrupted run has computed.

A part is one Parquet file with the scores of consecutive windows (see `io.resumable`). The identity of a run is text,
tokenizer, model, windows, precision, mesh and batch. A part records a digest of the identity and a checksum of its
numbers; the windows of a part that does not match them are scored again. When the book's results are written,
`.success` records the identity and the size and digest of each result file, and the parts are removed.
"""

import hashlib
import json
import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from levanter.io import LeaseLostError, ResumableResults, atomic_write, exists, file_size, join, open_read
from levanter.memorization.results import MANIFEST, WINDOWS, Scores, as_json_bytes, read_scores, score_columns

logger = logging.getLogger(__name__)

DONE, RESULTS = ".success", "results"
PartsIdentity = Mapping[str, Any]


class UnwritableFolderError(OSError, ValueError):
    """The folder for the results cannot be written."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PartStore(ResumableResults):
    """The result folder of one book; a part contains the scores of consecutive windows.

    Attributes:
        windows: number of windows of the book.
        suffix_tokens: k.
    """

    marker = DONE
    digits = 9
    ending = ".parquet"
    writer = "a memorization run"
    advice = "set another output_base_path, or if_exists: replace"

    windows: int
    suffix_tokens: int

    def finished_identity(self, marker: object) -> object:
        """The identity in `.success`, which also records the digests of the results."""
        if not isinstance(marker, Mapping):
            # A marker that is no object has no such keys; the comparison then reports it as another run's.
            return marker
        return {key: value for key, value in marker.items() if key != RESULTS}

    def begin(self) -> None:
        """Records the identity, and removes temporary files of interrupted writers.

        Raises:
            UnwritableFolderError: the folder is not writable.
        """
        try:
            super().begin()
        # A lost lease is not a problem of the folder.
        except LeaseLostError:
            raise
        except OSError as error:
            raise UnwritableFolderError(
                f"{self.folder}: the results cannot be written there ({error.strerror or error})"
            ) from error

    def write(self, first: int, scores: Scores) -> None:
        """Writes a part with the scores of the windows from `first` on."""
        self.check_lease()
        # The part describes itself, so that a renamed file, or one of another run, is not accepted.
        meta = {"identity": _digest(self.identity), "first": first, "rows": len(scores), "crc32": _checksum(scores)}
        table = pa.table(score_columns(scores)).replace_schema_metadata({b"part": json.dumps(meta).encode()})
        with atomic_write(self.part_folder.at(first)) as file:
            pq.write_table(table, file, compression="zstd")

    def read(self) -> list[Scores]:
        """The scores of consecutive windows from window 0 on, up to the first missing or damaged part."""
        paths = self.part_folder.numbered()
        scores: list[Scores] = []
        done = 0
        # Part names are their first windows, so a gap ends the loop: later parts are computed again, which keeps the
        # batches of the run aligned.
        while done in paths and done < self.windows:
            part = self._read_part(paths[done], done)
            if part is None:
                logger.warning("%s is damaged; its windows are scored again", paths[done])
                break
            scores.append(part)
            done += len(part)
        return scores

    def finish(self, results: Sequence[str] = ()) -> None:
        """Records that the results are complete, and removes the parts.

        Args:
            results: names of the result files, which are read again for their digests.
        """
        self.check_lease()
        # Read back from storage rather than from memory, so that a failed write is noticed before the parts are
        # removed.
        record = {name: _size_and_digest(join(self.folder, name)) for name in results}
        with atomic_write(join(self.folder, DONE)) as file:
            file.write(as_json_bytes({**self.identity, RESULTS: record}))
        # After the marker: a crash in between leaves parts that a later start ignores.
        self.clean()

    def missing_or_changed(self) -> dict[str, str]:
        """Result files of a finished run that are missing or changed: name → description."""
        value = self.part_folder.read_json(join(self.folder, DONE))
        record = value.get(RESULTS) if isinstance(value, Mapping) else None
        if not isinstance(record, Mapping):
            logger.warning("%s: finished by an earlier version, which recorded no digests; not verified", self.folder)
            record = {name: None for name in (WINDOWS, MANIFEST)}
        differences = {name: _difference(join(self.folder, name), recorded) for name, recorded in record.items()}
        return {name: difference for name, difference in differences.items() if difference is not None}

    def _read_part(self, path: str, first: int) -> Scores | None:
        with open_read(path) as file:
            content = file.read()
        try:
            table = pq.read_table(pa.BufferReader(content))
            meta = json.loads((table.schema.metadata or {})[b"part"])
            scores = read_scores(table, self.suffix_tokens)
        except (pa.ArrowException, OSError, ValueError, KeyError):
            return None
        expected = {"identity": _digest(self.identity), "first": first, "rows": len(scores)}
        # Also the number of rows: a part must not reach beyond the book.
        valid = meta == {**expected, "crc32": _checksum(scores)}
        return scores if valid and len(scores) and first + len(scores) <= self.windows else None


def require_unchanged(folder: str, names: Sequence[str]) -> None:
    """Compares result files of a finished run with what was recorded when they were written.

    Args:
        folder: of the results.
        names: the files to compare.

    Raises:
        ValueError: some are missing or have changed; names all of them.
    """
    marker = join(folder, DONE)
    if not exists(marker):
        logger.warning("%s: there is no %s, which records the digests of its files; not verified", folder, DONE)
        return
    try:
        with open_read(marker) as file:
            record = json.loads(file.read())[RESULTS]
        # A run of token ids has no text; its record has no entry for one.
        recorded = {name: record[name] for name in names if name in record}
    except (ValueError, KeyError, TypeError):
        logger.warning("%s: it records no digests of results; not verified", marker)
        return
    differences = ((name, _difference(join(folder, name), value)) for name, value in recorded.items())
    # All files are compared before anything is raised, so that one error names them all.
    if problems := [f"{join(folder, name)}: {text}" for name, text in differences if text is not None]:
        raise ValueError(
            "\n".join(problems) + "\n  → start the command of that run again: it writes what was lost, and scores only "
            "what it must"
        )


def _size_and_digest(path: str) -> dict[str, int | str]:
    """The size and SHA-256 of a file."""
    digest, size = hashlib.sha256(), 0
    with open_read(path) as file:
        while block := file.read(1 << 22):
            digest.update(block)
            size += len(block)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _difference(path: str, recorded: object) -> str | None:
    """How a file differs from what was recorded; None if it does not."""
    if not exists(path):
        return "missing"
    if not isinstance(recorded, Mapping):
        # A run of an earlier version has only names; existence is all that can be checked.
        return None
    # The size first: it needs no read of the file.
    size = file_size(path)
    if size != recorded.get("bytes"):
        return f"{size:,} bytes, {recorded.get('bytes')} were written"
    return None if _size_and_digest(path) == recorded else "its content has changed since it was written"


def _digest(identity: PartsIdentity) -> str:
    return hashlib.sha256(as_json_bytes(identity)).hexdigest()


def _checksum(scores: Scores) -> int:
    value = 0
    for name, array in sorted(scores.arrays.items()):
        # Names are part of the checksum, so that two arrays of one size cannot be exchanged.
        value = zlib.crc32(array.tobytes(), zlib.crc32(name.encode(), value))
    return value
