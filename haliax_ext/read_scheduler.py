"""In which order, and how much at a time, the reads of a `LoadPlan` are begun within a budget of host memory.

An *admission* is what is waited for together: a unit of leaves that are read directly, or all slabs of an exchange.
Memory counts from the moment in which something is read into it, not when its block is made: so the reads of the next
admissions are under way while the oldest one has its last ones. One that is larger than the whole budget would leave no
room for that, and the network would be idle from its last read to the next one's first byte: a few reads ahead are
begun beside it.
"""

import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from haliax_ext.host_reader import HostReader, InflightUnit
from haliax_ext.leaf_layout import to_slices
from haliax_ext.load_plan import CHUNK_BYTES, LoadPlan, LoadStep
from haliax_ext.read_coalescing import portions
from haliax_ext.read_plan import distinct
from haliax_ext.sources import ByteRange, TensorSource, remote_of

SMALL_BYTES = 1 << 20
"""On a host, of leaves that are admitted together where they follow one another in the plan."""


@dataclass(eq=False, kw_only=True)
class ReadBatch:
    """What is waited for together.

    Attributes:
        steps: that it belongs to; several where their leaves are small, or share source tensors.
        arrivals: what is read.
        completes: whether the steps can be finished once it is there.
        held_bytes: host memory that reads of it were begun into.
    """

    steps: tuple[LoadStep, ...]
    arrivals: list[InflightUnit]
    completes: bool
    held_bytes: int = 0

    @property
    def is_exchange(self) -> bool:
        """Whether devices exchange what was read."""
        return self.steps[0].loads[0].exchange is not None

    @property
    def nbytes(self) -> int:
        """Bytes of its blocks."""
        return sum(arrival.nbytes for arrival in self.arrivals)


def admissions(plan: LoadPlan, devices: np.ndarray, *, together: bool) -> Iterator[ReadBatch]:
    """The admissions of a plan, in the order of its steps.

    Args:
        plan: how everything is loaded.
        devices: this host's, by their numbers in the mesh.
        together: whether small leaves that follow one another are admitted together, since they may lie side by side.
    """
    small: list[ReadBatch] = []
    for steps in _side_by_side(plan.steps) if together else ((step,) for step in plan.steps):
        for each in _of_steps(plan, steps, devices):
            is_small = together and each.completes and not each.is_exchange and each.nbytes <= SMALL_BYTES
            if small and not (is_small and sum(one.nbytes for one in small) + each.nbytes <= SMALL_BYTES):
                yield _joined(small)
                small = []
            if is_small:
                small.append(each)
            else:
                yield each
    if small:
        yield _joined(small)


def _side_by_side(steps: Iterable[LoadStep]) -> Iterator[tuple[LoadStep, ...]]:
    """Steps, and as one those that follow one another and exchange leaves of the same source tensors."""

    def alike(step: LoadStep) -> Hashable:
        (first, *others) = step.loads
        return id(step) if first.exchange is None or others else (first.sources, step.piece)

    return (tuple(several) for _, several in itertools.groupby(steps, alike))


def _of_steps(plan: LoadPlan, steps: tuple[LoadStep, ...], devices: np.ndarray) -> Iterator[ReadBatch]:
    arrivals: list[list[InflightUnit]] = []
    for step in steps:
        for load in step.loads:
            boxes, which = distinct(load.device_boxes(plan.sharding.mesh, step.piece or (0, 0))[devices])
            arrivals.append(
                [InflightUnit(load=load, boxes=boxes, which=which, unit=unit) for unit in load.units(boxes)]
            )
    if steps[0].loads[0].exchange is not None or len({len(each) for each in arrivals}) > 1:
        yield ReadBatch(steps=steps, arrivals=list(itertools.chain(*arrivals)), completes=True)
        return
    # Leaves that share source tensors: the same blocks of each of them lie side by side.
    units = list(zip(*arrivals, strict=True))
    for unit in units:
        yield ReadBatch(steps=steps, arrivals=list(unit), completes=unit is units[-1])


def _joined(several: list[ReadBatch]) -> ReadBatch:
    arrivals = list(itertools.chain.from_iterable(each.arrivals for each in several))
    steps = tuple(itertools.chain.from_iterable(each.steps for each in several))
    return ReadBatch(steps=steps, arrivals=arrivals, completes=True)


def read_all(
    found: Iterable[ReadBatch],
    reader: HostReader,
    finish: Callable[[ReadBatch], object],
    *,
    budget: int,
    nbytes: int,
    ahead: int = 0,
) -> None:
    """Reads admissions, and finishes one after another, in order.

    Args:
        found: what to read.
        reader: who reads.
        finish: waits for an admission and gives its memory back.
        budget: host memory for what was begun and is not finished; the oldest admission may have more.
        nbytes: storage bytes of all of them.
        ahead: host memory of reads beside an oldest admission that is larger than the budget.
    """
    waiting: deque[ReadBatch] = deque()
    held, left = 0, nbytes
    for admission in found:
        is_begun = False
        for portion in reader.portions(admission.arrivals, left):
            while waiting and held + portion.filled_bytes > _room(waiting[0], budget, ahead):
                oldest = waiting.popleft()
                finish(oldest)
                held -= oldest.held_bytes
            if not is_begun:
                _begin(admission, reader)
                is_begun = True
            reader.submit(portion)
            admission.held_bytes += portion.filled_bytes
            held += portion.filled_bytes
        if not is_begun:
            _begin(admission, reader)
        waiting.append(admission)
        left -= sum(each.source_bytes for each in admission.arrivals)
    while waiting:
        finish(waiting.popleft())


def _room(oldest: ReadBatch, budget: int, ahead: int) -> int:
    return budget if oldest.held_bytes <= budget else oldest.held_bytes + ahead


def byte_ranges(plan: LoadPlan, source: TensorSource, host: int) -> Iterator[ByteRange]:
    """Every byte range that a host reads, lazily, in the order of reading.

    Args:
        plan: how everything is loaded.
        source: what it was made for.
        host: which of the plan's hosts.
    """
    together = remote_of(source) is not None
    for admission in admissions(plan, plan.devices_of(host), together=together):
        for portion in portions(admission.arrivals, source, read_bytes=CHUNK_BYTES, together=together):
            for each in portion.slices:
                yield from source.byte_ranges(each.name, to_slices(each.box))


def _begin(admission: ReadBatch, reader: HostReader) -> None:
    for arrival in admission.arrivals:
        reader.start(arrival)
