"""The token store: the documents of one split of one set as token ids, written once and read at any place.

A store is a folder:

    <cache_dir>/<set>/<split>/
        manifest.json             what it was made from, and (when finished) what is in it
        shards/00000/             one for each source file, or for each group of them
            ids/                  TensorStore array (zarr3): the documents' ids end to end
            offsets/              where each document ends
            weights/              loss weights beside the ids, for formats that have them
            shard.json            written last: counts, and the size of every file above

Jagged arrays, that is: flat values and offsets. Chunks are compressed and carry checksums, which every read verifies. A
*finished* store has a manifest that says so; a folder that says something else than the configuration (another
tokenizer, other files, a file cut short) is an error that names the difference, and is never read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from levanter.data.errors import DataError, raise_problems
from levanter.data.manifest import Manifest, StoreError, shard_folder
from levanter.io.paths import filesystem, is_remote, join, local_path

CACHE_BYTES = 256 << 20
"""Decoded chunks that are kept for the next reads."""
_STORES = ("gs", "s3")


class Tokens(Protocol):
    """Documents as ids, wherever they are.

    Attributes:
        starts: int64 `[documents + 1]`, where each document begins; the last entry is the number of tokens.
        weighted: whether ids carry loss weights.
        largest_id: the largest id; −1 where there is none.
    """

    @property
    def starts(self) -> np.ndarray: ...

    @property
    def weighted(self) -> bool: ...

    @property
    def largest_id(self) -> int: ...

    def read(self, begins: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """The int32 ids of some spans, end to end, and their float32 loss weights where there are any."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryTokens:
    """Tokens in memory: small data, tokenized when the run begins."""

    ids: np.ndarray
    starts: np.ndarray
    weights: np.ndarray | None = None

    @property
    def weighted(self) -> bool:
        return self.weights is not None

    @property
    def largest_id(self) -> int:
        return int(self.ids.max(initial=-1))

    def read(self, begins: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        places = span_places(begins, counts)
        return self.ids[places], None if self.weights is None else self.weights[places]


def span_places(begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int64: every place within the spans, one span after the other."""
    counts = np.asarray(counts, np.int64)
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(np.asarray(begins, np.int64) - (ends - counts), counts)


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredTokens:
    """A finished store, open for reading.

    Attributes:
        folder: where it is.
        manifest: what it holds.
        ids, weights: TensorStore arrays of each shard.
        starts: as in `Tokens`: 8 bytes of memory a document.
    """

    folder: str
    manifest: Manifest
    ids: tuple[Any, ...]
    weights: tuple[Any, ...] | None
    starts: np.ndarray

    @property
    def weighted(self) -> bool:
        return self.weights is not None

    @property
    def largest_id(self) -> int:
        return self.manifest.largest_id

    @cached_property
    def _shard_starts(self) -> np.ndarray:
        return np.cumsum([0] + [shard.tokens for shard in self.manifest.shards or ()], dtype=np.int64)

    def read(self, begins: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        pieces = [piece for span in zip(begins, counts, strict=True) for piece in self._pieces(*map(int, span))]
        waiting = [self._request(self.ids, piece) for piece in pieces]
        weights = None if self.weights is None else [self._request(self.weights, piece) for piece in pieces]
        ids = self._collect(waiting, pieces, "ids", np.int32)
        return ids, None if weights is None else self._collect(weights, pieces, "weights", np.float32)

    def _pieces(self, begin: int, count: int) -> list[tuple[int, int, int]]:
        """A span as parts of shards: (shard, start, stop) within the shard."""
        assert begin >= 0 and begin + count <= self.starts[-1], (begin, count)
        number = int(np.searchsorted(self._shard_starts, begin, side="right")) - 1
        found = []
        while count > 0:
            start = begin - int(self._shard_starts[number])
            stop = min(start + count, int(self._shard_starts[number + 1] - self._shard_starts[number]))
            if stop > start:
                found.append((number, start, stop))
            begin, count, number = begin + stop - start, count - (stop - start), number + 1
        return found

    def _request(self, arrays: Sequence[Any], piece: tuple[int, int, int]) -> Any:
        number, start, stop = piece
        return arrays[number][start:stop].read()

    def _collect(self, waiting: Sequence[Any], pieces: Sequence[tuple[int, int, int]], name: str, dtype: Any):
        found = []
        for future, (number, start, stop) in zip(waiting, pieces, strict=True):
            try:
                found.append(future.result())
            except (ValueError, OSError) as error:
                raise _damaged(join(shard_folder(self.folder, number), name), start, stop, error) from error
        return np.concatenate(found) if found else np.zeros(0, dtype)


def _damaged(array: str, start: int, stop: int, error: Exception) -> StoreError:
    reason = str(error).splitlines()[0]
    return StoreError(f"{array}: tokens {start:,} to {stop:,} cannot be read, the file is damaged or gone ({reason})")


def open_store(folder: str, manifest: Manifest) -> StoredTokens:
    """Opens a finished store; checks that every file is there with its size.

    Raises:
        StoreError: listing the files that are missing or cut short; a checksum of the offsets is wrong.
    """
    assert manifest.shards is not None, folder
    raise_problems_of(folder, manifest)
    context = tensorstore_context()
    arrays: dict[str, list[Any]] = {"ids": [], "weights": [], "offsets": []}
    waiting = []
    for number in range(len(manifest.shards)):
        for name in arrays if manifest.identity.weighted else ("ids", "offsets"):
            path = join(shard_folder(folder, number), name)
            waiting.append((name, path, open_array(path, context=context)))
    try:
        for name, path, future in waiting:
            arrays[name].append((path, future.result()))
    except (ValueError, OSError) as error:
        raise StoreError(f"{path}: cannot be opened ({str(error).splitlines()[0]})") from error
    ends, base = [np.zeros(1, np.int64)], 0
    for (path, array), mark in zip(arrays["offsets"], manifest.shards, strict=True):
        try:
            read = array.read().result()
        except (ValueError, OSError) as error:
            raise StoreError(f"{path}: is damaged ({str(error).splitlines()[0]})") from error
        ends.append(read + base)
        base += mark.tokens
    starts = np.concatenate(ends)
    assert starts[-1] == manifest.tokens and len(starts) == manifest.documents + 1, (folder, starts[-1], manifest)
    weights = tuple(array for _, array in arrays["weights"]) if manifest.identity.weighted else None
    ids = tuple(array for _, array in arrays["ids"])
    return StoredTokens(folder=folder, manifest=manifest, ids=ids, weights=weights, starts=starts)


def raise_problems_of(folder: str, manifest: Manifest) -> None:
    """Raises a `StoreError` with every file of a finished store that is missing or has another size."""
    fs, name = filesystem(join(folder, "shards"))
    found: dict[str, Any] = fs.find(name, detail=True)
    sizes = {path[len(name) :].lstrip("/"): info["size"] for path, info in found.items()}
    problems = []
    for number, mark in enumerate(manifest.shards or ()):
        for file, size in mark.files.items():
            have = sizes.get(f"{number:05d}/{file}")
            if have is None:
                problems.append(f"{join(shard_folder(folder, number), file)}: is gone")
            elif have != size:
                problems.append(f"{join(shard_folder(folder, number), file)}: {have:,} bytes, {size:,} were written")
    if problems:
        try:
            raise_problems(problems[:8] + ([f"and {len(problems) - 8} more files"] if len(problems) > 8 else []))
        except DataError as error:
            raise StoreError(f"{folder}: this token store is damaged; delete it to build it again\n{error}") from error


def tensorstore_context() -> Any:
    """What the arrays of one store share: the pool of decoded chunks."""
    import tensorstore as ts

    return ts.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})


def kvstore(path: str) -> Any:
    """Where TensorStore finds an array.

    Raises:
        StoreError: a kind of URL that it does not write to.
    """
    if not is_remote(path):
        return {"driver": "file", "path": local_path(path) + "/"}
    if path.split("://", 1)[0] not in _STORES:
        raise StoreError(f"{path}: token stores lie on local disks, gs:// or s3://")
    return path.rstrip("/") + "/"


def open_array(path: str, *, context: Any) -> Any:
    """A future of an array, open for reading; what was read once is not checked for changes."""
    import tensorstore as ts

    spec = {"driver": "zarr3", "kvstore": kvstore(path), "recheck_cached_metadata": False, "recheck_cached_data": False}
    return ts.open(spec, open=True, read=True, context=context)
