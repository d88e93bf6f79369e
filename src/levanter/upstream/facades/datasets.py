"""Data sets of Python examples, as scripts of earlier generations build and compose them.

    rows = ListAsyncDataset([...]).map(to_example).shuffle(key)
    for batch in DataLoader(rows, 32, mesh=mesh, axis_resources=mapping): …      # levanter.upstream.facades.loaders

A run's own data are `data.components` in its configuration, whose rows come from a token store; these classes are for
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
from levanter.data.shuffle import Affine, Feistel, Permutation

T = TypeVar("T")
U = TypeVar("U")


def wait_for(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, whether or not an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    results: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            results.append(asyncio.run(coroutine))
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
    data = jax.random.key_data(key) if jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    return int.from_bytes(np.asarray(data).astype("<u4").tobytes()[:8], "little")


class AsyncDataset(ABC, Generic[T]):
    """Examples by number; a subclass has `async_len` and `get_batch`, and `is_finite` where it never ends."""

    @abstractmethod
    async def async_len(self) -> int:
        """How many there are."""

    @abstractmethod
    async def get_batch(self, indices: Sequence[int]) -> Sequence[T]:
        """Those with these numbers, in this order."""

    def is_finite(self) -> bool:
        """Whether there is an end."""
        return True

    async def getitem_async(self, index: int) -> T:
        """The one with this number."""
        return (await self.get_batch([index]))[0]

    async def final_length_is_known(self) -> bool:
        """2024's question: whether `async_len` will not change; it never does."""
        return self.is_finite()

    async def current_len(self) -> int | None:
        """2024's question: how many there are by now; None where there is no end."""
        return await self.async_len() if self.is_finite() else None

    async def wait_until_len_at_least(self, length: int) -> int:
        """2024's request: how many there are, at most `length` of them asked for."""
        return length if not self.is_finite() else await self.async_len()

    def as_async_dataset(self) -> "AsyncDataset[T]":
        """Itself."""
        return self

    def as_sync_dataset(self) -> "SyncDataset[T]":
        """The same from a function."""
        return SyncifiedDataset(self)

    def map(self, fn: Callable[..., U], *more: object, **keys: PyTree) -> "AsyncDataset[U]":
        """`fn(example, *more, **keys)` of each; a `key` among the keywords is another one for every example."""
        return MappedAsyncDataset(self, fn, *more, **keys)

    def map_batches(self, fn: Callable[..., Sequence[U]], *more: object, **keys: PyTree) -> "AsyncDataset[U]":
        """`fn(examples, *more, **keys)` of what is asked for together."""
        return BatchMappedAsyncDataset(self, fn, *more, **keys)

    def slice_dataset(self, start_index: int | None = None, end_index: int | None = None) -> "AsyncDataset[T]":
        """Those from one number up to another."""
        return SlicedAsyncDataset(self, start_index, end_index)

    def take(self, n: int) -> "AsyncDataset[T]":
        """The first `n`."""
        return self.slice_dataset(end_index=n)

    def shuffle(self, key: jax.Array, *, perm_type: str = "feistel") -> "AsyncDataset[T]":
        """All of them in another order, which the key decides."""
        return PermutationDataset(self, key, perm_type)


class SyncDataset(ABC, Generic[T]):
    """Examples by number from a function; a subclass has `__len__` and `get_batch`."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def get_batch(self, indices: Sequence[int] | np.ndarray) -> Sequence[T]:
        """Those with these numbers, in this order."""

    def __getitem__(self, index: int) -> T:
        return self.get_batch([index])[0]

    def is_finite(self) -> bool:
        """Whether there is an end."""
        return True

    def as_async_dataset(self) -> AsyncDataset[T]:
        """The same from a coroutine."""
        return AsyncifiedDataset(self)

    def as_sync_dataset(self) -> "SyncDataset[T]":
        """Itself."""
        return self


class SyncifiedDataset(SyncDataset[T]):
    """An async data set, asked from a function."""

    def __init__(self, dataset: AsyncDataset[T]):
        self.dataset = dataset

    def __len__(self) -> int:
        return wait_for(self.dataset.async_len())

    def get_batch(self, indices: Sequence[int] | np.ndarray) -> Sequence[T]:
        """Those with these numbers, in this order."""
        return wait_for(self.dataset.get_batch([int(i) for i in indices]))

    def is_finite(self) -> bool:
        """Whether there is an end."""
        return self.dataset.is_finite()


class AsyncifiedDataset(AsyncDataset[T]):
    """A sync data set, asked from a coroutine."""

    def __init__(self, dataset: SyncDataset[T]):
        self.dataset = dataset

    async def async_len(self) -> int:
        """How many there are."""
        return len(self.dataset)

    async def get_batch(self, indices: Sequence[int]) -> Sequence[T]:
        """Those with these numbers, in this order."""
        return self.dataset.get_batch(indices)

    def is_finite(self) -> bool:
        """Whether there is an end."""
        return self.dataset.is_finite()


class ListAsyncDataset(AsyncDataset[T]):
    """The examples of a list.

    Args:
        data: the examples.
        is_complete: 2024's: whether nothing is appended any more; there is no waiting for what is.
    """

    def __init__(self, data: list[T], is_complete: bool = True):
        self.data, self.is_complete = data, is_complete

    def append(self, item: T) -> None:
        """Adds one at the end."""
        self.data.append(item)

    def finalize(self) -> None:
        """2024's: says that nothing more is added."""
        self.is_complete = True

    async def async_len(self) -> int:
        """How many there are."""
        return len(self.data)

    async def get_batch(self, indices: Sequence[int]) -> Sequence[T]:
        """Those with these numbers, in this order."""
        return [self.data[i] for i in indices]


class _Mapped(AsyncDataset[U]):
    """What maps have in common: length and end are the source's."""

    def __init__(self, dataset: AsyncDataset[Any], fn: Callable[..., Any], *more: object, **keys: PyTree):
        self.dataset, self.fn, self.more, self.keys = dataset, fn, more, keys

    async def async_len(self) -> int:
        """How many there are."""
        return await self.dataset.async_len()

    def is_finite(self) -> bool:
        """Whether there is an end."""
        return self.dataset.is_finite()

    def keywords(self, fold: int) -> dict[str, Any]:
        """The keywords of a call, its random key made of the given one and a number."""
        key = self.keys.get("key")
        return self.keys if key is None else {**self.keys, "key": jax.random.fold_in(key, fold)}


class MappedAsyncDataset(_Mapped[U]):
    """A function of each example."""

    async def get_batch(self, indices: Sequence[int]) -> Sequence[U]:
        """Those with these numbers, in this order."""
        items = await self.dataset.get_batch(indices)
        return [self.fn(item, *self.more, **self.keywords(i)) for i, item in zip(indices, items, strict=True)]


class BatchMappedAsyncDataset(_Mapped[U]):
    """A function of the examples that are asked for together; a random key goes by the first of their numbers."""

    async def get_batch(self, indices: Sequence[int]) -> Sequence[U]:
        """Those with these numbers, in this order."""
        items = await self.dataset.get_batch(indices)
        return self.fn(items, *self.more, **self.keywords(indices[0] if len(indices) else 0))


class SlicedAsyncDataset(AsyncDataset[T]):
    """The examples from one number up to another.

    Raises:
        ValueError: the numbers are in the wrong order.
    """

    def __init__(self, dataset: AsyncDataset[T], start_index: int | None = None, end_index: int | None = None):
        self.dataset, self.start_index, self.end_index = dataset, start_index or 0, end_index
        if end_index is not None and self.start_index > end_index:
            raise ValueError(f"a slice from {start_index} to {end_index} ends before it begins")

    async def async_len(self) -> int:
        """How many there are."""
        if self.end_index is not None and not self.dataset.is_finite():
            return self.end_index - self.start_index
        length = await self.dataset.async_len()
        stop = length if self.end_index is None else min(self.end_index, length)
        return max(stop - self.start_index, 0)

    async def get_batch(self, indices: Sequence[int]) -> Sequence[T]:
        """Those with these numbers, in this order."""
        positions = [i + self.start_index for i in indices]
        if self.end_index is not None and positions and max(positions) >= self.end_index:
            raise ValueError(f"example {max(indices)} of a slice from {self.start_index} to {self.end_index}")
        return await self.dataset.get_batch(positions)

    def is_finite(self) -> bool:
        """Whether there is an end."""
        return self.end_index is not None or self.dataset.is_finite()


class EpochDataset(AsyncDataset[T]):
    """The examples repeated a number of times, or endlessly."""

    def __init__(self, dataset: AsyncDataset[T], max_epochs: int | None = None):
        if not dataset.is_finite():
            raise ValueError("cannot repeat an infinite data set")
        self.dataset, self.max_epochs = dataset, max_epochs

    async def async_len(self) -> int:
        """How many there are."""
        if self.max_epochs is None:
            raise ValueError("an endlessly repeated data set has no length; set max_epochs")
        return self.max_epochs * await self.dataset.async_len()

    async def get_batch(self, indices: Sequence[int]) -> Sequence[T]:
        """Those with these numbers, in this order."""
        length = await self.dataset.async_len()
        if self.max_epochs is not None and indices and max(indices) >= self.max_epochs * length:
            raise ValueError(f"example {max(indices)} of {self.max_epochs} epochs of {length} examples")
        return await self.dataset.get_batch([i % length for i in indices])

    def is_finite(self) -> bool:
        """Whether there is an end."""
        return self.max_epochs is not None


class PermutationDataset(AsyncDataset[T]):
    """The examples in an order that is computed and not stored; the same on every machine."""

    def __init__(self, dataset: AsyncDataset[T], key: jax.Array, perm_type: str = "feistel"):
        if perm_type not in ("feistel", "linear"):
            raise ValueError(f"perm_type: {perm_type!r}; expected feistel or linear")
        self.dataset, self.key, self.perm_type = dataset, key, perm_type
        self._order: Permutation | None = None

    async def async_len(self) -> int:
        """How many there are."""
        return await self.dataset.async_len()

    async def get_batch(self, indices: Sequence[int]) -> Sequence[T]:
        """Those with these numbers, in this order."""
        if self._order is None:
            size, key = await self.dataset.async_len(), key_to_seed(self.key)
            self._order = Feistel(size, key) if self.perm_type == "feistel" else Affine(size, key)
        return await self.dataset.get_batch(self._order(np.asarray(indices, np.int64)).tolist())

    def is_finite(self) -> bool:
        """Whether there is an end."""
        return self.dataset.is_finite()


# --- those of early 2024 ---


class IterableDataset(ABC, Iterable[T]):
    """`levanter.data.Dataset` of early 2024: examples one after the other."""

    @abstractmethod
    def __iter__(self) -> Iterator[T]: ...


class ShardableDataset(IterableDataset[T]):
    """One that can be split into shards."""

    @abstractmethod
    def shard(self, shard_idx: int, num_shards: int) -> "ShardableDataset[T]":
        """The part of one of so many."""


class ShuffleDataset(ShardableDataset[T]):
    """Examples shuffled through a buffer: each incoming example replaces the one that is emitted.

    Args:
        dataset: the examples.
        key: decides the order; every shard has its own of it.
        buffer_size: how many are held.
    """

    def __init__(self, dataset: IterableDataset[T], key: jax.Array, buffer_size: int):
        if buffer_size < 1:
            raise ValueError(f"buffer_size: must be at least 1, got {buffer_size}")
        self.dataset, self.key, self.buffer_size = dataset, key, buffer_size

    def shard(self, shard_idx: int, num_shards: int) -> "ShuffleDataset[T]":
        """The part of one of so many."""
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
            out, buffer[place] = buffer[place], item
            yield out
        while buffer:
            yield buffer.pop(int(random.integers(len(buffer))))


class ShardedDataset(IterableDataset[T]):
    """One whose shards have names and can be opened at any row."""

    @property
    @abstractmethod
    def shard_names(self) -> Sequence[str]:
        """The shards."""

    @abstractmethod
    def open_shard_at_row(self, shard_name: str, row: int) -> Iterator[T]:
        """The examples of a shard from a row on."""

    @property
    def num_shards(self) -> int:
        """How many shards there are."""
        return len(self.shard_names)

    def open_shard(self, shard_name: str) -> Iterator[T]:
        """The examples of a shard."""
        return self.open_shard_at_row(shard_name, 0)

    def __iter__(self) -> Iterator[T]:
        for name in self.shard_names:
            yield from self.open_shard(name)


class BatchProcessor(ABC, Generic[T]):
    """Turns a batch of examples into rows: upstream's interface, for classes that scripts derive from it.

    Our token stores are built from `data.components`; nothing here calls a processor.
    """

    @abstractmethod
    def __call__(self, batch: Sequence[T]) -> PyTree:
        """Rows of some examples."""

    @property
    def resources(self) -> dict[str, float]:
        """What a call needs beside processors."""
        return {}

    @property
    @abstractmethod
    def num_cpus(self) -> int:
        """Processors a call needs."""

    @property
    def num_gpus(self) -> int:
        """Accelerators a call needs."""
        return 0

    @property
    def batch_size(self) -> int:
        """Examples a call is given."""
        return 1024


def stack_batch_encodings(first: PyTree, second: PyTree) -> PyTree:
    """Two encodings of transformers as one: under each key the sequences of both."""

    def sequences(value: PyTree) -> list[Any]:
        nested = len(value) > 0 and isinstance(value[0], Sequence | np.ndarray)
        return list(value) if nested or len(value) == 0 else [value]

    return type(first)({name: sequences(first[name]) + sequences(second[name]) for name in first})
