"""Data sets of Python examples, as scripts of earlier generations build and compose them.

    rows = ListAsyncDataset([...]).map(to_example).shuffle(key)
    for batch in DataLoader(rows, 32, mesh=mesh, axis_resources=mapping): …      # levanter.upstream.facades.loaders

A run's data are `data.components` in its configuration, whose rows come from a token store; these classes are for
examples that a script holds itself. *Async* ones are indexed from a coroutine, *sync* ones from a function; those of
early 2024 are iterated over, and split into shards by stride.
"""

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from haliax_ext.pytree import PyTree
from levanter.data.shuffle import Affine, Feistel, Permutation, ShuffledWindows

T = TypeVar("T")
U = TypeVar("U")
_POLL_SECONDS = 0.02
"""Between two looks at the length of a data set that grows."""


def wait_for(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, whether or not an event loop runs in this thread."""
    try:
        # `asyncio.run` fails inside a running loop (a notebook, an
        # async caller): then another thread runs the coroutine.
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    results: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            results.append(asyncio.run(coroutine))
        # BaseException, so that KeyboardInterrupt and SystemExit also reach the caller.
        except BaseException as error:  # noqa: BLE001 - it is raised again in the thread that waits
            failed.append(error)

    thread = threading.Thread(target=run, name="wait-for-data")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return results[0]


def key_to_seed(key: jax.Array) -> int:
    """The random bits of a JAX key as one number of 64 bits."""
    # Typed keys (`jax.random.key`) hide their bits; raw uint32 keys are their bits.
    data = jax.random.key_data(key) if jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    # Two uint32 words, little-endian whatever the machine: all hosts get the same seed.
    return int.from_bytes(np.asarray(data).astype("<u4").tobytes()[:8], "little")


class AsyncDataset(ABC, Generic[T]):
    """Examples by index; a subclass defines `async_len` and `get_batch`, and `is_finite` if it is infinite."""

    @abstractmethod
    async def async_len(self) -> int:
        """The number of examples."""

    @abstractmethod
    async def get_batch(self, indices: Sequence[int]) -> Sequence[T]:
        """The examples with these indices, in this order."""

    def is_finite(self) -> bool:
        """Whether the number of examples is finite."""
        return True

    async def getitem_async(self, index: int) -> T:
        """The example with an index."""
        return (await self.get_batch([index]))[0]

    async def final_length_is_known(self) -> bool:
        """Whether the length is final; only a list that is not complete grows."""
        return self.is_finite()

    async def current_len(self) -> int | None:
        """The number of examples so far; None for infinite data sets."""
        return await self.async_len() if self.is_finite() else None

    async def wait_until_len_at_least(self, length: int) -> int:
        """Waits until there are `length` examples, or until their number is final; returns the number."""
        if not self.is_finite():
            return length
        while not await self.final_length_is_known():
            if ((current := await self.current_len()) or 0) >= length:
                return current or 0
            await asyncio.sleep(_POLL_SECONDS)
        return await self.async_len()

    def as_async_dataset(self) -> "AsyncDataset[T]":
        """This data set."""
        return self

    def as_sync_dataset(self) -> "SyncDataset[T]":
        """This data set with synchronous methods."""
        return SyncifiedDataset(self)

    def map(self, fn: Callable[..., U], *more: object, **keys: PyTree) -> "AsyncDataset[U]":
        """Applies `fn(example, *more, **keys)` to each example; a `key` among the keywords differs for each."""
        return MappedAsyncDataset(self, fn, *more, **keys)

    def map_batches(self, fn: Callable[..., Sequence[U]], *more: object, **keys: PyTree) -> "AsyncDataset[U]":
        """Applies `fn(examples, *more, **keys)` to the examples of each request."""
        return BatchMappedAsyncDataset(self, fn, *more, **keys)

    def slice_dataset(self, start_index: int | None = None, end_index: int | None = None) -> "AsyncDataset[T]":
        """The examples from one index up to another."""
        return SlicedAsyncDataset(self, start_index, end_index)

    def take(self, n: int) -> "AsyncDataset[T]":
        """The first `n` examples."""
        return self.slice_dataset(end_index=n)

    def shuffle(self, key: jax.Array, *, perm_type: str = "feistel") -> "AsyncDataset[T]":
        """All examples, in an order determined by the key."""
        return PermutationDataset(self, key, perm_type)

    def era_shuffle(self, era_length: int, key: jax.Array, *, perm_type: str = "feistel") -> "AsyncDataset[T]":
        """All examples, consecutive ones of `era_length` in an order determined by the key."""
        return EraShufflingDataset(self, era_length, key=key, perm_type=perm_type)


class SyncDataset(ABC, Generic[T]):
    """Examples by index, synchronous; a subclass defines `__len__` and `get_batch`."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def get_batch(self, indices: Sequence[int] | np.ndarray) -> Sequence[T]:
        """The examples with these indices, in this order."""

    def __getitem__(self, index: int) -> T:
        return self.get_batch([index])[0]

    def is_finite(self) -> bool:
        """Whether the number of examples is finite."""
        return True

    def as_async_dataset(self) -> AsyncDataset[T]:
        """This data set with asynchronous methods."""
        return AsyncifiedDataset(self)

    def as_sync_dataset(self) -> "SyncDataset[T]":
        """This data set."""
        return self


class SyncifiedDataset(SyncDataset[T]):
    """An async data set with synchronous methods."""

    def __init__(self, dataset: AsyncDataset[T]):
        self.dataset = dataset

    def __len__(self) -> int:
        return wait_for(self.dataset.async_len())

    def get_batch(self, indices: Sequence[int] | np.ndarray) -> Sequence[T]:
        """The examples with these indices, in this order."""
        return wait_for(self.dataset.get_batch([int(i) for i in indices]))

    def is_finite(self) -> bool:
        """Whether the number of examples is finite."""
        return self.dataset.is_finite()


class AsyncifiedDataset(AsyncDataset[T]):
    """A sync data set with asynchronous methods."""

    def __init__(self, dataset: SyncDataset[T]):
        self.dataset = dataset

    async def async_len(self) -> int:
        """The number of examples."""
        return len(self.dataset)

    async def get_batch(self, indices: Sequence[int]) -> Sequence[T]:
        """The examples with these indices, in this order."""
        return self.dataset.get_batch(indices)

    def is_finite(self) -> bool:
        """Whether the number of examples is finite."""
        return self.dataset.is_finite()


class ListAsyncDataset(AsyncDataset[T]):
    """The examples of a list.

    Args:
        data: the examples.
        is_complete: whether no more will be appended. Until then `get_batch` waits for examples that are not there;
            `async_len` is the number so far, where upstream's waits for `finalize`.
    """

    def __init__(self, data: list[T], is_complete: bool = False):
        self.data, self.is_complete = data, is_complete

    def append(self, item: T) -> None:
        """Adds an example at the end.

        Raises:
            ValueError: the list is complete.
        """
        if self.is_complete:
            raise ValueError("append: the list is complete, so that its length no longer changes")
        self.data.append(item)

    def finalize(self) -> None:
        """Marks the list complete."""
        self.is_complete = True

    async def async_len(self) -> int:
        """The number of examples so far."""
        return len(self.data)

    async def final_length_is_known(self) -> bool:
        """Whether the list is complete."""
        return self.is_complete

    async def get_batch(self, indices: Sequence[int]) -> Sequence[T]:
        """The examples with these indices, in this order."""
        await self.wait_until_len_at_least(max(indices, default=-1) + 1)
        return [self.data[i] for i in indices]


class _AsLong(AsyncDataset[U]):
    """The base of data sets that are as long as another."""

    dataset: AsyncDataset[Any]

    async def async_len(self) -> int:
        """The number of examples."""
        return await self.dataset.async_len()

    async def final_length_is_known(self) -> bool:
        """Whether the source's length is final."""
        return await self.dataset.final_length_is_known()

    def is_finite(self) -> bool:
        """Whether the number of examples is finite."""
        return self.dataset.is_finite()


class _Mapped(_AsLong[U]):
    """The base of mapped data sets."""

    def __init__(self, dataset: AsyncDataset[Any], fn: Callable[..., Any], *more: object, **keys: PyTree):
        self.dataset, self.fn, self.more, self.keys = dataset, fn, more, keys

    def keywords(self, fold: int) -> dict[str, Any]:
        """The keywords of a call; its random key is the given one with a number folded in."""
        key = self.keys.get("key")
        # The example's index, not its place in the batch: its randomness does not depend on how it is batched.
        return self.keys if key is None else {**self.keys, "key": jax.random.fold_in(key, fold)}


class MappedAsyncDataset(_Mapped[U]):
    """A function of each example."""

    async def get_batch(self, indices: Sequence[int]) -> Sequence[U]:
        """The examples with these indices, in this order."""
        items = await self.dataset.get_batch(indices)
        return [self.fn(item, *self.more, **self.keywords(i)) for i, item in zip(indices, items, strict=True)]


class BatchMappedAsyncDataset(_Mapped[U]):
    """A function of the examples of each request; its random key depends on the first index."""

    async def get_batch(self, indices: Sequence[int]) -> Sequence[U]:
        """The examples with these indices, in this order."""
        items = await self.dataset.get_batch(indices)
        return self.fn(items, *self.more, **self.keywords(indices[0] if len(indices) else 0))


class SlicedAsyncDataset(AsyncDataset[T]):
    """The examples from one index up to another.

    Raises:
        ValueError: the numbers are in the wrong order.
    """

    def __init__(self, dataset: AsyncDataset[T], start_index: int | None = None, end_index: int | None = None):
        self.dataset, self.start_index, self.end_index = dataset, start_index or 0, end_index
        if end_index is not None and self.start_index > end_index:
            raise ValueError(f"a slice from {start_index} to {end_index} ends before it begins")

    async def async_len(self) -> int:
        """The number of examples."""
        # `async_len` of an infinite data set would fail; the slice's end bounds it.
        if self.end_index is not None and not self.dataset.is_finite():
            return self.end_index - self.start_index
        length = await self.dataset.async_len()
        stop = length if self.end_index is None else min(self.end_index, length)
        return max(stop - self.start_index, 0)

    async def get_batch(self, indices: Sequence[int]) -> Sequence[T]:
        """The examples with these indices, in this order."""
        positions = [i + self.start_index for i in indices]
        # Without this check, an index past the slice's end would read the next example of the source.
        if self.end_index is not None and positions and max(positions) >= self.end_index:
            raise ValueError(f"example {max(indices)} of a slice from {self.start_index} to {self.end_index}")
        return await self.dataset.get_batch(positions)

    def is_finite(self) -> bool:
        """Whether the number of examples is finite."""
        return self.end_index is not None or self.dataset.is_finite()


class EpochDataset(AsyncDataset[T]):
    """The examples repeated a number of times, or endlessly."""

    def __init__(self, dataset: AsyncDataset[T], max_epochs: int | None = None):
        if not dataset.is_finite():
            raise ValueError("cannot repeat an infinite data set")
        self.dataset, self.max_epochs = dataset, max_epochs

    async def async_len(self) -> int:
        """The number of examples."""
        if self.max_epochs is None:
            raise ValueError("an endlessly repeated data set has no length; set max_epochs")
        return self.max_epochs * await self.dataset.async_len()

    async def get_batch(self, indices: Sequence[int]) -> Sequence[T]:
        """The examples with these indices, in this order."""
        length = await self.dataset.async_len()
        if self.max_epochs is not None and indices and max(indices) >= self.max_epochs * length:
            raise ValueError(f"example {max(indices)} of {self.max_epochs} epochs of {length} examples")
        return await self.dataset.get_batch([i % length for i in indices])

    def is_finite(self) -> bool:
        """Whether the number of examples is finite."""
        return self.max_epochs is not None


class PermutationDataset(AsyncDataset[T]):
    """The examples in an order that is computed, not stored, and equal on every machine."""

    def __init__(self, dataset: AsyncDataset[T], key: jax.Array, perm_type: str = "feistel"):
        if perm_type not in ("feistel", "linear"):
            raise ValueError(f"perm_type: {perm_type!r}; expected feistel or linear")
        self.dataset, self.key, self.perm_type = dataset, key, perm_type
        # Created on first use, since the length needs a coroutine.
        self._order: Permutation | None = None

    async def async_len(self) -> int:
        """The number of examples."""
        return await self.dataset.async_len()

    async def get_batch(self, indices: Sequence[int]) -> Sequence[T]:
        """The examples with these indices, in this order."""
        if self._order is None:
            size, key = await self.dataset.async_len(), key_to_seed(self.key)
            self._order = Feistel(size, key) if self.perm_type == "feistel" else Affine(size, key)
        return await self.dataset.get_batch(self._order(np.asarray(indices, np.int64)).tolist())

    def is_finite(self) -> bool:
        """Whether the number of examples is finite."""
        return self.dataset.is_finite()


class EraShufflingDataset(_AsLong[T]):
    """Consecutive eras of examples, each in a computed order of its own; an era can be read once it is complete.

    Args:
        dataset: the examples; it may still grow.
        era_length: examples in an era; the last one may be shorter.
        key: determines the orders.
        perm_type: feistel or linear.
    """

    def __init__(self, dataset: AsyncDataset[T], era_length: int, *, key: jax.Array, perm_type: str = "feistel"):
        if perm_type not in ("feistel", "linear"):
            raise ValueError(f"perm_type: {perm_type!r}; expected feistel or linear")
        if era_length < 1:
            raise ValueError(f"era_length: must be at least 1, got {era_length}")
        self.dataset, self.era_length, self.key, self.perm_type = dataset, era_length, key, perm_type

    async def current_len(self) -> int | None:
        """The number of examples of complete eras; all of them once their number is final."""
        length = await self.dataset.current_len()
        if length is None or await self.final_length_is_known():
            return length
        return length // self.era_length * self.era_length

    async def get_batch(self, indices: Sequence[int]) -> Sequence[T]:
        """The examples with these indices, in this order."""
        positions = np.asarray(indices, np.int64)
        if len(positions) and positions.min() < 0:
            raise ValueError(f"example {positions.min()}: negative indices are not supported")
        # Whole eras must be there, since the order of one depends on its length.
        needed = (int(positions.max(initial=-1)) // self.era_length + 1) * self.era_length
        size = await self.dataset.wait_until_len_at_least(needed)
        if len(positions) and positions.max() >= size:
            raise IndexError(f"example {positions.max()} of {size}")
        order = ShuffledWindows(size, key_to_seed(self.key), self.era_length, self.perm_type)
        return await self.dataset.get_batch(order(positions).tolist())


# --- those of early 2024 ---


class IterableDataset(ABC, Iterable[T]):
    """`levanter.data.Dataset` of early 2024: an iterable of examples."""

    @abstractmethod
    def __iter__(self) -> Iterator[T]: ...


class ShardableDataset(IterableDataset[T]):
    """An iterable data set that can be split into shards."""

    @abstractmethod
    def shard(self, shard_idx: int, num_shards: int) -> "ShardableDataset[T]":
        """One of `num_shards` shards."""


class ShuffleDataset(ShardableDataset[T]):
    """Examples shuffled through a buffer: each incoming example replaces the one that is emitted.

    Args:
        dataset: the examples.
        key: determines the order; every shard derives its own key from it.
        buffer_size: number of examples in the buffer.
    """

    def __init__(self, dataset: IterableDataset[T], key: jax.Array, buffer_size: int):
        if buffer_size < 1:
            raise ValueError(f"buffer_size: must be at least 1, got {buffer_size}")
        self.dataset, self.key, self.buffer_size = dataset, key, buffer_size

    def shard(self, shard_idx: int, num_shards: int) -> "ShuffleDataset[T]":
        """One of `num_shards` shards."""
        assert isinstance(self.dataset, ShardableDataset), f"{type(self.dataset).__name__} cannot be split into shards"
        part = self.dataset.shard(shard_idx, num_shards)
        return ShuffleDataset(part, jax.random.fold_in(self.key, shard_idx), self.buffer_size)

    def __iter__(self) -> Iterator[T]:
        random = np.random.default_rng(key_to_seed(self.key))
        buffer: list[T] = []
        for item in self.dataset:
            if len(buffer) < self.buffer_size:
                buffer.append(item)
                continue
            place = int(random.integers(len(buffer)))
            # The new example takes the place of the emitted one, so the buffer stays full and memory bounded.
            out, buffer[place] = buffer[place], item
            yield out
        # The source is exhausted: the rest leaves in random order.
        while buffer:
            yield buffer.pop(int(random.integers(len(buffer))))


class ShardedDataset(IterableDataset[T]):
    """A data set whose shards have names and can be opened at any row."""

    @property
    @abstractmethod
    def shard_names(self) -> Sequence[str]:
        """The names of the shards."""

    @abstractmethod
    def open_shard_at_row(self, shard_name: str, row: int) -> Iterator[T]:
        """The examples of a shard from a row on."""

    @property
    def num_shards(self) -> int:
        """The number of shards."""
        return len(self.shard_names)

    def open_shard(self, shard_name: str) -> Iterator[T]:
        """The examples of a shard."""
        return self.open_shard_at_row(shard_name, 0)

    def __iter__(self) -> Iterator[T]:
        for name in self.shard_names:
            yield from self.open_shard(name)


class BatchProcessor(ABC, Generic[T, U]):
    """Upstream's interface for turning a batch of examples into rows, for classes that scripts derive from it.

    `levanter.upstream.facades.caches.build_or_load_cache` calls them; a run's token stores are built from
    `data.components`, without one.
    """

    @abstractmethod
    def __call__(self, batch: Sequence[T]) -> Sequence[U] | U:
        """The rows of a batch of examples: a list, or one mapping of columns."""

    @property
    def resources(self) -> dict[str, float]:
        """The resources that a call needs besides CPUs and GPUs."""
        return {}

    @property
    @abstractmethod
    def num_cpus(self) -> int:
        """The number of CPUs that a call needs."""

    @property
    def num_gpus(self) -> int:
        """The number of GPUs that a call needs."""
        return 0

    @property
    def batch_size(self) -> int:
        """The number of examples in a call."""
        return 1024

    @property
    def output_exemplar(self) -> PyTree:
        """A row, for the names and dtypes of a cache's columns; a class whose rows are cached defines it."""
        raise NotImplementedError(f"{type(self).__name__} has no output_exemplar, which a cache needs")

    @property
    def metadata(self) -> dict[str, Any]:
        """What is kept with a cache, to recognize one that was built with other settings."""
        return {}


def stack_batch_encodings(first: PyTree, second: PyTree) -> PyTree:
    """Concatenates two encodings of transformers: each key holds the sequences of both."""

    def sequences(value: PyTree) -> list[Any]:
        # An encoding of one text holds a flat list of ids; that of several texts, a list of lists.
        nested = len(value) > 0 and isinstance(value[0], Sequence | np.ndarray)
        return list(value) if nested or len(value) == 0 else [value]

    return type(first)({name: sequences(first[name]) + sequences(second[name]) for name in first})
