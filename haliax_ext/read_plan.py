"""Which boxes of which source tensors a host reads for the blocks of its devices, and where they land.

A *unit* is a set of blocks that are read together, because the cheap way to read one of them reads bytes of the
others too (columns of the same rows). Everything here is lazy: a unit's reads are made while they are carried out, or
counted without being made.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jax.sharding import PartitionSpec

from haliax_ext.leaf_layout import BlockCopy, Box, LeafLayout, Span, cut_digits, digit_boxes, spans_size
from haliax_ext.meshspec import MeshSpec
from haliax_ext.placement import flat

GAP_BYTES = 256 << 10
"""Gaps up to this size are read through: skipping one costs a request, or a seek, that takes just as long."""

Stack = tuple[int, ...]


def shard_boxes(shape: Sequence[int], spec: PartitionSpec, mesh: MeshSpec) -> np.ndarray:
    """Which box of an array each device of a mesh holds.

    Args:
        shape: the array's shape; mesh axes divide it.
        spec: its sharding.
        mesh: mesh axis names and sizes.

    Returns:
        Integers `[devices, axes, 2]`: start and stop, devices in the mesh's row-major order.
    """
    place = dict(zip(mesh.names, np.indices([size for _, size in mesh.axes]), strict=True))
    boxes = np.zeros((mesh.size, len(shape), 2), dtype=np.int64)
    entries = (*spec, *(None,) * (len(shape) - len(spec)))
    for axis, (size, entry) in enumerate(zip(shape, entries, strict=True)):
        number = np.zeros(mesh.size, dtype=np.int64)
        for name in flat(entry):
            number = number * mesh.shape[name] + place[name].reshape(-1)
        length, rest = divmod(size, mesh.ways(flat(entry)))
        assert rest == 0, f"{size} over {flat(entry)} of {mesh}"
        boxes[:, axis, 0] = number * length
        boxes[:, axis, 1] = (number + 1) * length
    return boxes


def distinct(boxes: np.ndarray) -> tuple[list[Box], np.ndarray]:
    """The distinct ones of `[n, axes, 2]` boxes, in order of first appearance, and the number of each row's."""
    numbers: dict[Box, int] = {}
    rows = [tuple((a, b) for a, b in box) for box in boxes.tolist()]
    which = np.asarray([numbers.setdefault(row, len(numbers)) for row in rows], dtype=np.int64)
    return list(numbers), which


@dataclass(frozen=True, kw_only=True)
class ReadGroup:
    """Source tensors of a unit that are read alike.

    Attributes:
        stacks: their stacked indices.
        members: numbers of the blocks that need them.
        spans: which spans of each source axis are read.
    """

    stacks: tuple[Stack, ...]
    members: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]

    @property
    def elements(self) -> int:
        """Source elements that are read for the group, gaps included."""
        return len(self.stacks) * spans_size(self.spans)


@dataclass(frozen=True, kw_only=True)
class ReadUnit:
    """Blocks that are read together.

    Attributes:
        members: numbers of the blocks in the list the unit was made from.
        groups: what is read for them.
    """

    members: tuple[int, ...]
    groups: tuple[ReadGroup, ...]

    @property
    def elements(self) -> int:
        """Source elements read, gaps included."""
        return sum(group.elements for group in self.groups)


@dataclass(frozen=True, kw_only=True)
class BoxRead:
    """One box of one source tensor, and the blocks it lands in.

    Attributes:
        stack: the source tensor's stacked indices.
        box: which part of the source tensor.
        copies: pairs (number of the block, how the box lands in it).
    """

    stack: Stack
    box: Box
    copies: tuple[tuple[int, BlockCopy], ...]


def _groups(
    layout: LeafLayout, boxes: Sequence[Box], members: Sequence[int], itemsize: int, gap: int
) -> list[ReadGroup]:
    """What reading `members` together takes, stacked indices with the same needs as one group."""
    found: dict[tuple[int, ...], list[Stack]] = {}
    clipped = {member: layout.clipped(boxes[member]) for member in members}
    held = {member: box for member, box in clipped.items() if box is not None}
    ranges = {tuple(box[p] for p in layout.stack_positions) for box in held.values()}
    if len(ranges) == 1:
        found[tuple(held)] = list(layout.stack_indices(next(iter(held.values()))))
    else:
        needed: dict[Stack, list[int]] = {}
        for member, box in held.items():
            for stack in layout.stack_indices(box):
                needed.setdefault(stack, []).append(member)
        for stack, who in sorted(needed.items()):
            found.setdefault(tuple(who), []).append(stack)
    groups: list[ReadGroup] = []
    for who, stacks in found.items():
        spans = layout.cover([held[member] for member in who], itemsize=itemsize, gap_bytes=gap)
        groups.append(ReadGroup(stacks=tuple(stacks), members=who, spans=tuple(tuple(axis) for axis in spans)))
    return groups


def units(
    layout: LeafLayout, boxes: Sequence[Box], *, itemsize: int, gap_bytes: int = GAP_BYTES
) -> tuple[ReadUnit, ...]:
    """Divides blocks into units so that together they read as little as possible, and each unit is small.

    Three divisions are tried, from the smallest units up: every block alone, blocks of the same outermost source
    range together, all together. The first that reads no more than a hundredth above the best is taken.

    Args:
        layout: how the leaf lies in its source tensors.
        boxes: the distinct blocks; they may reach beyond what the source has.
        itemsize: bytes of a source element.
        gap_bytes: gaps up to this size are read through.
    """
    clusters: dict[Box, list[int]] = {}
    for number, box in enumerate(boxes):
        outer = tuple(box[p] for p in (*layout.stack_positions, *(layout.group_positions or ((),))[0]))
        clusters.setdefault(outer, []).append(number)
    everything = list(range(len(boxes)))
    divisions: list[list[list[int]]] = []
    for division in ([[n] for n in everything], list(clusters.values()), [everything]):
        if division not in divisions:
            divisions.append(division)
    tried: list[tuple[int, list[ReadUnit]]] = []
    for division in divisions:
        made = [
            ReadUnit(members=tuple(members), groups=tuple(_groups(layout, boxes, members, itemsize, gap_bytes)))
            for members in division
        ]
        tried.append((sum(unit.elements for unit in made), made))
    best = min(elements for elements, _ in tried)
    return tuple(next(made for elements, made in tried if elements <= best * 1.01))


def reads(layout: LeafLayout, boxes: Sequence[Box], unit: ReadUnit, *, chunk: int) -> Iterator[BoxRead]:
    """A unit's reads, each of at most about `chunk` elements, in the order of the source tensors.

    Args:
        layout: how the leaf lies in its source tensors.
        boxes: the blocks that `unit` numbers.
        unit: what to read.
        chunk: elements of one read.
    """
    for group in unit.groups:
        per_axis: list[list[tuple[Box, ...]]] = []
        inner = spans_size(group.spans)
        for spans, sizes in zip(group.spans, layout.group_sizes, strict=True):
            inner //= max(sum(stop - start for start, stop in spans), 1)
            limit = max(chunk // max(inner, 1), 1)
            pieces = itertools.chain.from_iterable(digit_boxes(a, b, sizes) for a, b in spans)
            per_axis.append([(cut,) for piece in pieces for cut in cut_digits(piece, limit)])
        for stack in group.stacks:
            for product in itertools.product(*per_axis):
                digits = tuple(itertools.chain.from_iterable(product))
                copies = ((n, layout.copy(stack, digits, boxes[n])) for n in group.members)
                landing = tuple((n, copy) for n, copy in copies if copy is not None)
                if landing:
                    yield BoxRead(stack=stack, box=layout.source_box(digits), copies=landing)


def flat_stack(layout: LeafLayout, stack: Stack) -> int:
    """The row-major number of a source tensor among a leaf's."""
    sizes = [layout.extents[p] for p in layout.stack_positions]
    return functools.reduce(lambda number, pair: number * pair[1] + pair[0], zip(stack, sizes, strict=True), 0)
