"""Upstream's sources and caches: the rows that a processor makes of a source, stored once, with random access.

    cache = build_or_load_cache("cache/train", source, processor)      # reads it where it is finished
    with SerialCacheWriter("cache/train", {"input_ids": np.zeros((0,), np.int32)}) as writer:
        writer.write_batch([{"input_ids": [5, 6, 7]}])

A cache is a `TreeStore` and a ledger, `shard_ledger.json`, whose presence with `is_finished` makes it valid; both are
laid out as upstream's. This process builds it, shard after shard, in the order of the source; one that was interrupted
begins anew. Before anything of a cache is written, its ledger says that it is not finished; the folder is leased to one
process at a time. The tokens of a run are built from `data.components` instead (`levanter.data.build_tokens`).
"""

import asyncio
import dataclasses
import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from haliax_ext.pytree import PyTree
from levanter.io.atomic import atomic_write
from levanter.io.lease import Lease, take_lease
from levanter.io.paths import exists, join, open_read
from levanter.upstream.facades.datasets import AsyncDataset, BatchProcessor, ShardedDataset
from levanter.upstream.facades.jagged import TreeStore, list_rows

T = TypeVar("T")
U = TypeVar("U")
LEDGER_FILE_NAME = "shard_ledger.json"
_log = logging.getLogger(__name__)


def batched(iterable: Iterable[T], batch_size: int) -> Iterator[list[T]]:
    """Lists of `batch_size` items; the last one may be shorter."""
    items = iter(iterable)
    while batch := list(islice(items, batch_size)):
        yield batch


class ShardedDataSource(ShardedDataset[T]):
    """Records in named shards; a subclass defines `shard_names` and `open_shard_at_row`."""

    def map(self, fn: Callable[[T], U]) -> "ShardedDataSource[U]":
        """Applies a function to every record."""
        return _Mapped(self, fn)

    def map_batches(
        self,
        fn: Callable[[list[T]], PyTree],
        batch_size: int,
        *,
        num_cpus: int = 1,
        num_gpus: int = 0,
        output_exemplar: PyTree = None,
        **resources: object,
    ) -> "ShardedDataSource[Any]":
        """Applies a function to lists of records; it returns rows, as a list of mappings or a mapping of lists.

        Args:
            fn: the function.
            batch_size: records in a list.
            num_cpus, num_gpus, resources: accepted for compatibility; everything runs in this process.
            output_exemplar: a row, for the names and dtypes that `build_or_load_cache` writes.
        """
        del num_cpus, num_gpus, resources
        return _BatchMapped(self, fn, batch_size, output_exemplar)

    def build_or_load_cache(
        self, path: str, *, await_finished: bool = True, monitors: object = None
    ) -> "TreeCache[Any]":
        """The rows as a cache at a path, which is built unless it is there."""
        del monitors
        return build_or_load_cache(path, self, None, await_finished=await_finished)


class _Mapped(ShardedDataSource[U]):
    def __init__(self, source: ShardedDataSource[T], fn: Callable[[T], U]):
        self.source, self.fn = source, fn

    @property
    def shard_names(self) -> Sequence[str]:
        return self.source.shard_names

    def open_shard_at_row(self, shard_name: str, row: int) -> Iterator[U]:
        return map(self.fn, self.source.open_shard_at_row(shard_name, row))

    @property
    def output_exemplar(self) -> PyTree:
        """No row is known before the function has run."""
        return None


class _BatchMapped(ShardedDataSource[Any]):
    def __init__(
        self, source: ShardedDataSource[T], fn: Callable[[list[T]], PyTree], batch_size: int, exemplar: PyTree
    ):
        if batch_size < 1:
            raise ValueError(f"batch_size: must be at least 1, got {batch_size}")
        self.source, self.fn, self.batch_size, self.output_exemplar = source, fn, batch_size, exemplar

    @property
    def shard_names(self) -> Sequence[str]:
        return self.source.shard_names

    def open_shard_at_row(self, shard_name: str, row: int) -> Iterator[Any]:
        # A function may return fewer or more rows than it got records, so rows are counted behind it.
        batches = batched(self.source.open_shard(shard_name), self.batch_size)
        return islice((result for batch in batches for result in list_rows(self.fn(batch))), row, None)


class SourceProcessor(BatchProcessor[Any, Any]):
    """The records of a source as rows, as they are: a source's own functions have already run."""

    def __init__(self, exemplar: PyTree):
        self._exemplar = exemplar

    def __call__(self, batch: Sequence[Any]) -> Sequence[Any]:
        return batch

    @property
    def output_exemplar(self) -> PyTree:
        """A row, if the source names one."""
        return self._exemplar

    @property
    def num_cpus(self) -> int:
        """The number of CPUs that a call needs."""
        return 1

    @property
    def metadata(self) -> dict[str, Any]:
        """What distinguishes a cache: nothing here."""
        return {}


# --- caches ---


@dataclasses.dataclass(frozen=True)
class OldCacheOptions:
    """Upstream's options of a build; only `batch_size`, the records that a processor gets at once, matters here."""

    num_shard_groups: int | None = 128
    target_size_per_flush: int | str = "512MB"
    batch_size: int = 128

    @staticmethod
    def default() -> "OldCacheOptions":
        """The defaults."""
        return OldCacheOptions()

    @staticmethod
    def no_fanciness(batch_size: int | None = None) -> "OldCacheOptions":
        """Upstream's options for tests."""
        return OldCacheOptions(num_shard_groups=None, batch_size=batch_size or 128)

    @staticmethod
    def one_group() -> "OldCacheOptions":
        """Upstream's options for tests."""
        return OldCacheOptions(num_shard_groups=1)


@dataclasses.dataclass(frozen=True)
class CacheMetadata:
    """What a cache was built with: the processor's `metadata`."""

    preprocessor_metadata: Mapping[str, Any] | None = None

    @staticmethod
    def empty() -> "CacheMetadata":
        """Without metadata."""
        return CacheMetadata()


@dataclasses.dataclass(kw_only=True)
class CacheLedger:
    """What is in a cache; see the module."""

    total_num_rows: int
    shard_rows: dict[str, int]
    is_finished: bool = False
    finished_shards: list[str] = dataclasses.field(default_factory=list)
    field_counts: dict[str, int] = dataclasses.field(default_factory=dict)
    metadata: CacheMetadata = dataclasses.field(default_factory=CacheMetadata)

    @staticmethod
    def load(cache_dir: str, metadata: CacheMetadata | None = None) -> "CacheLedger":
        """Reads the ledger of a cache; logs a warning if it was built with other metadata.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is damaged.
        """
        path = join(cache_dir, LEDGER_FILE_NAME)
        with open_read(path) as file:
            content = file.read()
        try:
            values: dict[str, Any] = json.loads(content)
            known = {
                field.name: values[field.name] for field in dataclasses.fields(CacheLedger) if field.name in values
            }
            stored = CacheMetadata((known.pop("metadata", None) or {}).get("preprocessor_metadata"))
            ledger = CacheLedger(**known, metadata=stored)
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: not a cache's ledger ({error})") from error
        wanted = None if metadata is None else metadata.preprocessor_metadata
        if wanted is not None and dict(wanted) != dict(stored.preprocessor_metadata or {}):
            _log.warning("%s was built with %s, not with %s", cache_dir, stored.preprocessor_metadata, dict(wanted))
        return ledger

    def save(self, cache_dir: str) -> None:
        """Writes the ledger of a cache, at once."""
        with atomic_write(join(cache_dir, LEDGER_FILE_NAME)) as file:
            file.write(json.dumps(dataclasses.asdict(self)).encode())


class TreeCache(AsyncDataset[T]):
    """The rows of a cache, finished or being built.

    Attributes:
        cache_dir: its folder.
        ledger: what is in it; None while it is being built.
    """

    def __init__(self, cache_dir: str, exemplar: PyTree, ledger: CacheLedger | None, builder: "_Builder | None" = None):
        self.cache_dir, self.ledger = cache_dir, ledger
        self._builder = builder
        self._store = builder.store if builder is not None else TreeStore.open(exemplar, cache_dir, mode="r")

    @staticmethod
    def load(cache_dir: str, exemplar: PyTree, options: CacheMetadata | None = None) -> "TreeCache[Any]":
        """Opens a finished cache.

        Raises:
            FileNotFoundError: there is none, or it is not finished.
            ValueError: its arrays have another number of rows than its ledger.
        """
        ledger = CacheLedger.load(cache_dir, options)
        if not ledger.is_finished:
            raise FileNotFoundError(f"{cache_dir}: the cache is not finished; build_or_load_cache builds it anew")
        cache: TreeCache[Any] = TreeCache(cache_dir, exemplar, ledger)
        if (rows := len(cache.store)) != ledger.total_num_rows:
            raise ValueError(
                f"{cache_dir}: damaged: its ledger counts {ledger.total_num_rows:,} rows and its arrays have {rows:,}\n"
                f"  → delete the folder; build_or_load_cache builds it anew"
            )
        return cache

    @property
    def store(self) -> TreeStore:
        """The rows, as far as they are written."""
        return self._store

    @property
    def is_finished(self) -> bool:
        """Whether all rows are there."""
        return self.ledger is not None

    def await_finished(self, timeout: float | None = None, await_cleanup: bool = False) -> None:
        """Waits until all rows are there.

        Raises:
            TimeoutError: they are not, after so many seconds.
            Exception: the source or the processor failed.
        """
        del await_cleanup
        if self._builder is not None:
            self.ledger = self._builder.result(timeout)

    def __len__(self) -> int:
        self.await_finished()
        return len(self._store)

    async def async_len(self) -> int:
        """The number of rows; waits until all are there."""
        while not await self.final_length_is_known():
            await asyncio.sleep(0.02)
        return len(self._store)

    async def final_length_is_known(self) -> bool:
        """Whether all rows are there.

        Raises:
            Exception: the source or the processor failed.
        """
        if self._builder is not None and self._builder.ended:
            self.ledger = self._builder.result(0)
        return self.ledger is not None

    async def current_len(self) -> int:
        """The number of rows that are there."""
        return len(self._store)

    async def get_batch(self, indices: Sequence[int] | slice) -> Sequence[T]:
        """The rows with these indices, once they are there.

        Raises:
            IndexError: there is no such row.
            Exception: the source or the processor failed.
        """
        if isinstance(indices, slice):
            indices = range(*indices.indices(await self.async_len()))
        await self.wait_until_len_at_least(max(indices, default=-1) + 1)
        return await self._store.get_batch(indices)

    def get_batch_sync(self, indices: Sequence[int] | slice, *, timeout: float | None = None) -> Sequence[T]:
        """`get_batch`, for code without a loop; waits until all rows are there."""
        self.await_finished(timeout)
        if isinstance(indices, slice):
            indices = range(*indices.indices(len(self)))
        return self._store.get_batch_sync(indices)

    def __getitem__(self, item: int | slice) -> PyTree:
        self.await_finished()
        return self._store[item]


class SerialCacheWriter:
    """Writes a cache row by row; it is finished when the `with` block ends without an error.

    Args:
        cache_dir: its folder; a cache that is there is replaced.
        exemplar: a row, for names, dtypes and numbers of axes.
        metadata: what it is built with.
        shard_name: the name of its only shard.
        mode: `w` to begin anew, `a` to append to rows that are there.
    """

    def __init__(
        self,
        cache_dir: str,
        exemplar: PyTree,
        metadata: CacheMetadata | None = None,
        shard_name: str = "",
        mode: str = "w",
    ):
        self.cache_dir, self.metadata, self.shard_name = cache_dir, metadata or CacheMetadata.empty(), shard_name
        self._exemplar, self._finished = exemplar, False
        self._lease = _lease(cache_dir, wait=False)
        _invalidate(cache_dir, self.metadata)
        self._tree_store = TreeStore.open(exemplar, cache_dir, mode=mode)

    def __enter__(self) -> "SerialCacheWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                _finish(self.cache_dir, self._tree_store, {self.shard_name: len(self._tree_store)}, self.metadata)
                self._finished = True
        finally:
            self._lease.release()

    def write_batch(self, batch: PyTree) -> None:
        """Appends rows: a list of trees, a mapping of columns, or an Arrow batch."""
        self._tree_store.extend(batch)

    def result(self) -> TreeCache[Any]:
        """The finished cache.

        Raises:
            ValueError: the `with` block has not ended, or ended with an error.
        """
        if not self._finished:
            raise ValueError(f"{self.cache_dir}: the cache is finished when the `with` block of its writer ends")
        return TreeCache.load(self.cache_dir, self._exemplar)


def _lease(cache_dir: str, *, wait: bool) -> Lease:
    return take_lease(cache_dir, what="building a cache", advice="give another cache_dir", wait=wait)


def _invalidate(cache_dir: str, metadata: CacheMetadata) -> None:
    """Marks a cache as not finished before anything of it is written."""
    # A process that is killed later must not leave new rows under the ledger of the old ones.
    CacheLedger(total_num_rows=0, shard_rows={}, metadata=metadata).save(cache_dir)


def _finish(cache_dir: str, store: TreeStore, rows: dict[str, int], metadata: CacheMetadata) -> CacheLedger:
    ledger = CacheLedger(
        total_num_rows=len(store), shard_rows=rows, is_finished=True, finished_shards=list(rows), metadata=metadata
    )
    ledger.save(cache_dir)
    return ledger


class _Builder:
    """Builds a cache in a thread."""

    def __init__(
        self,
        cache_dir: str,
        source: ShardedDataSource[Any],
        processor: BatchProcessor[Any, Any],
        size: int,
        lease: Lease,
    ):
        self.cache_dir, self.source, self.processor, self.batch_size = cache_dir, source, processor, size
        self._lease = lease
        self.store = TreeStore.open(processor.output_exemplar, cache_dir, mode="w")
        self._ledger: CacheLedger | None = None
        self._error: BaseException | None = None
        # A daemon: a script that ends early does not wait for the build, whose cache is then not valid.
        self._thread = threading.Thread(target=self._run, name="build-cache", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether the build is over, well or not."""
        return not self._thread.is_alive()

    def result(self, timeout: float | None) -> CacheLedger:
        """The ledger, once the build is over."""
        self._thread.join(timeout)
        if not self.ended:
            raise TimeoutError(f"{self.cache_dir}: not finished after {timeout:g} s")
        if self._error is not None:
            raise self._error
        assert self._ledger is not None
        return self._ledger

    def _run(self) -> None:
        try:
            rows = {name: self._shard(name) for name in self.source.shard_names}
            self._ledger = _finish(self.cache_dir, self.store, rows, CacheMetadata(self.processor.metadata))
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            self._error = error
        finally:
            self._lease.release()

    def _shard(self, name: str) -> int:
        before = len(self.store)
        for batch in batched(self.source.open_shard(name), self.batch_size):
            self.store.extend(list_rows(self.processor(batch)))
        return len(self.store) - before


def build_or_load_cache(
    cache_dir: str,
    source: ShardedDataSource[Any],
    processor: BatchProcessor[Any, Any] | None,
    await_finished: bool = True,
    monitors: object = None,
    options: OldCacheOptions | None = None,
) -> TreeCache[Any]:
    """The finished cache at a path, or one that is built there from a source.

    Args:
        cache_dir: its folder.
        source: the records.
        processor: makes rows of them; None if the source's own functions do.
        await_finished: whether to wait until it is finished.
        monitors: accepted for compatibility.
        options: the batch size of the processor.

    Raises:
        Exception: the source or the processor failed, if this waits.
    """
    # Upstream's older calls pass the options in the place of `await_finished`.
    if isinstance(await_finished, OldCacheOptions):
        options, await_finished = await_finished, True
    del monitors
    processor = _of_source(source) if processor is None else processor
    metadata = CacheMetadata(processor.metadata)
    if (ready := _finished_cache(cache_dir, processor, metadata)) is not None:
        return ready
    lease = _lease(cache_dir, wait=True)
    try:
        # The process that held the lease may have built it.
        if (ready := _finished_cache(cache_dir, processor, metadata)) is not None:
            lease.release()
            return ready
        _invalidate(cache_dir, metadata)
        builder = _Builder(cache_dir, source, processor, (options or OldCacheOptions()).batch_size, lease)
    except BaseException:
        lease.release()
        raise
    cache: TreeCache[Any] = TreeCache(cache_dir, processor.output_exemplar, None, builder)
    if await_finished:
        cache.await_finished()
    return cache


def _finished_cache(
    cache_dir: str, processor: BatchProcessor[Any, Any], metadata: CacheMetadata
) -> TreeCache[Any] | None:
    if not exists(join(cache_dir, LEDGER_FILE_NAME)):
        return None
    try:
        return TreeCache.load(cache_dir, processor.output_exemplar, metadata)
    except FileNotFoundError:
        _log.info("%s is not finished; it is built anew", cache_dir)
        return None


def _of_source(source: ShardedDataSource[Any]) -> SourceProcessor:
    exemplar = getattr(source, "output_exemplar", None)
    if exemplar is None:
        first = next(iter(source), None)
        if first is None:
            raise ValueError("the source has no records; pass output_exemplar to map_batches")
        exemplar = {name: np.asarray(value) for name, value in first.items()}
    return SourceProcessor(exemplar)


def builder_actor(*_: object, **__: object) -> None:
    """`_get_builder_actor`: a cache has no actor here.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError("_get_builder_actor: this process builds a cache, in a thread; no Ray actor does")
