"""Cache on disk of compiler results: preflight of a Program that was compiled before takes seconds.

An *answer* is everything that the worker reports of one Program: memory, or the refusal, and the compiler's text, from
which figures are read anew each time. It is kept under the digest of its *key*: the lowered text, the devices, the
compiler's version, its options. The key stands in the entry and is compared in full, so an answer of another compiler
is never taken. A *way* leads from a Program's fingerprint (`fingerprint`) to the key of its answer, so that it need not
be lowered to be found.

Files are written under other names and renamed, carry a digest of their content, and are read by nobody while they are
written: two plans may run at once. One that does not read back is said to be damaged, and is written anew. The folder
has a bound; what was not asked for the longest goes first.
"""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
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
"""What the folder may hold."""
LEFT_BEHIND_SECONDS = 3600
"""Temporary files that are older were left by a process that was killed."""
_MAGIC = b"levanter kept answer 1\n"
_DIGEST_BYTES = 32


def installed_compiler() -> dict[str, Any]:
    """Which compiler is installed: versions of libtpu and of what hands it Programs, and the size of its library."""
    versions: dict[str, Any] = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}
    spec = importlib.util.find_spec("libtpu")
    folders = [] if spec is None else [Path(path) for path in spec.submodule_search_locations or ()]
    sizes = [path.stat().st_size for folder in folders for path in sorted(folder.glob("*.so"))]
    return {**versions, "library_bytes": sizes}


class DamagedEntryError(ValueError):
    """A file is not what was written."""


@dataclass(frozen=True, kw_only=True)
class CachedOutcome:
    """What a compiler said of one Program.

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
    """A folder of answers.

    Attributes:
        folder: where they lie; made when something is written.
        max_bytes: what it may hold.
    """

    folder: Path
    max_bytes: int = MAX_BYTES

    @classmethod
    def here(cls) -> "CompileCache":
        """Those of this user: `$LEVANTER_CACHE/plans`, else in the user's cache."""
        return cls(folder=cache_folder() / "plans")

    def find(self, key: Mapping[str, Any]) -> CachedOutcome | None:
        """The answer under a key; None where there is none that can be trusted."""
        entry = self._read(self._path("answer", key))
        return None if entry is None or entry["key"] != dict(key) else _answer(entry)

    def follow(self, way: str, compiler: Mapping[str, Any]) -> CachedOutcome | None:
        """The answer that a way leads to; None where it leads nowhere, or to the answer of another compiler."""
        link = self._read(self._path("way", way))
        if link is None or link["way"] != way or link["key"]["compiler"] != dict(compiler):
            return None
        return self.find(link["key"])

    def keep(self, key: Mapping[str, Any], answer: CachedOutcome, *, way: str | None = None) -> None:
        """Keeps an answer, and the way to it; where nothing can be written, says so and goes on."""
        entry = {"key": dict(key), "said": dict(answer.report), "text": answer.text, "compiled_at": answer.compiled_at}
        self._write(self._path("answer", key), entry)
        if way is not None:
            self.lead(way, key)
        self._bound()

    def lead(self, way: str, key: Mapping[str, Any]) -> None:
        """Keeps a way to an answer."""
        self._write(self._path("way", way), {"way": way, "key": dict(key)})

    def _path(self, kind: str, key: object) -> Path:
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{name}.{kind}"

    def _read(self, path: Path) -> dict[str, Any] | None:
        try:
            entry = _unpacked(path.read_bytes())
            # What was asked for last goes last.
            os.utime(path)
        except FileNotFoundError:
            return None
        except DamagedEntryError as error:
            logger.warning("%s: %s; it is compiled anew", path, error)
            return None
        except OSError as error:
            logger.warning("%s cannot be read (%s); it is compiled anew", path, error)
            return None
        return entry

    def _write(self, path: Path, entry: Mapping[str, Any]) -> None:
        try:
            with atomic_write(str(path)) as file:
                file.write(_packed(entry))
        except (OSError, ValueError) as error:
            logger.warning("what the compiler said is not kept: %s", error)

    def _bound(self) -> None:
        """Removes what was not asked for the longest until the rest is within the bound."""
        entries: list[tuple[float, int, Path]] = []
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
    digest, body = data[len(_MAGIC) :][:_DIGEST_BYTES], data[len(_MAGIC) + _DIGEST_BYTES :]
    if hashlib.sha256(body).digest() != digest:
        raise DamagedEntryError("damaged")
    return json.loads(zlib.decompress(body))
