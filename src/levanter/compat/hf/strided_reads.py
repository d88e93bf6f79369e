"""Reads a region of a row-major array in a file into an array in memory.

If the array in memory is contiguous and the file's blocks hold nothing else, bytes are read directly into it. Otherwise
they pass through a scratch buffer of bounded size.

Selecting `[:, 512:1024]` of a `[rows, 2048]` bf16 tensor touches one *run* of 1 KiB in every row: an arithmetic
progression of runs, not a list. `block_grid` computes the longest runs (complete inner axes merge into the next outer
axis), then extends a run over the *gaps* to its neighbours where skipping them would cost more than reading them. A
reader reads exactly the bytes of the grid, so plans made from it are exact.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from haliax_ext.sources import ByteRange, Index
from levanter.compat.hf.readers import ByteReader


@dataclass(frozen=True, kw_only=True)
class BlockGrid:
    """Blocks of bytes of equal length at regular offsets, each holding a strided piece of the selection.

    Attributes:
        base: offset of the first block, in bytes from the start of the tensor.
        counts: number of blocks along each outer axis, major first (empty: one block).
        strides: bytes from one block to the next along each outer axis.
        span: bytes of a block, gaps inside it included.
        inner_counts: shape, in elements, of the piece of the selection that lies in a block.
        inner_strides: bytes from one element of the piece to the next along each of its axes.
    """

    base: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]
    span: int
    inner_counts: tuple[int, ...]
    inner_strides: tuple[int, ...]

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return math.prod(self.counts)

    @property
    def nbytes(self) -> int:
        """Bytes read from storage, gaps included."""
        return self.blocks * self.span

    @property
    def contiguous(self) -> bool:
        """Whether blocks hold nothing but selected bytes."""
        # One inner axis means that a block is a single run of selected elements, without gaps.
        return len(self.inner_counts) == 1

    def offsets(self) -> np.ndarray:
        """The start of every block, ascending, in bytes from the start of the tensor."""
        # Outer product of the axes, major axis first, so that the offsets ascend.
        starts = np.asarray([self.base], dtype=np.int64)
        for count, stride in zip(self.counts, self.strides, strict=True):
            starts = (starts[:, None] + np.arange(count, dtype=np.int64) * stride).reshape(-1)
        return starts


def _canonical(shape: Sequence[int], index: Index) -> list[tuple[int, int, int]]:
    """Axes as (size, start, stop), merged where a selection is one range of the merged axis."""
    # From the innermost axis outwards. `merged[-1]` is the axis built so far: its size and the selected range in it.
    merged: list[tuple[int, int, int]] = []
    for size, piece in zip(reversed(shape), reversed(index), strict=True):
        start, stop = piece.start, piece.stop
        if merged:
            inner_size, inner_start, inner_stop = merged[-1]
            # The inner axis is selected completely: (this axis, inner axis) is one axis on which the selection is one
            # range.
            if inner_start == 0 and inner_stop == inner_size:
                merged[-1] = (size * inner_size, start * inner_size, stop * inner_size)
                continue
            # One index of this axis: the inner range, shifted by that many inner axes, is one range of the merged axis.
            if stop - start == 1:
                offset = start * inner_size
                merged[-1] = (size * inner_size, offset + inner_start, offset + inner_stop)
                continue
        merged.append((size, start, stop))
    return list(reversed(merged)) or [(1, 0, 1)]


def block_grid(shape: Sequence[int], itemsize: int, index: Index, *, max_gap: int, page: int = 1) -> BlockGrid | None:
    """The blocks that reading `index` of a row-major tensor touches; `None` for an empty selection.

    Args:
        shape: the tensor's shape.
        itemsize: bytes of one element.
        index: normalized slices, one per axis.
        max_gap: gaps of up to this many bytes are read rather than skipped.
        page: gaps between runs that begin less than this many bytes apart are read too: storage moves whole pages.
    """
    axes = _canonical(shape, index)
    # A zero-size slice reads nothing; below, empty axes would give negative spans.
    if any(stop <= start for _, start, stop in axes):
        return None
    strides = [itemsize] * len(axes)
    # Row-major strides of the merged axes, in bytes.
    for i in range(len(axes) - 2, -1, -1):
        strides[i] = strides[i + 1] * axes[i + 1][0]
    counts = [stop - start for _, start, stop in axes]
    # The first selected element of every axis gives the offset of the first block.
    base = sum(start * stride for (_, start, _), stride in zip(axes, strides, strict=True))

    # A block starts as the selected run of the innermost axis. It takes in the next outer axis while the gap between
    # neighbouring runs is cheaper to read than to skip. `span` then covers all runs of that axis with their gaps.
    first_inner = len(axes) - 1
    span = counts[-1] * itemsize
    while first_inner > 0:
        stride = strides[first_inner - 1]
        # stride − span is the gap to the next run. Within a page the storage transfers the gap anyway.
        if stride - span > max_gap and stride >= page:
            break
        first_inner -= 1
        # The new span reaches from the first run to the end of the last one: (count − 1) strides and one run.
        span += (counts[first_inner] - 1) * stride
    return BlockGrid(
        base=base,
        counts=tuple(counts[:first_inner]),
        strides=tuple(strides[:first_inner]),
        span=span,
        inner_counts=tuple(counts[first_inner:]),
        inner_strides=tuple(strides[first_inner:]),
    )


@dataclass(frozen=True)
class GridRanges(Sequence[ByteRange]):
    """The byte ranges of a `BlockGrid` in a file, computed one at a time; `nbytes` takes constant time."""

    file: str
    start: int
    grid: BlockGrid | None

    @property
    def nbytes(self) -> int:
        """Bytes of all ranges together."""
        return 0 if self.grid is None else self.grid.nbytes

    def __len__(self) -> int:
        return 0 if self.grid is None else self.grid.blocks

    def __getitem__(self, i):
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        assert self.grid is not None
        offset = self.start + self.grid.base
        # `i` in the mixed radix of `counts`, minor axis first.
        # `% len` maps negative indices, too.
        remaining = i % len(self)
        for count, stride in zip(reversed(self.grid.counts), reversed(self.grid.strides), strict=True):
            remaining, position = divmod(remaining, count)
            offset += position * stride
        return ByteRange(self.file, offset, offset + self.grid.span)

    def __iter__(self) -> Iterator[ByteRange]:
        if self.grid is None:
            return
        for offset in self.grid.offsets().tolist():
            begin = self.start + offset
            yield ByteRange(self.file, begin, begin + self.grid.span)


COPY_BUFFER_BYTES = 8 << 20
"""Scratch memory of one read that cannot write in place."""


def read_region(reader: ByteReader, start: int, shape: Sequence[int], index: Index, out: np.ndarray) -> int:
    """Fills `out` with the slice `index` of the array of `out.dtype` that begins at byte `start` of a file.

    Args:
        reader: the file.
        start: byte offset of the array in the file.
        shape: the whole array's shape.
        index: normalized slices, one per axis, of the shape of `out`.
        out: filled; contiguous memory is fastest.

    Returns:
        Bytes read from storage: exactly those of `block_grid`.
    """
    grid = block_grid(shape, out.itemsize, index, max_gap=reader.max_gap, page=reader.page)
    if grid is None:
        return 0
    # Two cases need a copy: memory with gaps (a strided view as `out`) and blocks with gaps in the file.
    if not out.flags.c_contiguous:
        return _through_rows(reader, start, shape, index, out)
    if not grid.contiguous:
        _through_gaps(reader, start, grid, out)
        return grid.nbytes
    # The blocks, end to end, are exactly the bytes of `out`.
    target = out.reshape(-1).view(np.uint8).data
    if grid.blocks == 1:
        reader.read_into(start + grid.base, target)
    else:
        reader.read_blocks((grid.offsets() + start).tolist(), grid.span, target)
    return grid.nbytes


def _through_rows(reader: ByteReader, start: int, shape: Sequence[int], index: Index, out: np.ndarray) -> int:
    """Reads into a non-contiguous array, some rows at a time."""
    row_bytes = math.prod(out.shape[1:]) * out.itemsize
    # Each piece is contiguous, so the recursion takes the fast path; at most COPY_BUFFER_BYTES are held at a time.
    rows = max(1, COPY_BUFFER_BYTES // max(row_bytes, 1))
    first, bytes_read = index[0], 0
    for at in range(0, out.shape[0], rows):
        stop = min(out.shape[0], at + rows)
        piece = np.empty((stop - at, *out.shape[1:]), out.dtype)
        bytes_read += read_region(
            reader, start, shape, (slice(first.start + at, first.start + stop), *index[1:]), piece
        )
        out[at:stop] = piece
    return bytes_read


def _through_gaps(reader: ByteReader, start: int, grid: BlockGrid, out: np.ndarray) -> None:
    """Reads blocks that contain gaps, at most about a buffer at a time, and copies the selected elements."""
    # out is contiguous and its axes are those of the selection, so it splits into (blocks, piece of a block).
    target = out.reshape(grid.blocks, *grid.inner_counts)
    row_stride, rows = grid.inner_strides[0], grid.inner_counts[0]
    # Bytes from the first to the last selected byte of one row: the last row of a block ends there, without a gap.
    row_span = grid.span - (rows - 1) * row_stride
    # A view with the strides of the file on the buffer drops the gaps without a copy loop in Python.
    rows_at_once = max(1, min(rows, COPY_BUFFER_BYTES // row_stride))
    buffer = bytearray((rows_at_once - 1) * row_stride + max(row_span, row_stride if rows_at_once < rows else 0))
    view = memoryview(buffer)
    for block, offset in enumerate(grid.offsets().tolist()):
        for at in range(0, rows, rows_at_once):
            row_count = min(rows_at_once, rows - at)
            # The gap before the next piece is read with this one, so that `byte_ranges` tells what is read.
            length = row_count * row_stride if at + row_count < rows else (row_count - 1) * row_stride + row_span
            reader.read_into(start + offset + at * row_stride, view[:length])
            shape = (row_count, *grid.inner_counts[1:])
            # The view has the file's strides, so assigning it copies the selected elements and skips the gaps.
            target[block, at : at + row_count] = np.ndarray(shape, out.dtype, buffer, 0, grid.inner_strides)
