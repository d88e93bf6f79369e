"""Data loaders of earlier generations: batches of a script's examples on the devices.

    loader = DataLoader(dataset, 32, mesh=trainer.device_mesh, axis_resources=trainer.compute_axis_mapping)
    for batch in loader.iter_from_step(1000): …

Examples are pytrees of arrays, named or plain; a batch is such a tree whose arrays have the batch axis in front.
Every process creates the rows that its own devices hold. A thread prefetches batches while the current one is used.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, count, islice, repeat
from typing import Any

import haliax as hax
import jax
import numpy as np
from haliax import Axis, NamedArray
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from haliax_ext.mapping import AxisMapping, compute_mapping_in_scope
from haliax_ext.meshspec import MeshSpec, mesh_in_scope
from haliax_ext.pytree import PyTree, is_named
from levanter.trainer.config_blocks import BatchSizeStage
from levanter.upstream.facades.datasets import AsyncDataset, IterableDataset, ShardableDataset, SyncDataset, wait_for
from levanter.upstream.facades.schedules import OldBatchSchedule

Resources = Mapping[str, Any]
Producer = Callable[[], Iterable[Any] | AsyncIterator[Any]]


class BackgroundIterable:
    """The items of an iterator, produced in a background thread; every iteration calls the producer again.

    Args:
        producer_fn: returns an iterator, or an asynchronous one.
        max_capacity: number of items kept ready; None for no limit, a negative number for none (one of an
            asynchronous producer).
    """

    def __init__(self, producer_fn: Producer, max_capacity: int | None = None):
        self.producer_fn, self.max_capacity = producer_fn, max_capacity
        self._stopped = threading.Event()

    def __iter__(self) -> "BackgroundIterator":
        return BackgroundIterator(self.producer_fn, self.max_capacity, self._stopped)

    def stop(self) -> None:
        """Stops all iterators of this iterable."""
        self._stopped.set()


_END = object()


async def _next_or_end(items: AsyncIterator[Any]) -> object:
    try:
        return await anext(items)
    except StopAsyncIteration:
        return _END


def _synchronous(items: Iterable[Any] | AsyncIterator[Any]) -> Iterator[Any]:
    """The items of either kind of iterator; a loop of this thread runs an asynchronous one."""
    if not isinstance(items, AsyncIterator):
        yield from items
        return
    with asyncio.Runner() as runner:
        while (item := runner.run(_next_or_end(items))) is not _END:
            yield item


class BackgroundIterator:
    """One pass over the items of a `BackgroundIterable`.

    Raises:
        Exception: the producer failed; raised when the failing item is requested.
    """

    def __init__(
        self,
        producer_fn: Producer,
        max_capacity: int | None = None,
        stopped: threading.Event | None = None,
    ):
        self._stopped, self._ended = stopped or threading.Event(), threading.Event()
        self._on_demand: Iterator[Any] | None = None
        if max_capacity is not None and max_capacity < 0:
            # Without a thread, unless a loop may be running in this one, as where an asynchronous producer is used.
            items, max_capacity = producer_fn(), 1
            if not isinstance(items, AsyncIterator):
                self._on_demand = iter(items)
            producer_fn = lambda: items  # noqa: E731
        # Queue size 0 means unbounded.
        self._ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(max_capacity or 0)
        if self._on_demand is not None:
            return
        # The thread holds no reference to the iterator, so that dropping the last reference ends the thread.
        arguments = (self._ready, (self._stopped, self._ended), producer_fn)
        # Daemon: a script that ends early must not hang on a producer that waits for input.
        threading.Thread(target=_make_items, args=arguments, name="make-items", daemon=True).start()

    def _over(self) -> bool:
        return self._stopped.is_set() or self._ended.is_set()

    def __iter__(self) -> "BackgroundIterator":
        return self

    def __next__(self) -> PyTree:
        if self._on_demand is not None and not self._over():
            return next(self._on_demand)
        while not self._over():
            try:
                # With a timeout, because `stop` from another thread adds nothing to the queue.
                item, error = self._ready.get(timeout=0.1)
            except queue.Empty:
                continue
            # Items come before the end mark in the queue, so an error surfaces after all items that were produced.
            if item is not _END:
                return item
            self._ended.set()
            if error is not None:
                raise error
        raise StopIteration

    def stop(self) -> None:
        """Stops the iterator and its thread."""
        self._ended.set()

    def qsize(self) -> int:
        """The number of items that are ready."""
        return self._ready.qsize()

    def __del__(self) -> None:
        # The thread sees the event within its put timeout and ends.
        self._ended.set()


def _make_items(
    ready: "queue.Queue[tuple[PyTree, BaseException | None]]",
    stops: tuple[threading.Event, ...],
    producer_fn: Producer,
) -> None:
    """Produces items until there are no more, or one of the events is set."""

    def put(item: PyTree, error: BaseException | None = None) -> bool:
        while not any(stop.is_set() for stop in stops):
            with suppress(queue.Full):
                # With a timeout, so that a thread whose consumer has stopped ends and does not wait for room forever.
                ready.put((item, error), timeout=0.1)
                return True
        return False

    try:
        for item in _synchronous(producer_fn()):
            if not put(item):
                return
        put(_END)
    except BaseException as error:  # noqa: BLE001 - re-raised where the item is requested
        put(_END, error)


def place_examples(
    exemplar: PyTree,
    take: Callable[[Sequence[int]], Sequence[Any]],
    Batch: Axis,
    mesh: Mesh,
    mapping: AxisMapping,
) -> PyTree:
    """Assembles a batch on the devices.

    Args:
        exemplar: an example, for the structure of the tree.
        take: maps rows of the batch to their examples; called once, with the rows that this process's devices hold.
        Batch: the axis of rows.
        mesh: the devices.
        mapping: logical axis → mesh axes.
    """
    flat, tree = jax.tree.flatten(exemplar, is_leaf=is_named)
    # device → its slice of the batch axis, for this process's devices only.
    first = NamedSharding(mesh, mapping.spec([Batch.name])).addressable_devices_indices_map((Batch.size,)).values()
    # The rows of this process only: hosts would otherwise read the whole global batch each.
    local_rows = sorted({row for index in first if index is not None for row in range(*index[0].indices(Batch.size))})
    place_of = {row: n for n, row in enumerate(local_rows)}
    examples = [jax.tree.leaves(example, is_leaf=is_named) for example in take(local_rows)]

    def whole(n: int, leaf: PyTree) -> PyTree:
        # Stacked once for all local shards; the callback below only slices.
        rows = np.stack([np.asarray(example[n].array if is_named(leaf) else example[n]) for example in examples])
        axes = (Batch, *leaf.axes) if is_named(leaf) else None
        # Axes of plain arrays have no names: only the batch axis is sharded.
        names = [Batch.name, *([""] * (rows.ndim - 1))] if axes is None else [axis.name for axis in axes]
        sharding = NamedSharding(mesh, mapping.spec(names))

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            positions = [place_of[row] for row in range(*index[0].indices(Batch.size))]
            # `index` is global. Rows are renumbered to local positions, the other axes are complete on every host.
            return rows[positions][(slice(None), *index[1:])]

        array = jax.make_array_from_callback((Batch.size, *rows.shape[1:]), sharding, part)
        return array if axes is None else NamedArray(array, axes)

    return jax.tree.unflatten(tree, [whole(n, leaf) for n, leaf in enumerate(flat)])


def _placement(mesh: Mesh | None, resources: Resources | None) -> tuple[Mesh, AxisMapping]:
    """The given mesh and mapping, or those in scope.

    Raises:
        ValueError: there is no mesh with devices.
    """
    current_mesh = mesh_in_scope() if mesh is None else mesh
    if current_mesh is None or isinstance(current_mesh, AbstractMesh):
        raise ValueError(
            "a loader places batches on devices: pass it a mesh, or create it inside `with trainer.device_mesh`"
        )
    mapping = compute_mapping_in_scope() if resources is None else AxisMapping(resources)
    # Scripts pass mappings with mesh axes that this mesh lacks; a missing axis shards nothing.
    known = {name: tuple(a for a in mapping.mesh_axes(name) if a in current_mesh.shape) for name in mapping}
    return current_mesh, AxisMapping(known)


class DataLoader:
    """Batches of a data set with random access to its examples.

    Args:
        data: the examples.
        batch_size: rows of a batch, a schedule of them, or their axis.
        batch_axis_name: the name of the axis of rows; `batch` by default.
        max_buffered_batches: batches kept ready; 0 or less produces them on demand.
        mesh: the devices; those in scope by default.
        axis_resources: logical axis → mesh axes; the mapping in scope by default.
        prefetch_size: accepted for compatibility; batches are assembled one at a time.
        pad_final_batch: whether a short last batch is padded with zeros; it is dropped otherwise.
        allow_nondivisible_batch_size: whether a batch that does not divide over the devices is padded with zeros.

    Raises:
        ValueError: the data set is empty, or a batch does not divide over the devices.
    """

    def __init__(
        self,
        data: AsyncDataset[Any] | SyncDataset[Any],
        batch_size: int | Sequence[BatchSizeStage] | Axis,
        *,
        batch_axis_name: str | None = None,
        max_buffered_batches: int | None = 64,
        mesh: Mesh | None = None,
        axis_resources: Resources | None = None,
        prefetch_size: int = 32,
        pad_final_batch: bool = True,
        allow_nondivisible_batch_size: bool = False,
    ):
        del prefetch_size
        self.data_store = data.as_async_dataset()
        if isinstance(batch_size, Axis):
            batch_axis_name, batch_size = batch_size.name, batch_size.size
        self.batch_axis_name = batch_axis_name or "batch"
        self.scheduler = OldBatchSchedule(batch_size)
        self.max_buffered_batches, self.pad_final_batch = max_buffered_batches, pad_final_batch
        self.mesh, self.mapping = _placement(mesh, axis_resources)
        ways = MeshSpec.from_mesh(self.mesh).ways(self.mapping.get(self.batch_axis_name))
        self._ways = ways
        # Every size of the schedule is checked now, not when its stage begins.
        bad = sorted(size for size in self.scheduler.unique_batch_sizes() if size % ways)
        if bad and not allow_nondivisible_batch_size:
            raise ValueError(
                f"a batch of {bad[0]} rows is not divisible by {ways}, the shards of {self.batch_axis_name}; "
                f"{bad[0] // ways * ways or ways} and {-(-bad[0] // ways) * ways} are"
            )
        if self.data_store.is_finite() and wait_for(self.data_store.async_len()) < 1:
            raise ValueError("the data set has no examples")
        # Its structure, dtypes and shapes stand for all examples.
        self._exemplar = wait_for(self.data_store.getitem_async(0))

    def has_len(self) -> bool:
        """Whether the number of batches is finite."""
        return self.data_store.is_finite()

    def __len__(self) -> int:
        """The number of batches.

        Raises:
            ValueError: the data set is infinite.
        """
        if not self.has_len():
            raise ValueError("the data set is infinite")
        length = wait_for(self.data_store.async_len())
        last = self.scheduler.find_step_containing_offset(length - 1)
        # The step that holds the last example counts if it is full, or if it may be padded.
        whole = self.scheduler.global_data_offset_by_step(last + 1) <= length
        return last + 1 if whole or self.pad_final_batch else last

    def batch_axis_at_step(self, step: int) -> Axis:
        """The axis of a batch's rows, padding included."""
        size = self.scheduler.batch_size_at_step(step)
        # Rounded up to a multiple of the shards; the missing rows are zeros.
        return Axis(self.batch_axis_name, -(-size // self._ways) * self._ways)

    def __iter__(self) -> Iterator[Any]:
        return self.iter_from_step(None)

    def iter_from_step(self, start_from_batch: int | jax.Array | None = None) -> Iterator[Any]:
        """Iterates over the batches from a given one on."""
        first = 0 if start_from_batch is None else int(start_from_batch)
        if (self.max_buffered_batches or 0) < 0 or self.max_buffered_batches == 0:
            return self._batches(first)
        return iter(BackgroundIterable(lambda: self._batches(first), self.max_buffered_batches))

    def _batches(self, first: int) -> Iterator[Any]:
        steps = range(first, len(self)) if self.has_len() else count(first)
        length = wait_for(self.data_store.async_len()) if self.has_len() else None
        # Padding rows have the structure of an example with zeros, so a loss weight of the example is 0, too.
        zeros = jax.tree.map(np.zeros_like, self._exemplar)
        for step in steps:
            begin, size = self.scheduler.global_data_offset_by_step(step), self.scheduler.batch_size_at_step(step)
            stop = begin + size if length is None else min(begin + size, length)

            # Defaults bind the values of this step: the function may run after the loop has moved on.
            def take(rows: Sequence[int], begin: int = begin, stop: int = stop) -> Sequence[Any]:
                present = [begin + row for row in rows if begin + row < stop]
                examples = list(wait_for(self.data_store.get_batch(present))) if present else []
                # Padding comes last: `rows` are ascending, so missing ones are at the end.
                return [*examples, *([zeros] * (len(rows) - len(examples)))]

            yield place_examples(self._exemplar, take, self.batch_axis_at_step(step), self.mesh, self.mapping)


class IterableLoader:
    """The base of the loaders of early 2024, which iterate over examples.

    Args:
        item_dataset: the examples.
        mesh: the devices.
        Batch: the axis of a batch's rows.
        axis_resources: logical axis → mesh axes; by default the mapping in scope when the iteration starts.
        max_capacity: batches kept ready; below 0 they are produced on demand.
    """

    def __init__(
        self,
        item_dataset: IterableDataset[Any],
        mesh: Mesh,
        Batch: Axis,
        axis_resources: Resources | None = None,
        max_capacity: int | None = 10,
    ):
        self.item_dataset, self.mesh, self.Batch = item_dataset, mesh, Batch
        self.axis_resources, self.max_capacity = axis_resources, max_capacity

    @property
    def batch_size(self) -> int:
        """Rows of a batch, over all devices."""
        return self.Batch.size

    def examples(self) -> Iterator[Any]:
        """An iterator over the examples."""
        return iter(self.item_dataset)

    def __iter__(self) -> Iterator[Any]:
        # Resolved in the caller's thread: scopes are thread-local and would be empty in the background thread.
        _, mapping = _placement(self.mesh, self.axis_resources)
        if self.max_capacity is not None and self.max_capacity < 0:
            return self._batches(mapping)
        return iter(BackgroundIterable(lambda: self._batches(mapping), self.max_capacity))

    def _batches(self, mapping: AxisMapping) -> Iterator[Any]:
        examples = self.examples()
        # A last batch that is not full is dropped.
        while len(rows := list(islice(examples, self.Batch.size))) == self.Batch.size:
            yield place_examples(
                rows[0], lambda indices, rows=rows: [rows[n] for n in indices], self.Batch, self.mesh, mapping
            )


class ReplicatedBatchLoader(IterableLoader):
    """Every process reads all examples, once; a short last batch is dropped."""


class ShardedBatchLoader(IterableLoader):
    """Repeats the examples endlessly; every process reads all of them and keeps those of its devices."""

    def __init__(self, local_dataset: ShardableDataset[Any], mesh: Mesh, Batch: Axis, *more: PyTree, **keys: PyTree):
        super().__init__(local_dataset, mesh, Batch, *more, **keys)

    def examples(self) -> Iterator[Any]:
        return chain.from_iterable(repeat(self.item_dataset))


def stack_tree(batch_name: str, individual_datums: Iterable[Any]) -> PyTree:
    """Stacks examples into one tree, along a new first axis."""

    def stacked(*leaves: PyTree) -> PyTree:
        return hax.stack(batch_name, leaves) if is_named(leaves[0]) else jax.numpy.stack(leaves)

    return jax.tree.map(stacked, *individual_datums, is_leaf=is_named)


def check_sharded_consistency(tree: PyTree, check_disjoint_indices_are_different: bool = False) -> None:
    """Compares the shards of arrays with each other.

    Args:
        tree: the arrays.
        check_disjoint_indices_are_different: whether shards of different slices must not be equal.

    Raises:
        ValueError: copies of a shard differ, or shards that must differ are equal.
    """
    for array in jax.tree.leaves(tree):
        shards: dict[tuple[tuple[int, int], ...], np.ndarray] = {}
        for shard in array.addressable_shards:
            # The global bounds of a shard identify it; replicas have the same ones.
            where = tuple(part.indices(size)[:2] for part, size in zip(shard.index, array.shape, strict=True))
            values_here = np.asarray(shard.data)
            if not np.array_equal(
                shards.setdefault(where, values_here), values_here, equal_nan=values_here.dtype.kind == "f"
            ):
                raise ValueError(f"the copy of {where} on {shard.device} differs from another device's")
        values = list(shards.items())
        for n, (where, values_here) in enumerate(values if check_disjoint_indices_are_different else ()):
            for other, other_values in values[:n]:
                if values_here.shape == other_values.shape and np.array_equal(values_here, other_values):
                    raise ValueError(f"the shards of {where} and {other} are equal")
