"""Writing one shard of a token store: arrays that grow by whole files, then the mark that makes the shard valid."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from levanter.data.manifest import SHARD_MARK, ShardMark
from levanter.data.store import kvstore, tensorstore_context
from levanter.io.atomic import atomic_write
from levanter.io.file_identity import file_digest
from levanter.io.paths import filesystem, is_remote, join

if TYPE_CHECKING:
    import tensorstore as ts

FILE_VALUES = 1 << 22
CHUNK_VALUES = 1 << 14
"""Values in one file of an array, and in the chunk that one read decodes."""
_LEVEL = 1


@dataclass(frozen=True)
class Encoded:
    """One document as ids, and their loss weights where the format has them."""

    ids: np.ndarray
    weights: np.ndarray | None = None


@dataclass
class ShardTotals:
    """The totals of a shard so far; see `ShardMark`."""

    documents: int = 0
    tokens: int = 0
    chars: int = 0
    skipped: int = 0
    largest_id: int = -1


class ShardWriter:
    """Writes one shard; it becomes valid with `finish`."""

    def __init__(self, folder: str, *, weighted: bool):
        fs, name = filesystem(folder)
        if fs.exists(name):
            # Files of an attempt that was killed would otherwise be counted in `file_sizes`.
            fs.rm(name, recursive=True)
        self.folder = folder
        self.sums = ShardTotals()
        context = tensorstore_context()
        self._ids = GrowingArray(join(folder, "ids"), "int32", context)
        self._weights = GrowingArray(join(folder, "weights"), "float32", context) if weighted else None
        self._offsets = GrowingArray(join(folder, "offsets"), "int64", context)

    def add(self, encoded: Sequence[Encoded], *, chars: int, skipped: int) -> None:
        """Appends documents; those without a token are left out.

        Args:
            encoded: the documents.
            chars: characters they had.
            skipped: empty documents that were left out before.
        """
        self.sums.chars += chars
        self.sums.skipped += skipped + sum(not len(item.ids) for item in encoded)
        encoded = [item for item in encoded if len(item.ids)]
        if not encoded:
            return
        ids = np.concatenate([item.ids for item in encoded])
        self._ids.add(ids)
        self.sums.largest_id = max(self.sums.largest_id, int(ids.max()))
        if self._weights is not None:
            self._weights.add(np.concatenate([item.weights for item in encoded if item.weights is not None]))
        # The end of each document in the shard; documents without tokens have been removed, so all ends differ.
        ends = self.sums.tokens + np.cumsum([len(item.ids) for item in encoded], dtype=np.int64)
        self._offsets.add(ends)
        self.sums.documents += len(encoded)
        self.sums.tokens = int(ends[-1])

    def finish(self, source_digests: tuple[str | None, ...] = ()) -> ShardMark:
        """Writes the remaining values, then the mark that makes the shard valid.

        Args:
            source_digests: the digests of the sources' content, see `ShardMark`.
        """
        for array in (self._ids, self._weights, self._offsets):
            if array is not None:
                array.finish()
        sums = self.sums
        # After `finish` of the arrays: all files exist with their final sizes.
        files = file_sizes(self.folder)
        mark = ShardMark(
            documents=sums.documents,
            tokens=sums.tokens,
            chars=sums.chars,
            skipped=sums.skipped,
            largest_id=sums.largest_id,
            files=files,
            digests={} if is_remote(self.folder) else {file: file_digest(join(self.folder, file)) for file in files},
            source_digests=source_digests,
        )
        # The mark comes last: a process that was killed before leaves a shard that is written again.
        write_file(join(self.folder, SHARD_MARK), _json(asdict(mark)))
        return mark


class GrowingArray:
    """Appends to a one-axis array: whole files at a time, so that none is written twice."""

    def __init__(self, path: str, dtype: str, context: "ts.Context"):
        import tensorstore as ts

        # zarr3 codecs: values as little-endian bytes, compressed, with a checksum that every read verifies.
        little = {"name": "bytes", "configuration": {"endian": "little"}}
        checksum = {"name": "crc32c"}
        shard = {
            "chunk_shape": [CHUNK_VALUES],
            "codecs": [little, {"name": "zstd", "configuration": {"level": _LEVEL, "checksum": False}}, checksum],
            "index_codecs": [little, checksum],
        }
        spec = {
            "driver": "zarr3",
            "kvstore": kvstore(path),
            "metadata": {
                "shape": [0],
                "data_type": dtype,
                # A file (zarr shard) has many chunks: few files, but a read decodes only `CHUNK_VALUES` values.
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [FILE_VALUES]}},
                "codecs": [{"name": "sharding_indexed", "configuration": shard}],
            },
        }
        self._array = ts.open(spec, create=True, delete_existing=True, context=context).result()
        self._dtype = np.dtype(dtype)
        self._buffer: list[np.ndarray] = []
        self._count = self._written = 0
        self._writing: ts.WriteFutures | None = None

    def add(self, values: np.ndarray) -> None:
        """Appends values; each time a file is full, it is written in the background."""
        self._buffer.append(values.astype(self._dtype, copy=False))
        self._count += len(values)
        # A file of the array is complete as soon as it is full, and is never opened again.
        while self._count >= FILE_VALUES:
            values = np.concatenate(self._buffer)
            self._put(values[:FILE_VALUES])
            self._buffer = [values[FILE_VALUES:]]
            self._count -= FILE_VALUES

    def finish(self) -> None:
        """Writes the remaining values, and waits until every file is on disk."""
        if self._count:
            self._put(np.concatenate(self._buffer))
            self._buffer, self._count = [], 0
        if self._writing is not None:
            self._writing.result()

    def _put(self, values: np.ndarray) -> None:
        # At most one file is being written: this bounds the memory, and an error is raised soon after it happened.
        if self._writing is not None:
            self._writing.result()
        start, self._written = self._written, self._written + len(values)
        # The array grows with its content, so its shape never includes values that were not written.
        self._array = self._array.resize(exclusive_max=[self._written]).result()
        self._writing = self._array[start : self._written].write(values)


def file_sizes(folder: str) -> dict[str, int]:
    """The size of each file of a shard except its mark, by name."""
    fs, name = filesystem(folder)
    files: dict[str, Any] = fs.find(name, detail=True)
    sizes = {path[len(name) :].lstrip("/"): int(info["size"]) for path, info in files.items()}
    return {file: sizes[file] for file in sorted(sizes) if file != SHARD_MARK}


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def write_file(path: str, content: bytes) -> None:
    """Writes a small file atomically."""
    with atomic_write(path) as file:
        file.write(content)
