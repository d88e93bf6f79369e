"""The reads of a host for the blocks of its devices: plans of blocks that are read together, and their requests.

A `Block` is the box of a leaf that one device holds (several devices, where they hold the same). A `ReadPlan` is a set
of blocks of one leaf that are read together, because the cheap way to read one of them reads bytes of the others too
(columns of the same rows). It consists of `ReadRequest`s: boxes of source tensors, each with the blocks it is copied
to. Requests are made while they are carried out, or counted without being made.

Requests that are adjacent in a file are merged (`merged_requests`): a leaf may be a piece of a source tensor that holds
others too (queries, keys and values of head after head), and small tensors are neighbours. On another machine each
range costs a request, and each request a round trip.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce

import numpy as np

from haliax_ext.leaf_layout import (
    BlockCopy,
    Box,
    LeafLayout,
    Span,
    box_size,
    cut_digits,
    digit_boxes,
    spans_size,
    to_slices,
)
from haliax_ext.load_plan import CHUNK_BYTES, LeafLoad
from haliax_ext.sources import TensorSource

GAP_BYTES = 256 << 10
"""Gaps up to this size are read through: skipping one costs a request, or a seek, that takes just as long."""

Stack = tuple[int, ...]
"""Indices along the stacked axes of a leaf: which of its source tensors."""


@dataclass(eq=False, kw_only=True)
class Block:
    """The box of a leaf that devices of this host hold, and its memory while it is read.

    Attributes:
        box: which elements of the leaf; it may reach beyond what the source has.
        devices: positions, among this host's devices, of those that hold it.
        memory: where it is read to; None before its first read begins and after the devices have it.
    """

    box: Box
    devices: tuple[int, ...] = ()
    memory: np.ndarray | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class _SourceGroup:
    """Source tensors of a plan of which the same spans are read, for the same blocks.

    Attributes:
        stacks: their stacked indices.
        blocks: those that need them.
        spans: which spans of each source axis are read.
    """

    stacks: tuple[Stack, ...]
    blocks: tuple[Block, ...]
    spans: tuple[tuple[Span, ...], ...]

    @property
    def elements(self) -> int:
        """Source elements that are read for the group, gaps included."""
        return len(self.stacks) * spans_size(self.spans)


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadPlan:
    """Blocks of one leaf that are read together, and what is read for them.

    Attributes:
        load: the leaf, and where its source tensors are.
        blocks: the blocks.
        groups: spans of source tensors.
    """

    load: LeafLoad
    blocks: tuple[Block, ...]
    groups: tuple[_SourceGroup, ...]

    @property
    def elements(self) -> int:
        """Source elements read, gaps included."""
        return sum(group.elements for group in self.groups)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks."""
        return sum(box_size(block.box) for block in self.blocks) * self.load.leaf.dtype.itemsize

    @property
    def source_bytes(self) -> int:
        """Storage bytes that are read for them."""
        return round(self.elements * self.load.bytes_per_element)

    def requests(self, read_bytes: int = CHUNK_BYTES) -> Iterator["ReadRequest"]:
        """The requests, each of about `read_bytes` at most, in the order of the source tensors."""
        layout = self.load.layout
        # In elements of the source: `cut_digits` limits a box by these.
        chunk = max(read_bytes // self.load.source_dtype.itemsize, 1)
        for group in self.groups:
            per_axis: list[list[tuple[Box, ...]]] = []
            inner = spans_size(group.spans)
            for spans, sizes in zip(group.spans, layout.group_sizes, strict=True):
                # `inner` becomes the elements behind one index of this axis; an outer axis is cut to single indices
                # before an inner one is cut at all, so that a request stays a range of the file where it can.
                inner //= max(sum(stop - start for start, stop in spans), 1)
                limit = max(chunk // max(inner, 1), 1)
                pieces = itertools.chain.from_iterable(digit_boxes(a, b, sizes) for a, b in spans)
                per_axis.append([(cut,) for piece in pieces for cut in cut_digits(piece, limit)])
            for stack in group.stacks:
                for product in itertools.product(*per_axis):
                    digits = tuple(itertools.chain.from_iterable(product))
                    pairs = ((block, layout.copy(stack, digits, block.box)) for block in group.blocks)
                    copies = tuple((block, copy) for block, copy in pairs if copy is not None)
                    # A product of spans of several blocks may hold boxes that none of them needs.
                    if copies:
                        yield ReadRequest(plan=self, stack=stack, box=layout.source_box(digits), copies=copies)


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadRequest:
    """One box of one source tensor, and the blocks it is copied to.

    Attributes:
        plan: the plan it belongs to.
        stack: the source tensor's stacked indices.
        box: which part of the source tensor.
        copies: pairs (block, how the box is copied to it).
    """

    plan: ReadPlan
    stack: Stack
    box: Box
    copies: tuple[tuple[Block, BlockCopy], ...]

    @cached_property
    def number(self) -> int:
        """The position of the source tensor among those of the leaf."""
        layout = self.plan.load.layout
        sizes = [layout.extents[p] for p in layout.stack_positions]
        # Names are listed in row-major order of the stacked indices.
        return reduce(lambda number, pair: number * pair[1] + pair[0], zip(self.stack, sizes, strict=True), 0)

    @property
    def tensor(self) -> str:
        """The name of the source tensor."""
        return self.plan.load.sources[self.number]

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the source tensor."""
        load = self.plan.load
        # Layers of one array may be stored in several dtypes, as where some were trained and others were not.
        return load.source_dtypes[self.number] if load.source_dtypes else load.source_dtype

    @property
    def filled_bytes(self) -> int:
        """Bytes of blocks that it fills."""
        return sum(copy.size for _, copy in self.copies) * self.plan.load.leaf.dtype.itemsize


Slice = tuple[ReadRequest, ...]
"""Requests whose boxes are together one box of one source tensor: they differ along its last axis, and touch there."""


def slice_box(requests: Slice) -> Box:
    """The box of the source tensor that the requests of a slice make up."""
    first, last = requests[0].box, requests[-1].box
    return first if len(requests) == 1 else (*first[:-1], (first[-1][0], last[-1][1]))


def slice_bytes(requests: Slice) -> int:
    """Bytes of a slice in memory, in the dtype of the source."""
    return box_size(slice_box(requests)) * requests[0].dtype.itemsize


def filled_bytes(slices: Sequence[Slice]) -> int:
    """Bytes of blocks that slices fill."""
    return sum(request.filled_bytes for requests in slices for request in requests)


def plan_reads(load: LeafLoad, blocks: Sequence[Block], *, gap_bytes: int | None = None) -> tuple[ReadPlan, ...]:
    """Divides blocks of a leaf into plans so that together they read as little as possible, and each plan is small.

    Three divisions are tried, from the smallest plans up: every block alone, blocks of the same outermost source
    range together, all together. The first that reads no more than a hundredth above the best is taken.

    Args:
        load: how the leaf is loaded.
        blocks: its distinct blocks on a host; they may reach beyond what the source has.
        gap_bytes: gaps up to this size are read through; None for what the strategy of the leaf wants.
    """
    if gap_bytes is None:
        # Slabs are cut so that bytes are read once; reading through gaps would undo that.
        gap_bytes = GAP_BYTES if load.strategy == "direct" else 0
    layout = load.layout
    clusters: dict[Box, list[Block]] = {}
    for block in blocks:
        # A cluster: blocks that share the stacked indices and the spans of the outermost source axis.
        outer = tuple(block.box[p] for p in (*layout.stack_positions, *(layout.group_positions or ((),))[0]))
        clusters.setdefault(outer, []).append(block)
    # Also tried: every block alone, which needs the least memory, and all together, which reads shared bytes once.
    all_blocks = list(blocks)
    divisions: list[list[list[Block]]] = []
    # On small leaves the divisions coincide, and each is costed once.
    for division in ([[block] for block in all_blocks], list(clusters.values()), [all_blocks]):
        if division not in divisions:
            divisions.append(division)
    candidates: list[tuple[int, list[ReadPlan]]] = []
    for division in divisions:
        plans = [
            ReadPlan(
                load=load,
                blocks=tuple(group),
                groups=tuple(_source_groups(layout, group, load.source_dtype.itemsize, gap_bytes)),
            )
            for group in division
        ]
        candidates.append((sum(plan.elements for plan in plans), plans))
    best = min(elements for elements, _ in candidates)
    # Divisions are ordered from small plans to large, so the first that is good enough needs the least memory at once.
    return tuple(next(plans for elements, plans in candidates if elements <= best * 1.01))


def _source_groups(
    layout: LeafLayout, blocks: Sequence[Block], itemsize: int, gap_bytes: int
) -> Iterator[_SourceGroup]:
    """The source spans that reading `blocks` together takes; stacked indices with the same needs are one group."""
    pairs = ((block, layout.clipped(block.box)) for block in blocks)
    clipped = {block: box for block, box in pairs if box is not None}
    stacks: dict[tuple[Block, ...], list[Stack]] = {}
    ranges = {tuple(box[p] for p in layout.stack_positions) for box in clipped.values()}
    if len(ranges) == 1:
        # The usual case, without visiting every stacked index for every block.
        stacks[tuple(clipped)] = list(layout.stack_indices(next(iter(clipped.values()))))
    else:
        # Blocks differ in their stacked spans: for each source tensor, which blocks need it.
        needed: dict[Stack, list[Block]] = {}
        for block, box in clipped.items():
            for stack in layout.stack_indices(box):
                needed.setdefault(stack, []).append(block)
        for stack, users in sorted(needed.items(), key=lambda item: item[0]):
            stacks.setdefault(tuple(users), []).append(stack)
    for users, indices in stacks.items():
        spans = layout.cover([clipped[block] for block in users], itemsize=itemsize, gap_bytes=gap_bytes)
        yield _SourceGroup(stacks=tuple(indices), blocks=users, spans=tuple(tuple(axis) for axis in spans))


def merged_requests(
    plans: Sequence[ReadPlan], source: TensorSource, *, read_bytes: int, together: bool
) -> Iterator[tuple[Slice, ...]]:
    """The requests of plans that are read at one time, merged where they are adjacent in a file.

    Two rules merge them, and nothing is read that no leaf needs: boxes of one source tensor that differ along its last
    axis alone, and touch there, are one slice (columns of the same rows, of which every row would be a range for each);
    slices that are one range of a file each, and touch there, are read by one call, up to the bytes of a read.

    Args:
        plans: of different leaves, or of different blocks.
        source: what is read.
        read_bytes: of one read, about.
        together: whether requests are merged, in the order of the file; else each is a read of its own, in the order of
            the plans.

    Returns:
        For each read its slices, in the order of the file.
    """
    if not together:
        yield from (((request,),) for plan in plans for request in plan.requests(read_bytes))
        return
    # Of leaves that share a tensor each reads less at a time, so that all of them together read as much.
    sharing = max((sum(a.load.sources == b.load.sources for b in plans) for a in plans), default=1)
    requests = (request for plan in plans for request in plan.requests(max(read_bytes // sharing, 1)))
    yield from _adjacent_slices(_slices(requests), source, read_bytes)


def _slices(requests: Iterable[ReadRequest]) -> list[Slice]:
    """Requests of the same rows that touch in their columns, as one slice."""
    rows: dict[tuple[str, Box], list[ReadRequest]] = {}
    for request in requests:
        rows.setdefault((request.tensor, request.box[:-1]), []).append(request)
    slices: list[Slice] = []
    for (_, outer), columns in rows.items():
        if len(columns) == 1 or box_size(outer) == 1:
            # One row: its ranges are merged as ranges of the file, if at all.
            slices += [(request,) for request in columns]
            continue
        columns.sort(key=lambda request: request.box[-1])
        run = [columns[0]]
        for request in columns[1:]:
            # Columns that do not touch end the slice: none of these leaves needs what lies between.
            if request.box[-1][0] != run[-1].box[-1][1]:
                slices.append(tuple(run))
                run = []
            run.append(request)
        slices.append(tuple(run))
    return slices


def _adjacent_slices(slices: Iterable[Slice], source: TensorSource, read_bytes: int) -> Iterator[tuple[Slice, ...]]:
    """Slices in the order of the files, those that touch there together."""
    placed: list[tuple[str, int, int | None, Slice]] = []
    for requests in slices:
        ranges = source.byte_ranges(requests[0].tensor, to_slices(slice_box(requests)))
        if len(ranges):
            first = ranges[0]
            # A slice of several ranges ends a run: nothing can touch its end.
            placed.append((first.file, first.start, first.stop if len(ranges) == 1 else None, requests))
    placed.sort(key=lambda entry: entry[:2])
    run: list[Slice] = []
    end: tuple[str, int | None] = ("", None)
    run_bytes = 0
    for file, start, stop, requests in placed:
        nbytes = slice_bytes(requests)
        # A read ends where the file's next range does not touch it, where a slice has several ranges, or at its size.
        if run and (end != (file, start) or stop is None or run_bytes + nbytes > read_bytes):
            yield tuple(run)
            run, run_bytes = [], 0
        run.append(requests)
        run_bytes += nbytes
        end = (file, stop)
    if run:
        yield tuple(run)
