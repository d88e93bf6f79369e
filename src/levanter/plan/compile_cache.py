"""On-disk cache of compiler results, so that preflight of a Program that was compiled before takes seconds.

An *answer* is everything that the worker reports of one Program: memory, or the refusal, and the compiler's text, from
which figures are parsed on every read. Its file name is the digest of its *key*: the lowered text, the devices, the
compiler's version, its options. The entry stores the key and `find` compares all of it, so the answer of another
compiler is never used. A *way* maps a Program's fingerprint (`fingerprint`) to the key of its answer, so that a lookup
needs no lowering.

Files are written under a temporary name and renamed, and carry a digest of their content, so two plans may use the
folder at once. A damaged file is reported and written again. The folder has a size limit; the least recently used
entries are removed first.
"""

import contextlib
import hashlib
import json
import logging
import os
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from levanter.io import atomic_write
from levanter.io.paths import cache_folder

logger = logging.getLogger(__name__)

MAX_BYTES = 512 << 20
"""Size limit of the folder."""
LEFT_BEHIND_SECONDS = 3600
"""Age from which a temporary file counts as left by a killed process."""
_MAGIC = b"levanter kept answer 1\n"
_DIGEST_BYTES = 32


class DamagedEntryError(ValueError):
    """A cache file does not have the content that was written."""


@dataclass(frozen=True, kw_only=True)
class CachedOutcome:
    """The compiler's result for one Program.

    Attributes:
        report: the worker's report, plain values; without the text.
        text: the compiler's text of the Program; None where there is none.
        compiled_at: when it was compiled, in seconds since the epoch.
    """

    report: Mapping[str, Any]
    text: str | None
    compiled_at: float


@dataclass(frozen=True, kw_only=True)
class CompileCache:
    """A folder of cached compiler results.

    Attributes:
        folder: the folder; created on the first write.
        max_bytes: its size limit.
    """

    folder: Path
    max_bytes: int = MAX_BYTES

    @classmethod
    def here(cls) -> "CompileCache":
        """The cache of this user: `$LEVANTER_CACHE/plans`, else in the user's cache folder."""
        return cls(folder=cache_folder() / "plans")

    def find(self, key: Mapping[str, Any]) -> CachedOutcome | None:
        """The answer under a key; None where there is none, or where its file is damaged."""
        entry = self._read(self._path("answer", key))
        # The whole key is compared, not its digest alone: the entry proves what it belongs to.
        if entry is None or entry["key"] != dict(key) or _lacks_heap(entry["said"]):
            return None
        return _answer(entry)

    def follow(self, way: str, compiler: Mapping[str, Any]) -> CachedOutcome | None:
        """The answer that a way maps to; None where there is none, or where it is of another compiler."""
        link = self._read(self._path("way", way))
        if link is None or link["way"] != way or link["key"]["compiler"] != dict(compiler):
            return None
        return self.find(link["key"])

    def keep(self, key: Mapping[str, Any], answer: CachedOutcome, *, way: str | None = None) -> None:
        """Stores an answer, and the way to it; a failed write is logged, and the plan goes on."""
        # `said` is the field's name in files that exist already; another name would orphan them.
        entry = {"key": dict(key), "said": dict(answer.report), "text": answer.text, "compiled_at": answer.compiled_at}
        # The answer is written before the way to it: a process that is killed in
        # between leaves no way without an answer.
        self._write(self._path("answer", key), entry)
        if way is not None:
            self.lead(way, key)
        self._bound()

    def lead(self, way: str, key: Mapping[str, Any]) -> None:
        """Stores a way to an answer."""
        self._write(self._path("way", way), {"way": way, "key": dict(key)})

    def _path(self, kind: str, key: object) -> Path:
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{name}.{kind}"

    def _read(self, path: Path) -> dict[str, Any] | None:
        try:
            entry = _unpacked(path.read_bytes())
            # The modification time is the time of last use, by which `_bound` removes entries.
            os.utime(path)
        except FileNotFoundError:
            return None
        except DamagedEntryError as error:
            logger.warning("%s: %s; the program is compiled again", path, error)
            return None
        except OSError as error:
            logger.warning("%s cannot be read (%s); the program is compiled again", path, error)
            return None
        return entry

    def _write(self, path: Path, entry: Mapping[str, Any]) -> None:
        try:
            with atomic_write(str(path)) as file:
                file.write(_packed(entry))
        except (OSError, ValueError) as error:
            logger.warning("the compiler's result is not cached: %s", error)

    def _bound(self) -> None:
        """Removes the least recently used entries until the rest is within the size limit."""
        entries: list[tuple[float, int, Path]] = []
        # Another plan may remove files of this folder at the same time: each of them
        # may be gone before `stat` or `unlink`.
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                with contextlib.suppress(OSError):
                    status = path.stat()
                    abandoned = path.suffix == ".tmp" and time.time() - status.st_mtime > LEFT_BEHIND_SECONDS
                    if abandoned:
                        path.unlink()
                    elif path.suffix in (".answer", ".way"):
                        entries.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.max_bytes:
                break
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size


def _lacks_heap(report: Mapping[str, Any]) -> bool:
    """Whether a TPU's answer is of an earlier version, which did not read the heap: its peak is less."""
    return "memory" in report and report.get("coordinates") is not None and "heap_bytes" not in report


def _answer(entry: Mapping[str, Any]) -> CachedOutcome:
    return CachedOutcome(report=entry["said"], text=entry["text"], compiled_at=float(entry["compiled_at"]))


def _packed(entry: Mapping[str, Any]) -> bytes:
    body = zlib.compress(json.dumps(entry).encode(), 3)
    return _MAGIC + hashlib.sha256(body).digest() + body


def _unpacked(data: bytes) -> dict[str, Any]:
    """The entry of a file.

    Raises:
        DamagedEntryError: the file is not what was written.
    """
    if not data.startswith(_MAGIC):
        raise DamagedEntryError("not an entry of this version")
    # Layout of a file: magic line, SHA-256 of the body, zlib-compressed JSON.
    digest, body = data[len(_MAGIC) :][:_DIGEST_BYTES], data[len(_MAGIC) + _DIGEST_BYTES :]
    if hashlib.sha256(body).digest() != digest:
        raise DamagedEntryError("damaged")
    return json.loads(zlib.decompress(body))
