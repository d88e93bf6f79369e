"""Which reads of leaves are made by one request: what lies side by side in a file is read together.

A leaf may be a piece of a source tensor that holds others too (queries, keys and values of head after head), and small
tensors lie next to each other. On another machine each range costs a request, and each request a wait. So the reads of
leaves that are read at one time are put together:

- boxes of one source tensor that differ along its last axis alone, and touch there, are one *slice* (columns of the
  same rows, of which every row would be a range for each);
- slices that are one range of a file each, and touch there, are one *portion*, up to the bytes of a read.

Nothing is read that no leaf wants.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from haliax_ext.leaf_layout import Box, box_size, to_slices
from haliax_ext.load_plan import LeafLoad
from haliax_ext.read_plan import BoxRead, ReadUnit, flat_stack, reads
from haliax_ext.sources import TensorSource


@dataclass(eq=False, kw_only=True)
class InflightUnit:
    """A unit of blocks on its way.

    Attributes:
        load: the leaf.
        boxes: the distinct blocks of this host.
        which: for each of this host's devices, the number of its block.
        unit: which blocks are read here, and how.
        blocks: their memory, by number, once the reading has begun.
        futures: the reads under way.
    """

    load: LeafLoad
    boxes: list[Box]
    which: np.ndarray
    unit: ReadUnit
    blocks: dict[int, np.ndarray] = field(default_factory=dict[int, np.ndarray])
    futures: list[Future[None]] = field(default_factory=list[Future[None]])

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks."""
        return sum(box_size(self.boxes[n]) for n in self.unit.members) * self.load.leaf.dtype.itemsize

    @property
    def source_bytes(self) -> int:
        """Storage bytes that are read for them."""
        return round(self.unit.elements * self.load.bytes_per_element)


@dataclass(frozen=True, kw_only=True)
class LeafRead:
    """What an arrival reads of a source tensor at a time."""

    arrival: InflightUnit
    read: BoxRead

    @property
    def filled_bytes(self) -> int:
        """Bytes of blocks that it fills."""
        return sum(copy.size for _, copy in self.read.copies) * self.arrival.load.leaf.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class TensorSlice:
    """A box of a source tensor, and whose it is.

    Attributes:
        name: of the tensor.
        box: which part of it.
        dtype: of its elements.
        shares: of leaves; their boxes make it up.
    """

    name: str
    box: Box
    dtype: np.dtype
    shares: tuple[LeafRead, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the box in memory."""
        return box_size(self.box) * self.dtype.itemsize

    def part(self, share: LeafRead, values: np.ndarray) -> np.ndarray:
        """A share's part of the slice's elements, contiguous."""
        if len(self.shares) == 1:
            return values
        pairs = zip(share.read.box, self.box, strict=True)
        return np.ascontiguousarray(values[tuple(slice(a - at, b - at) for (a, b), (at, _) in pairs)])


@dataclass(frozen=True, kw_only=True)
class ReadRequest:
    """Slices that are read by one request.

    Attributes:
        slices: one, or several that follow one another in a file.
    """

    slices: tuple[TensorSlice, ...]

    @property
    def shares(self) -> Iterator[LeafRead]:
        """What of it is whose."""
        return (share for each in self.slices for share in each.shares)

    @cached_property
    def filled_bytes(self) -> int:
        """Bytes of blocks that it fills."""
        return sum(share.filled_bytes for share in self.shares)


def portions(
    arrivals: Sequence[InflightUnit], source: TensorSource, *, read_bytes: int, together: bool
) -> Iterator[ReadRequest]:
    """The reads of arrivals that are read at one time.

    Args:
        arrivals: of different leaves, or of different blocks.
        source: what is read.
        read_bytes: of one read, about.
        together: whether reads that touch in a file are put together, in the order of the file; else each stands for
            itself, in the order of the arrivals.
    """
    if not together:
        yield from (ReadRequest(slices=(each,)) for each in _single(arrivals, read_bytes))
        return
    # Of leaves that share a tensor each reads less at a time, so that all of them together read as much.
    sharing = max((sum(each.load.sources == other.load.sources for other in arrivals) for each in arrivals), default=1)
    slices = _side_by_side(_single(arrivals, max(read_bytes // sharing, 1)))
    yield from _touching(slices, source, read_bytes)


def _single(arrivals: Iterable[InflightUnit], read_bytes: int) -> Iterator[TensorSlice]:
    for arrival in arrivals:
        load = arrival.load
        for read in reads(load.layout, arrival.boxes, arrival.unit, chunk=load.chunk(read_bytes)):
            name = load.sources[flat_stack(load.layout, read.stack)]
            yield TensorSlice(
                name=name, box=read.box, dtype=load.source_dtype, shares=(LeafRead(arrival=arrival, read=read),)
            )


def _side_by_side(slices: Iterable[TensorSlice]) -> list[TensorSlice]:
    """Slices of the same rows that touch in their columns, as one."""
    rows: dict[tuple[str, Box], list[TensorSlice]] = {}
    for each in slices:
        rows.setdefault((each.name, each.box[:-1]), []).append(each)
    found: list[TensorSlice] = []
    for (name, outer), several in rows.items():
        if len(several) == 1 or box_size(outer) == 1:
            found += several
            continue
        several.sort(key=lambda each: each.box[-1])
        run = [several[0]]
        for each in (*several[1:], None):
            if each is not None and each.box[-1][0] == run[-1].box[-1][1]:
                run.append(each)
                continue
            box = (*outer, (run[0].box[-1][0], run[-1].box[-1][1]))
            shares = tuple(share for one in run for share in one.shares)
            found.append(TensorSlice(name=name, box=box, dtype=run[0].dtype, shares=shares))
            run = [] if each is None else [each]
    return found


def _touching(slices: Iterable[TensorSlice], source: TensorSource, read_bytes: int) -> Iterator[ReadRequest]:
    """Slices in the order of the files, those that touch there together."""
    placed: list[tuple[str, int, int | None, TensorSlice]] = []
    for each in slices:
        ranges = source.byte_ranges(each.name, to_slices(each.box))
        if len(ranges):
            first = ranges[0]
            placed.append((first.file, first.start, first.stop if len(ranges) == 1 else None, each))
    placed.sort(key=lambda one: one[:2])
    run: list[TensorSlice] = []
    end: tuple[str, int | None] = ("", None)
    held = 0
    for file, start, stop, each in placed:
        if run and (end != (file, start) or stop is None or held + each.nbytes > read_bytes):
            yield ReadRequest(slices=tuple(run))
            run, held = [], 0
        run.append(each)
        held += each.nbytes
        end = (file, stop)
    if run:
        yield ReadRequest(slices=tuple(run))
