"""The token store: the documents of one split of one set as token ids, written once, with random access.

A store is a folder:

    <cache_dir>/<set>/<split>/
        manifest.json             its identity, and (when finished) its content shards/00000/             one for each
        source file, or for each group of them
            ids/                  TensorStore array (zarr3): the documents' ids end to end
            offsets/              where each document ends
            weights/              loss weights beside the ids, for formats that have them
            shard.json            written last: counts, and the size of every file above

Documents are jagged arrays: flat values and offsets. Chunks are compressed and carry checksums, which every read
verifies. A *finished* store has a manifest that says so; a folder that does not match the configuration (another
tokenizer, other files, a file cut short) is refused with an error that names the difference.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from levanter.data.chunked_arrays import Chunks, span_indices
from levanter.data.errors import DataError, raise_problems
from levanter.data.manifest import Manifest, StoreError, shard_folder
from levanter.io.paths import filesystem, is_remote, join, local_path

if TYPE_CHECKING:
    import tensorstore as ts

CACHE_BYTES = 256 << 20
"""Bytes of decoded chunks that are cached."""
INDEX_BYTES = 32 << 20
"""Bytes of cached shard indices, which locate chunks in their files."""
_STORES = ("gs", "s3")


class Tokens(Protocol):
    """Documents as ids, in memory or in a store.

    Attributes:
        starts: int64 `[documents + 1]`, where each document begins; the last entry is the number of tokens.
        weighted: whether ids carry loss weights.
        largest_id: the largest id; −1 if there is none.
    """

    @property
    def starts(self) -> np.ndarray:
        """The first token of each document: int64 `[documents + 1]`; the last entry is the number of tokens."""
        ...

    @property
    def weighted(self) -> bool:
        """Whether ids carry loss weights."""
        ...

    @property
    def largest_id(self) -> int:
        """The largest id; −1 if there is none."""
        ...

    @property
    def skipped(self) -> int:
        """Empty documents that were left out."""
        ...

    def read(self, begins: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """The int32 ids of some spans, end to end, and their float32 loss weights if there are any."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryTokens:
    """Tokens in memory: small data, tokenized when the run begins."""

    ids: np.ndarray
    starts: np.ndarray
    weights: np.ndarray | None = None
    skipped: int = 0

    @property
    def weighted(self) -> bool:
        """Whether ids carry loss weights."""
        return self.weights is not None

    @property
    def largest_id(self) -> int:
        """The largest id; −1 if there is none."""
        return int(self.ids.max(initial=-1))

    def read(self, begins: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """The ids of some spans, end to end, and their loss weights, copied from memory."""
        positions = span_indices(begins, counts)
        return self.ids[positions], None if self.weights is None else self.weights[positions]


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredTokens:
    """A finished store, open for reading.

    Attributes:
        folder: its path.
        manifest: its manifest.
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
        """Whether the store holds loss weights."""
        return self.weights is not None

    @property
    def largest_id(self) -> int:
        """The largest id, as the manifest states it."""
        return self.manifest.largest_id

    @property
    def skipped(self) -> int:
        """Empty documents that were left out, as the manifest states it."""
        return sum(shard.skipped for shard in self.manifest.shards or ())

    def read(self, begins: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """The ids of some spans, end to end, and their loss weights, read by chunks of the store."""
        ids = self._id_chunks.read(begins, counts)
        return ids, None if self._weight_chunks is None else self._weight_chunks.read(begins, counts)

    @cached_property
    def _id_chunks(self) -> Chunks:
        return self._chunks(self.ids, "ids", np.int32)

    @cached_property
    def _weight_chunks(self) -> Chunks | None:
        return None if self.weights is None else self._chunks(self.weights, "weights", np.float32)

    def _chunks(self, arrays: Sequence[Any], name: str, dtype: type) -> Chunks:
        def damaged(number: int, start: int, stop: int, error: Exception) -> StoreError:
            return _damaged(join(shard_folder(self.folder, number), name), start, stop, error)

        return Chunks(arrays, dtype=dtype, cache_bytes=CACHE_BYTES, damaged=damaged)


def _damaged(array: str, start: int, stop: int, error: Exception) -> StoreError:
    reason = str(error).splitlines()[0]
    return StoreError(
        f"{array}: tokens {start:,} to {stop:,} cannot be read; the file is damaged or missing ({reason})"
    )


def open_store(folder: str, manifest: Manifest) -> StoredTokens:
    """Opens a finished store; checks that every file is there with its size.

    Raises:
        StoreError: listing the files that are missing or cut short; a checksum of the offsets is wrong.
    """
    assert manifest.shards is not None, folder
    # Sizes only: digests would read the whole store at every start (`cache_staleness.changed_files` does).
    check_file_sizes(folder, manifest)
    # `Chunks` caches decoded chunks, so this cache only holds the indices that locate them.
    context = tensorstore_context(INDEX_BYTES)
    arrays: dict[str, list[Any]] = {"ids": [], "weights": [], "offsets": []}
    pending = []
    for number in range(len(manifest.shards)):
        for name in arrays if manifest.identity.weighted else ("ids", "offsets"):
            path = join(shard_folder(folder, number), name)
            # All arrays are opened at once: one after another, a remote store of many shards would take minutes.
            pending.append((name, path, open_array(path, context=context)))
    try:
        # `path` names the array in the error below: the one whose future failed.
        for name, path, future in pending:
            arrays[name].append((path, future.result()))
    except (ValueError, OSError) as error:
        raise StoreError(f"{path}: cannot be opened ({str(error).splitlines()[0]})") from error
    # Offsets are stored per shard; here they become positions in the set.
    ends, base = [np.zeros(1, np.int64)], 0
    for (path, array), mark in zip(arrays["offsets"], manifest.shards, strict=True):
        try:
            read = array.read().result()
        except (ValueError, OSError) as error:
            raise StoreError(f"{path}: damaged ({str(error).splitlines()[0]})") from error
        ends.append(read + base)
        base += mark.tokens
    # Begins with 0; each shard contributes the ends of its documents, which are the starts of the next ones.
    starts = np.concatenate(ends)
    if starts[-1] != manifest.tokens or len(starts) != manifest.documents + 1:
        raise StoreError(
            f"{folder}: its offsets count {int(starts[-1]):,} tokens in {len(starts) - 1:,} documents, its manifest "
            f"{manifest.tokens:,} in {manifest.documents:,}; files were exchanged: delete the folder to rebuild it"
        )
    weights = tuple(array for _, array in arrays["weights"]) if manifest.identity.weighted else None
    ids = tuple(array for _, array in arrays["ids"])
    return StoredTokens(folder=folder, manifest=manifest, ids=ids, weights=weights, starts=starts)


def check_file_sizes(folder: str, manifest: Manifest) -> None:
    """Raises a `StoreError` with every file of a finished store that is missing or has another size."""
    fs, name = filesystem(join(folder, "shards"))
    # One recursive listing instead of a request for each file.
    files: dict[str, Any] = fs.find(name, detail=True)
    sizes = {path[len(name) :].lstrip("/"): info["size"] for path, info in files.items()}
    problems = []
    for number, mark in enumerate(manifest.shards or ()):
        for file, size in mark.files.items():
            actual = sizes.get(f"{number:05d}/{file}")
            if actual is None:
                problems.append(f"{join(shard_folder(folder, number), file)}: missing")
            elif actual != size:
                problems.append(
                    f"{join(shard_folder(folder, number), file)}: {actual:,} bytes, but {size:,} were written"
                )
    if problems:
        try:
            raise_problems(problems[:8] + ([f"and {len(problems) - 8} more files"] if len(problems) > 8 else []))
        except DataError as error:
            raise StoreError(f"{folder}: this token store is damaged; delete it to rebuild it\n{error}") from error


def tensorstore_context(cache_bytes: int = CACHE_BYTES) -> "ts.Context":
    """The context that the arrays of a store share: one cache for reads and pending writes."""
    import tensorstore as ts

    return ts.Context({"cache_pool": {"total_bytes_limit": cache_bytes}})


def kvstore(path: str) -> str | dict[str, str]:
    """The key-value store of an array, as TensorStore specifies it.

    Raises:
        StoreError: a kind of URL that token stores do not support.
    """
    if not is_remote(path):
        # TensorStore takes no `.` and no `..` in a path.
        return {"driver": "file", "path": os.path.realpath(local_path(path)) + "/"}
    if path.split("://", 1)[0] not in _STORES:
        raise StoreError(f"{path}: token stores must be on a local disk, gs:// or s3://")
    return path.rstrip("/") + "/"


def open_specified(specification: Mapping[str, Any], **options: object) -> "ts.TensorStore":
    """Opens or creates the array of a specification of TensorStore, at once.

    Raises:
        FileNotFoundError: it does not exist, and the options do not create it.
    """
    import tensorstore as ts

    try:
        return ts.open(dict(specification), **options).result()  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        if "NOT_FOUND" in str(error):
            raise FileNotFoundError(f"{specification['kvstore']}: no array is stored here") from error
        raise


def open_array(path: str, *, context: "ts.Context") -> "ts.Future[ts.TensorStore]":
    """A future of an array, open for reading; cached data are not checked for changes."""
    import tensorstore as ts

    # A finished store never changes, so rechecking would only cost requests.
    spec = {"driver": "zarr3", "kvstore": kvstore(path), "recheck_cached_metadata": False, "recheck_cached_data": False}
    return ts.open(spec, open=True, read=True, context=context)
