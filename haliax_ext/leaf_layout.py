"""Index algebra between a leaf and the source tensors it is made of, as arithmetic on spans.

A *span* is a half-open pair `(start, stop)`; a *box* is one span per axis. A leaf's block (what one device holds) is a
box over the leaf's named axes. A `LeafLayout` describes how those axes are laid out in the source tensors: some are
*stacked* (one source tensor for each index), the others are *flattened*, major first, into the axes of each source
tensor. From that follow, without touching data:

- the *runs*: which ranges of a flattened source axis a box covers;
- the *cover*: few large source boxes that hold everything some blocks need, reading through small gaps;
- the *copies*: how a source box, once read, lands in a block (a reshape, a pick, a transposition), and back.

An axis of the leaf may be a piece of a *wider digit*: in a tensor that holds queries, keys and values of head after
head, the keys' features are the second third of a digit three times as wide. Sizes and digit boxes are the source's.

A flat range of a source axis is cut into *digit boxes*, ranges that are boxes in the flattened axes too (as 37…412
is 37…39, 40…99, 100…399, 400…409, 410…412 in decimal digits); every read is a product of those, so that every copy
is one strided NumPy assignment.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

Span = tuple[int, int]
Box = tuple[Span, ...]


def to_slices(box: Box) -> tuple[slice, ...]:
    """A box as slices.

    >>> to_slices(((0, 2), (3, 5)))
    (slice(0, 2, None), slice(3, 5, None))
    """
    return tuple(slice(start, stop) for start, stop in box)


def box_shape(box: Box) -> tuple[int, ...]:
    """The lengths of a box's spans.

    >>> box_shape(((0, 2), (3, 5)))
    (2, 2)
    """
    return tuple(stop - start for start, stop in box)


def box_size(box: Box) -> int:
    """The number of elements in a box.

    >>> box_size(((0, 2), (3, 8)))
    10
    """
    return math.prod(box_shape(box))


def intersect(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes; `None` if it is empty.

    >>> intersect(((0, 4), (0, 8)), ((2, 6), (4, 6)))
    ((2, 4), (4, 6))
    >>> intersect(((0, 4),), ((4, 8),)) is None
    True
    """
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def distinct_boxes(boxes: np.ndarray) -> tuple[list[Box], np.ndarray]:
    """The distinct ones of `[n, axes, 2]` boxes, in order of first appearance, and the number of each row's."""
    numbers: dict[Box, int] = {}
    rows = [tuple((a, b) for a, b in box) for box in boxes.tolist()]
    box_numbers = np.asarray([numbers.setdefault(row, len(numbers)) for row in rows], dtype=np.int64)
    return list(numbers), box_numbers


def runs(box: Box, sizes: Sequence[int]) -> tuple[np.ndarray, int]:
    """The contiguous ranges that a box covers when its axes are flattened, major first.

    Args:
        box: one span for each flattened axis.
        sizes: the full sizes of those axes.

    Returns:
        The starts, ascending, and the common length of the ranges.

    >>> starts, length = runs(((1, 3), (0, 4)), (8, 16))
    >>> starts.tolist(), length
    ([16, 32], 4)
    """
    # Built from the innermost axis outward: flat starts, the length of each range, and whether all axes so far are
    # whole.
    starts, length, whole = np.zeros(1, dtype=np.int64), 1, True
    stride = 1
    for (start, stop), size in zip(reversed(box), reversed(sizes), strict=True):
        # As long as the axes inside are covered completely, this axis only makes the one range longer.
        if whole:
            starts, length = starts + start * stride, (stop - start) * length
            whole = stop - start == size
        # From the first partial axis outward, each index repeats the ranges at a distance of `stride`.
        else:
            starts = (np.arange(start, stop, dtype=np.int64)[:, None] * stride + starts[None, :]).reshape(-1)
        stride *= size
    return starts, length


def digit_boxes(start: int, stop: int, sizes: Sequence[int]) -> list[Box]:
    """Cuts a flat range into the fewest leading/trailing boxes of its digits, in order.

    Args:
        start: first flat index.
        stop: one past the last.
        sizes: sizes of the digits, major first; `0 <= start <= stop <= prod(sizes)`.

    >>> digit_boxes(37, 62, (10, 10))
    [((3, 4), (7, 10)), ((4, 6), (0, 10)), ((6, 7), (0, 2))]
    """
    if start >= stop:
        return []
    # No digits: a scalar, of which the empty box is the only element.
    if not sizes:
        return [()]
    if len(sizes) == 1:
        return [((start, stop),)]
    inner = math.prod(sizes[1:])
    # `first` and `last` are the leading digits of the two ends, `head` and `tail` what remains of them below.
    first, last = start // inner, stop // inner
    head, tail = start - first * inner, stop - last * inner
    if first == last:
        return [((first, first + 1), *rest) for rest in digit_boxes(head, tail, sizes[1:])]
    # The rest of a first block that is entered in the middle, the blocks that are covered whole, and the beginning of
    # the last one.
    boxes: list[Box] = []
    if head:
        boxes += [((first, first + 1), *rest) for rest in digit_boxes(head, inner, sizes[1:])]
        first += 1
    if first < last:
        boxes.append(((first, last), *((0, size) for size in sizes[1:])))
    if tail:
        boxes += [((last, last + 1), *rest) for rest in digit_boxes(0, tail, sizes[1:])]
    return boxes


def cut_digits(box: Box, limit: int) -> Iterator[Box]:
    """Cuts a digit box into digit boxes of at most `limit` elements, in order.

    >>> list(cut_digits(((0, 4), (0, 10)), 20))
    [((0, 2), (0, 10)), ((2, 4), (0, 10))]
    """
    if box_size(box) <= limit or not box:
        yield box
        return
    # The outermost axis with more than one index: cutting it keeps each piece a contiguous range.
    axis = next((i for i, (start, stop) in enumerate(box) if stop - start > 1), None)
    if axis is None:
        yield box
        return
    start, stop = box[axis]
    inner = box_size(box[axis + 1 :])
    # As many whole rows as fit the limit; a single row that is larger is cut further inside.
    step = max(limit // inner, 1)
    for at in range(start, stop, step):
        piece = (*box[:axis], (at, min(at + step, stop)), *box[axis + 1 :])
        yield from cut_digits(piece, limit) if inner > limit else (piece,)


def merge_spans(starts: np.ndarray, stops: np.ndarray, gap: int = 0) -> list[Span]:
    """The union of ranges as ascending spans; those at most `gap` apart become one.

    >>> merge_spans(np.array([20, 0, 8]), np.array([30, 8, 10]))
    [(0, 10), (20, 30)]
    >>> merge_spans(np.array([0, 12]), np.array([10, 20]), gap=2)
    [(0, 20)]
    """
    order = np.argsort(starts, kind="stable")
    # A range may contain later ones: running maxima of the ends keep it from ending too early.
    starts, stops = starts[order], np.maximum.accumulate(stops[order])
    breaks = np.flatnonzero(starts[1:] > stops[:-1] + gap)
    firsts = starts[np.concatenate([[0], breaks + 1])]
    lasts = stops[np.concatenate([breaks, [len(stops) - 1]])]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


@dataclass(frozen=True, kw_only=True)
class BlockCopy:
    """How the elements of one read land in one block.

    Attributes:
        digits: the shape that the read's buffer is viewed in.
        pick: the part of that view which the block needs.
        order: the transposition from that part to the block's axes (stacked axes left out).
        place: where it lands in the block; stacked axes by number.
    """

    digits: tuple[int, ...]
    pick: Box
    order: tuple[int, ...]
    place: tuple[int | slice, ...]

    @property
    def size(self) -> int:
        """The number of elements copied."""
        return box_size(self.pick)

    def _of_buffer(self, buffer: np.ndarray) -> np.ndarray:
        # The ellipsis makes indexing return a view also where there is no axis to index.
        return buffer.reshape(self.digits)[(*to_slices(self.pick), ...)].transpose(self.order)

    def scatter(self, buffer: np.ndarray, block: np.ndarray) -> None:
        """Copies from a source buffer into the block, casting."""
        np.copyto(block[(*self.place, ...)], self._of_buffer(buffer), casting="unsafe")

    def gather(self, block: np.ndarray, buffer: np.ndarray) -> None:
        """Copies from the block into a source buffer: the inverse of `scatter`."""
        np.copyto(self._of_buffer(buffer), block[(*self.place, ...)], casting="unsafe")

    def in_place(self, block: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
        """The memory of `block` as the read's buffer itself, where both have the same order; else `None`."""
        # A read that is larger than what the block takes of it has elements that the block has no memory for.
        if box_shape(self.pick) != self.digits:
            return None
        # argsort of a permutation is its inverse: the block's axes in the order of the file.
        view = block[(*self.place, ...)].transpose(np.argsort(self.order))
        return view.reshape(shape) if view.flags.c_contiguous else None


@dataclass(frozen=True, kw_only=True)
class LeafLayout:
    """The layout of a leaf's axes in its source tensors.

    Attributes:
        axes: the leaf's axes, (name, size).
        stacked: axes along which each index is a source tensor of its own.
        groups: for each source axis, the leaf's axes flattened into it, major first.
        source_shape: the shape of every source tensor.
        offsets: where in each source axis this leaf's part begins.
        extents: sizes of the leaf's axes as far as the source has them (an axis may be padded beyond).
        wider: axes that are a piece of a wider digit → the piece's first element there, and the digit's size.
    """

    axes: tuple[tuple[str, int], ...]
    stacked: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    source_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    extents: tuple[int, ...]
    wider: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]], hash=False)

    @cached_property
    def _firsts(self) -> tuple[int, ...]:
        """For each axis of the leaf, where in its digit it begins."""
        return tuple(self.wider[name][0] if name in self.wider else 0 for name, _ in self.axes)

    @cached_property
    def _position(self) -> Mapping[str, int]:
        return {name: i for i, (name, _) in enumerate(self.axes)}

    @cached_property
    def stack_positions(self) -> tuple[int, ...]:
        """Positions of the stacked axes in the leaf."""
        return tuple(self._position[name] for name in self.stacked)

    @cached_property
    def group_positions(self) -> tuple[tuple[int, ...], ...]:
        """Positions in the leaf of the axes flattened into each source axis."""
        return tuple(tuple(self._position[name] for name in group) for group in self.groups)

    @cached_property
    def group_sizes(self) -> tuple[tuple[int, ...], ...]:
        """Sizes of the digits of each source axis."""
        # A piece of a wider digit counts with the size of the whole digit: strides are the source's.
        named = zip((name for name, _ in self.axes), self.extents, strict=True)
        wide = [self.wider[name][1] if name in self.wider else size for name, size in named]
        return tuple(tuple(wide[p] for p in positions) for positions in self.group_positions)

    @cached_property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of this leaf's part of each source tensor, whole where it has wider digits."""
        return tuple(math.prod(sizes) for sizes in self.group_sizes)

    @property
    def tensors(self) -> int:
        """How many source tensors the leaf is made of."""
        return math.prod(self.extents[p] for p in self.stack_positions)

    @property
    def whole(self) -> Box:
        """The box of the whole leaf, as far as the source has it."""
        return tuple((0, extent) for extent in self.extents)

    def clipped(self, box: Box) -> Box | None:
        """The part of a block that the source has."""
        return intersect(box, self.whole)

    def stack_indices(self, box: Box) -> Iterator[tuple[int, ...]]:
        """The indices along the stacked axes, one source tensor each, of a (clipped) box, in order."""
        return itertools.product(*(range(*box[p]) for p in self.stack_positions))

    def digit_spans(self, box: Box) -> tuple[Box, ...]:
        """A box's spans, gathered by source axis, in its digits."""
        # A piece of a wider digit begins behind the other pieces of that digit.
        spans = [(start + first, stop + first) for (start, stop), first in zip(box, self._firsts, strict=True)]
        return tuple(tuple(spans[p] for p in positions) for positions in self.group_positions)

    def source_boxes(self, box: Box) -> Iterator[Box]:
        """The exact boxes of each source tensor that a (clipped) box of the leaf needs, in order."""
        spans: list[list[Span]] = []
        # Runs along one source axis are independent of those along another: the boxes are their product.
        for group, sizes, offset in zip(self.digit_spans(box), self.group_sizes, self.offsets, strict=True):
            starts, length = runs(group, sizes)
            spans.append([(s + offset, s + offset + length) for s in starts.tolist()])
        return itertools.product(*spans)

    def source_box(self, digits: Sequence[Box]) -> Box:
        """The box of the source tensor that a product of digit boxes stands for."""
        spans: list[Span] = []
        for box, sizes, offset in zip(digits, self.group_sizes, self.offsets, strict=True):
            starts, length = runs(box, sizes)
            assert len(starts) == 1, f"not a contiguous range of the source axis: {box} of {sizes}"
            spans.append((int(starts[0]) + offset, int(starts[0]) + offset + length))
        return tuple(spans)

    def copy(self, stack: tuple[int, ...], digits: Sequence[Box], box: Box) -> BlockCopy | None:
        """How a read (a source tensor and a product of digit boxes) lands in a block; `None` if it does not."""
        place: list[int | slice] = [0] * len(self.axes)
        # The read is of one source tensor; a block without that stacked index needs nothing of it.
        for position, index in zip(self.stack_positions, stack, strict=True):
            if not box[position][0] <= index < box[position][1]:
                return None
            place[position] = index - box[position][0]
        flat: list[int] = []
        pick: list[Span] = []
        leaf_axes: list[int] = []
        for positions, group in zip(self.group_positions, digits, strict=True):
            # Positions within the read for `pick`, and within the block for `place`; both spans are in digits of the
            # source.
            for position, (start, stop) in zip(positions, group, strict=True):
                begin, end = (at + self._firsts[position] for at in box[position])
                low, high = max(start, begin), min(stop, end)
                if low >= high:
                    return None
                flat.append(stop - start)
                pick.append((low - start, high - start))
                leaf_axes.append(position)
                place[position] = slice(low - begin, high - begin)
        # Digits come in the order of the source; sorting them by the leaf's axis gives the transposition.
        order = tuple(sorted(range(len(leaf_axes)), key=leaf_axes.__getitem__))
        return BlockCopy(digits=tuple(flat), pick=tuple(pick), order=order, place=tuple(place))

    def cover(self, boxes: Sequence[Box], *, itemsize: int, gap_bytes: int) -> tuple[list[Span], ...]:
        """Spans of each source axis whose product holds what (clipped) boxes need of one source tensor.

        Gaps of up to `gap_bytes` in the row-major file order are read through, where what lies inside them is whole.
        Gaps between pieces of wider digits are not: other leaves own those elements and read them.

        Args:
            boxes: at least one; their stacked axes are ignored.
            itemsize: bytes of a source element.
            gap_bytes: the largest gap that is cheaper to read than to skip.
        """
        spans: list[list[Span]] = []
        for group_index, sizes in enumerate(self.group_sizes):
            pieces = [runs(self.digit_spans(box)[group_index], sizes) for box in boxes]
            starts = np.concatenate([s for s, _ in pieces])
            stops = np.concatenate([s + length for s, length in pieces])
            spans.append(merge_spans(starts, stops))
        # `step` is the number of file bytes from one index of this axis to the next. A gap along an axis is contiguous
        # in the file only if every axis inside it is read whole.
        step, inside_whole = itemsize, True
        for axis in reversed(range(len(spans))):
            size = self.part_shape[axis]
            if inside_whole:
                array = np.asarray(spans[axis], dtype=np.int64)
                pieces = any(name in self.wider for name in self.groups[axis])
                gap = 0 if pieces else gap_bytes
                merged = merge_spans(array[:, 0], array[:, 1], gap // step)
                # Between the last span of one row and the first of the next lies `around`; with several rows outside,
                # reading entire rows joins them to one range.
                around = merged[0][0] + size - merged[-1][1]
                several_outside = any(sum(b - a for a, b in outer) > 1 for outer in spans[:axis])
                if len(merged) == 1 and several_outside and around * step <= gap:
                    merged = [(0, size)]
                spans[axis] = merged
                inside_whole = merged == [(0, size)]
            step *= size
        return tuple(spans)


def spans_size(spans: Sequence[Sequence[Span]]) -> int:
    """The number of elements in a product of unions of spans."""
    return math.prod(sum(stop - start for start, stop in axis) for axis in spans)
