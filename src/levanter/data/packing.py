"""Packing: plans which whole documents share a row, from their lengths.

Best fit, longest first, on the histogram of lengths instead of on the documents (after Krell et al., "Efficient
Sequence Packing without Cross-contamination", 2021): documents of one length are alike, so rows are made by *pattern*
(`(3000, 900, 190)` × 17 rows), and the cost depends on the row's length, not on the number of documents. The documents
of each length are then assigned to the patterns in their order.

The plan lists the pieces of each row: a pure function of the lengths, the same on every process, addressable by row.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """Rows of whole pieces.

    Attributes:
        row_starts: int64 `[rows + 1]`: where each row's pieces begin in `pieces`.
        pieces: int64 `[pieces]`: indices of pieces, row after row; the longest of a row first.
    """

    row_starts: np.ndarray
    pieces: np.ndarray

    def __len__(self) -> int:
        return len(self.row_starts) - 1

    def row(self, number: int) -> np.ndarray:
        """The pieces of a row."""
        return self.pieces[self.row_starts[number] : self.row_starts[number + 1]]


def pack(lengths: np.ndarray, *, positions: int, most: int | None = None) -> Packing:
    """Plans rows for pieces of these lengths.

    Args:
        lengths: int64 `[pieces]`, each within 1 and `positions`.
        positions: tokens in a row.
        most: the maximum number of pieces in a row; None for as many as fit.
    """
    lengths = np.asarray(lengths, np.int64)
    assert len(lengths) == 0 or (lengths.min() >= 1 and lengths.max() <= positions), (lengths, positions)
    assert most is None or most >= 1, most
    histogram = np.bincount(lengths, minlength=positions + 1)
    # Pieces sorted by length; `next_piece[l]` is the place in this order of the next unused piece of length l.
    by_length = np.argsort(lengths, kind="stable")
    next_piece = np.concatenate([[0], np.cumsum(histogram)[:-1]])
    counts, pieces = [], []
    # Documents of one length are interchangeable: each column of a pattern takes the next ones of its length.
    for pattern, rows in _patterns(histogram, positions, most):
        columns = []
        for length in pattern:
            start = next_piece[length]
            columns.append(by_length[start : start + rows])
            next_piece[length] += rows
        pieces.append(np.stack(columns, axis=1).ravel())
        counts.append(np.full(rows, len(pattern), np.int64))
    return Packing(
        row_starts=np.cumsum(np.concatenate([np.zeros(1, np.int64), *counts])),
        pieces=np.concatenate(pieces) if pieces else np.zeros(0, np.int64),
    )


def _patterns(histogram: np.ndarray, positions: int, most: int | None) -> list[tuple[tuple[int, ...], int]]:
    """The rows as (lengths of the pieces, number of such rows)."""
    # Rows that are begun, by the space left in them; `spaces` has the spaces that some row has, as bits.
    open_rows: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    spaces = 0
    full: list[tuple[tuple[int, ...], int]] = []
    # Longest first: short pieces then fill the gaps that long ones leave.
    for length in range(positions, 0, -1):
        remaining = int(histogram[length])
        while remaining:
            # Bit i of `fitting`: some row has a space of length + i. The lowest set bit is the tightest fit.
            fitting = spaces >> length
            if fitting:
                space = length + (fitting & -fitting).bit_length() - 1
                pattern, rows = open_rows[space].pop()
                # A pattern may stand for more rows than there are pieces left of this length; the other rows stay open
                # without one.
                row_count = min(rows, remaining)
                if row_count < rows:
                    open_rows[space].append((pattern, rows - row_count))
                if not open_rows[space]:
                    spaces &= ~(1 << space)
            else:
                # New rows, each with as many pieces of this length as fit; the last one may get fewer.
                count = positions // length if most is None else min(positions // length, most)
                count = min(count, remaining)
                row_count, pattern, space = (
                    remaining // count,
                    (length,) * (count - 1),
                    positions - (count - 1) * length,
                )
                remaining -= row_count * (count - 1)
            # One piece per row is placed in this step; for new rows the pieces before it were counted above.
            remaining -= row_count
            pattern, space = (*pattern, length), space - length
            # A row with the maximum number of pieces is closed even if it has space.
            if space == 0 or len(pattern) == most:
                full.append((pattern, row_count))
            else:
                open_rows.setdefault(space, []).append((pattern, row_count))
                spaces |= 1 << space
    # Rows with space left are complete too: no shorter pieces remain.
    return full + [entry for space in sorted(open_rows) for entry in open_rows[space]]
