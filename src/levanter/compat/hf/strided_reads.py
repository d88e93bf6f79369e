"""A region of a row-major array in a file, read into an array in memory.

Where the array in memory is contiguous and the file's blocks hold nothing else, bytes go straight into it. Otherwise
they pass through a scratch buffer of bounded size.
"""

import math
from collections.abc import Sequence

import numpy as np

from haliax_ext.sources import Index
from levanter.compat.hf.block_grid import BlockGrid, block_grid
from levanter.compat.hf.readers import ByteReader

COPY_BUFFER_BYTES = 8 << 20
"""Scratch memory of one read that cannot write in place."""


def read_region(reader: ByteReader, start: int, shape: Sequence[int], index: Index, out: np.ndarray) -> int:
    """Fills `out` with the slice `index` of the array of `out.dtype` that begins at byte `start` of a file.

    Args:
        reader: the file.
        start: where the array begins.
        shape: the whole array's shape.
        index: normalized slices, one per axis, of the shape of `out`.
        out: filled; contiguous memory is fastest.

    Returns:
        Bytes taken from storage: exactly those of `block_grid`.
    """
    grid = block_grid(shape, out.itemsize, index, max_gap=reader.max_gap, page=reader.page)
    if grid is None:
        return 0
    if not out.flags.c_contiguous:
        return _through_rows(reader, start, shape, index, out)
    if not grid.contiguous:
        _through_gaps(reader, start, grid, out)
        return grid.nbytes
    target = out.reshape(-1).view(np.uint8).data
    if grid.blocks == 1:
        reader.read_into(start + grid.base, target)
    else:
        reader.read_blocks((grid.offsets() + start).tolist(), grid.span, target)
    return grid.nbytes


def _through_rows(reader: ByteReader, start: int, shape: Sequence[int], index: Index, out: np.ndarray) -> int:
    """Reads into an array with gaps of its own, some rows at a time."""
    row_bytes = math.prod(out.shape[1:]) * out.itemsize
    rows = max(1, COPY_BUFFER_BYTES // max(row_bytes, 1))
    first, taken = index[0], 0
    for at in range(0, out.shape[0], rows):
        stop = min(out.shape[0], at + rows)
        piece = np.empty((stop - at, *out.shape[1:]), out.dtype)
        taken += read_region(reader, start, shape, (slice(first.start + at, first.start + stop), *index[1:]), piece)
        out[at:stop] = piece
    return taken


def _through_gaps(reader: ByteReader, start: int, grid: BlockGrid, out: np.ndarray) -> None:
    """Reads blocks with unwanted bytes inside, at most about a buffer at a time, and copies the wanted ones."""
    target = out.reshape(grid.blocks, *grid.inner_counts)
    row_stride, rows = grid.inner_strides[0], grid.inner_counts[0]
    row_span = grid.span - (rows - 1) * row_stride
    rows_at_once = max(1, min(rows, COPY_BUFFER_BYTES // row_stride))
    buffer = bytearray((rows_at_once - 1) * row_stride + max(row_span, row_stride if rows_at_once < rows else 0))
    view = memoryview(buffer)
    for block, offset in enumerate(grid.offsets().tolist()):
        for at in range(0, rows, rows_at_once):
            taken = min(rows_at_once, rows - at)
            # The gap before the next piece is read with this one, so that `byte_ranges` tells what is read.
            length = taken * row_stride if at + taken < rows else (taken - 1) * row_stride + row_span
            reader.read_into(start + offset + at * row_stride, view[:length])
            shape = (taken, *grid.inner_counts[1:])
            target[block, at : at + taken] = np.ndarray(shape, out.dtype, buffer, 0, grid.inner_strides)
