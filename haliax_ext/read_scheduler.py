"""In which order, and how much at a time, the reads of a `LoadPlan` are begun within a budget of host memory.

A `ReadBatch` is what the calling thread waits for at once: a `ReadPlan` of leaves that are read directly, or all slabs
that one reshard needs. Memory counts from the moment in which something is read into it, not when its block is
allocated: so the reads of the next batches are under way while the oldest one has its last ones. A batch that is larger
than the whole budget would leave no memory for that, and the network would be idle from its last read to the next
batch's first byte; therefore a few reads of the next batch are begun even then.
"""

import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from haliax_ext.host_reader import HostReader
from haliax_ext.leaf_layout import distinct_boxes, to_slices
from haliax_ext.load_plan import CHUNK_BYTES, LoadPlan, LoadStep
from haliax_ext.read_plan import Block, ReadPlan, filled_bytes, merged_requests, plan_reads, slice_box
from haliax_ext.sources import ByteRange, TensorSource, remote_access

SMALL_BYTES = 1 << 20
"""On a host, of leaves that are read in one batch where they follow one another in the plan."""


@dataclass(eq=False, kw_only=True)
class ReadBatch:
    """Reads that the calling thread waits for together.

    Attributes:
        steps: the steps that it belongs to; several where their leaves are small, or share source tensors.
        plans: the plans that are read.
        completes: whether the steps can be finished once it is read.
        futures: the reads that were begun.
        held_bytes: host memory that these reads fill.
    """

    steps: tuple[LoadStep, ...]
    plans: list[ReadPlan]
    completes: bool
    futures: list[Future[None]] = field(default_factory=list[Future[None]])
    held_bytes: int = 0

    @property
    def is_resharded(self) -> bool:
        """Whether devices exchange what was read."""
        return self.steps[0].loads[0].reshard is not None

    @property
    def nbytes(self) -> int:
        """Bytes of its blocks."""
        return sum(plan.nbytes for plan in self.plans)


def read_batches(plan: LoadPlan, devices: np.ndarray, *, together: bool) -> Iterator[ReadBatch]:
    """The batches of a plan, in the order of its steps.

    Args:
        plan: how everything is loaded.
        devices: this host's, by their numbers in the mesh.
        together: whether small leaves that follow one another are one batch, since they may be adjacent in a file.
    """
    small: list[ReadBatch] = []
    for steps in _sharing_tensors(plan.steps) if together else ((step,) for step in plan.steps):
        for batch in _batches(plan, steps, devices):
            is_small = together and batch.completes and not batch.is_resharded and batch.nbytes <= SMALL_BYTES
            # Batches are delivered in the order of the steps: a large one first flushes the small ones before it.
            if small and not (is_small and sum(other.nbytes for other in small) + batch.nbytes <= SMALL_BYTES):
                yield _joined(small)
                small = []
            if is_small:
                small.append(batch)
            else:
                yield batch
    if small:
        yield _joined(small)


def _sharing_tensors(steps: Iterable[LoadStep]) -> Iterator[tuple[LoadStep, ...]]:
    """Steps, where several that follow one another and reshard leaves of the same source tensors are one group."""

    def key(step: LoadStep) -> Hashable:
        (first, *others) = step.loads
        # `id` is unique, so a step that shares nothing groups with no other.
        return id(step) if first.reshard is None or others else (first.sources, step.piece)

    return (tuple(group) for _, group in itertools.groupby(steps, key))


def _batches(plan: LoadPlan, steps: tuple[LoadStep, ...], devices: np.ndarray) -> Iterator[ReadBatch]:
    by_load: list[tuple[ReadPlan, ...]] = []
    for step in steps:
        for load in step.loads:
            boxes, numbers = distinct_boxes(load.device_boxes(plan.sharding.mesh, step.piece or (0, 0))[devices])
            blocks = [
                Block(box=box, devices=tuple(np.flatnonzero(numbers == n).tolist())) for n, box in enumerate(boxes)
            ]
            by_load.append(plan_reads(load, blocks))
    if steps[0].loads[0].reshard is not None or len({len(plans) for plans in by_load}) > 1:
        # A reshard needs all of its slabs; leaves that divide otherwise have no common parts.
        yield ReadBatch(steps=steps, plans=list(itertools.chain(*by_load)), completes=True)
        return
    # Leaves that share source tensors: the same blocks of each of them are adjacent there.
    parallel = list(zip(*by_load, strict=True))
    # The n-th plan of every leaf, read at one time; the steps are complete with the last.
    for n, plans in enumerate(parallel, 1):
        yield ReadBatch(steps=steps, plans=list(plans), completes=n == len(parallel))


def _joined(batches: list[ReadBatch]) -> ReadBatch:
    plans = list(itertools.chain.from_iterable(batch.plans for batch in batches))
    steps = tuple(itertools.chain.from_iterable(batch.steps for batch in batches))
    return ReadBatch(steps=steps, plans=plans, completes=True)


def read_all(
    batches: Iterable[ReadBatch],
    reader: HostReader,
    finish: Callable[[ReadBatch], object],
    *,
    budget: int,
    nbytes: int,
    ahead: int = 0,
) -> None:
    """Reads batches, and finishes one after another, in order.

    Args:
        batches: what to read.
        reader: the threads that read.
        finish: waits for a batch and gives its memory back.
        budget: host memory for what was begun and is not finished; the oldest batch may have more.
        nbytes: storage bytes of all of them.
        ahead: host memory of reads behind an oldest batch that is larger than the budget.
    """
    waiting: deque[ReadBatch] = deque()
    in_flight, remaining = 0, nbytes
    for batch in batches:
        is_begun = False
        for slices in reader.requests(batch.plans, remaining):
            filled = filled_bytes(slices)
            # Finishing the oldest batch is the only way to free memory, and it is also what must come next.
            while waiting and in_flight + filled > _limit(waiting[0], budget, ahead):
                oldest = waiting.popleft()
                finish(oldest)
                in_flight -= oldest.held_bytes
            # Blocks are allocated as late as possible: after older batches gave their memory back.
            if not is_begun:
                _begin(batch, reader)
                is_begun = True
            batch.futures.append(reader.submit(slices))
            batch.held_bytes += filled
            in_flight += filled
        # Nothing to read (blocks of padding only): the blocks still have to exist, filled with zeros.
        if not is_begun:
            _begin(batch, reader)
        waiting.append(batch)
        remaining -= sum(plan.source_bytes for plan in batch.plans)
    while waiting:
        finish(waiting.popleft())


def _limit(oldest: ReadBatch, budget: int, ahead: int) -> int:
    # An oldest batch beyond the budget still leaves `ahead` bytes for the next one, so that the network is not idle.
    return budget if oldest.held_bytes <= budget else oldest.held_bytes + ahead


def byte_ranges(plan: LoadPlan, source: TensorSource, host: int) -> Iterator[ByteRange]:
    """Every byte range that a host reads, lazily, in the order of reading.

    Args:
        plan: how everything is loaded.
        source: what it was made for.
        host: which of the plan's hosts.
    """
    together = remote_access(source) is not None
    for batch in read_batches(plan, plan.host_devices(host), together=together):
        for slices in merged_requests(batch.plans, source, read_bytes=CHUNK_BYTES, together=together):
            for requests in slices:
                yield from source.byte_ranges(requests[0].tensor, to_slices(slice_box(requests)))


def _begin(batch: ReadBatch, reader: HostReader) -> None:
    for plan in batch.plans:
        reader.start(plan)
