"""Lays the documents of a set into rows of equal length; any row can be computed on its own.

Two ways to lay documents into rows of `positions` tokens:

- *concatenated*: documents lie end to end and are cut every `positions` tokens. Nothing is padded; tokens after the
  last complete row are not used. (A set smaller than one row is one padded row.)
- *packed*: whole documents, several to a row, planned by `packing`; the rest of the row is padding. A document longer
  than a row is cut into pieces, the last of them shorter; a document whose later pieces mean nothing without the
  earlier ones (a conversation) keeps its beginning or its end, or is left out.

*Segment ids* number a row's documents from 0; padding has −1. Loss weights are 0 where nothing of the sequence follows:
at a row's last place, before padding, and at a document's last token, unless documents may see each other.

Targets are made on the host together with the rows: packing, cutting and device layout may reorder positions, and a
target stays with its position.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import numpy as np

from levanter.data.errors import DataError
from levanter.data.packing import Packing, pack
from levanter.data.store import Tokens, span_indices

NO_TARGET = -1
"""The target of a position that predicts nothing: the last of a row, and of each segment."""


def next_tokens(tokens: np.ndarray, segment_ids: np.ndarray | None = None) -> np.ndarray:
    """The targets of next-token prediction, int32 `[…, position]`.

    Args:
        tokens: ids, `[…, position]`.
        segment_ids: `[…, position]`; a token is predicted from its own segment only. None for one segment.
    """
    targets = np.full(tokens.shape, NO_TARGET, np.int32)
    targets[..., :-1] = tokens[..., 1:]
    if segment_ids is not None:
        # A position whose successor is in another segment, or is padding, predicts nothing.
        targets[..., :-1][segment_ids[..., 1:] != segment_ids[..., :-1]] = NO_TARGET
    return targets


PADDING_SEGMENT = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainRows:
    """Rows as arrays.

    Attributes:
        tokens: int32 `[rows, position]`; 0 where padded.
        loss_weights: float32 `[rows, position]`, the weight of predicting *from* each position.
        segment_ids: int32 `[rows, position]`, numbering each row's documents from 0; −1 where padded.
    """

    tokens: np.ndarray
    loss_weights: np.ndarray
    segment_ids: np.ndarray

    @classmethod
    def empty(cls, rows: int, positions: int) -> "TrainRows":
        """Rows of padding, to be filled in."""
        return cls(
            tokens=np.zeros((rows, positions), np.int32),
            loss_weights=np.zeros((rows, positions), np.float32),
            segment_ids=np.full((rows, positions), PADDING_SEGMENT, np.int32),
        )

    def put(self, indices: np.ndarray, rows: "TrainRows") -> None:
        """Writes rows to these indices."""
        self.tokens[indices] = rows.tokens
        self.loss_weights[indices] = rows.loss_weights
        self.segment_ids[indices] = rows.segment_ids


class Rows(Protocol):
    """Rows that can be taken by number."""

    @property
    def positions(self) -> int:
        """Tokens in a row, padding included."""
        ...

    def __len__(self) -> int: ...

    def take(self, numbers: np.ndarray) -> TrainRows:
        """The rows with these numbers, in this order."""
        ...

    def describe(self) -> str:
        """Describes in a few words how documents are laid into rows."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class ConcatenatedRows:
    """Documents end to end, cut every `positions` tokens.

    Attributes:
        tokens: the documents.
        positions: tokens in a row.
        separate: whether a token sees only its own document.
    """

    tokens: Tokens
    positions: int
    separate: bool

    @property
    def _total(self) -> int:
        return int(self.tokens.starts[-1])

    def __len__(self) -> int:
        # A set shorter than one row has one padded row rather than none.
        return max(self._total // self.positions, 1)

    def take(self, numbers: np.ndarray) -> TrainRows:
        """The rows with these numbers: consecutive stretches of the stream, the last one padded where it is short."""
        numbers = np.asarray(numbers, np.int64)
        assert ((numbers >= 0) & (numbers < len(self))).all(), numbers
        begins = numbers * self.positions
        # Only the one row of a set shorter than a row is short.
        counts = np.minimum(self._total - begins, self.positions)
        ids, weights = self.tokens.read(begins, counts)
        real = np.arange(self.positions) < counts[:, None]
        rows = TrainRows.empty(len(numbers), self.positions)
        rows.tokens[real] = ids
        rows.loss_weights[real] = 1.0 if weights is None else weights
        # The documents that begin behind a row's first token, as marks; their running sum numbers the documents.
        starts = self.tokens.starts
        first = np.searchsorted(starts, begins, side="right")
        last = np.searchsorted(starts, begins + counts, side="left")
        marks = span_indices(first, last - first)
        row = np.repeat(np.arange(len(numbers)), last - first)
        begin_marks = np.zeros((len(numbers), self.positions), np.int32)
        # A document that begins at the row's first position is not marked, so it has number 0.
        np.add.at(begin_marks, (row, starts[marks] - begins[row]), 1)
        # The last token before padding predicts nothing.
        rows.loss_weights[:, :-1] *= real[:, 1:]
        # A row's last position predicts nothing: its successor is in the next row.
        rows.loss_weights[:, -1] = 0.0
        if self.separate:
            # A position predicts nothing if the next one begins a document.
            rows.loss_weights[:, :-1] *= begin_marks[:, 1:] == 0
            rows.segment_ids[real] = np.cumsum(begin_marks, axis=1, dtype=np.int32)[real]
        else:
            rows.segment_ids[real] = 0
        return rows

    def describe(self) -> str:
        """Describes the layout, and how many tokens are left out or padded."""
        dropped = max(self._total - len(self) * self.positions, 0)
        remainder = f", {dropped:,} tokens after the last row dropped" if dropped else ""
        if self._total < self.positions:
            remainder = f", padded from {self._total:,} tokens"
        return f"documents concatenated{remainder}"


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedRows:
    """Whole documents, several to a row.

    Attributes:
        tokens: the documents.
        positions: tokens in a row.
        separate: whether a token sees only its own document.
        begins, lengths: int64 `[pieces]`: the documents, those that are longer than a row truncated.
        packing: the pieces of each row.
        cut: documents that were cut.
        kept: the part of these that is kept, in a word; "" if all pieces are.
        dropped: documents that were left out, because they are longer than a row.
        uncounted: documents that were left out, because nothing counts in the part that fits into a row.
    """

    tokens: Tokens
    positions: int
    separate: bool
    begins: np.ndarray
    lengths: np.ndarray
    packing: Packing
    cut: int
    kept: str = ""
    dropped: int = 0
    uncounted: int = 0

    def __len__(self) -> int:
        return len(self.packing)

    def take(self, numbers: np.ndarray) -> TrainRows:
        """The rows with these numbers: complete documents one after another, then padding."""
        numbers = np.asarray(numbers, np.int64)
        first = self.packing.row_starts[numbers]
        count = self.packing.row_starts[numbers + 1] - first
        pieces = self.packing.pieces[span_indices(first, count)]
        lengths = self.lengths[pieces]
        row = np.repeat(np.arange(len(numbers)), count)
        # Where each piece begins within its row: the running sum of lengths, less what it was where the row begins.
        ends = np.cumsum(lengths)
        row_base = np.concatenate([[0], ends])[np.concatenate([[0], np.cumsum(count)])[:-1]]
        begin = ends - lengths - row_base[row]
        positions = span_indices(row * self.positions + begin, lengths)
        ids, weights = self.tokens.read(self.begins[pieces], lengths)
        rows = TrainRows.empty(len(numbers), self.positions)
        rows.tokens.reshape(-1)[positions] = ids
        rows.loss_weights.reshape(-1)[positions] = 1.0 if weights is None else weights
        # The last position of each piece predicts nothing: what follows is padding or another document.
        rows.loss_weights.reshape(-1)[row * self.positions + begin + lengths - 1] = 0.0
        # The number of each piece within its row.
        within = np.arange(len(pieces)) - np.repeat(np.cumsum(count) - count, count)
        # Without separation all documents of a row share segment 0 and see each other.
        rows.segment_ids.reshape(-1)[positions] = np.repeat(within if self.separate else 0 * within, lengths)
        return rows

    @cached_property
    def filled(self) -> float:
        """The share of the rows' positions that have a token."""
        return float(self.lengths.sum() / (len(self) * self.positions))

    def describe(self) -> str:
        """Describes how many documents share a row, how full rows are, and how many documents are cut."""
        cut = f", {self.cut:,} longer than a row truncated" if self.cut else ""
        cut += f" (their {self.kept} is kept)" if self.cut and self.kept else ""
        cut += f", {self.dropped:,} longer than a row left out" if self.dropped else ""
        if self.uncounted:
            cut += f", {self.uncounted:,} longer than a row left out: nothing counts in their {self.kept}"
        most = int(np.diff(self.packing.row_starts).max())
        several = f"up to {most} to a row" if most > 1 else "one to a row"
        return f"whole documents, {several}, {self.filled:.1%} of positions filled{cut}"


Overlength = Literal["cut", "left", "right", "drop", "raise"]
"""For a document longer than a row: cut it into pieces, keep its beginning or its end, drop it, or refuse it."""


def packed_rows(
    tokens: Tokens, *, positions: int, separate: bool, most: int | None, overlength: Overlength = "cut"
) -> PackedRows:
    """Plans packed rows.

    Args:
        tokens: the documents.
        positions: tokens in a row.
        separate: whether a token sees only its own document.
        most: the maximum number of documents in a row; None for as many as fit.
        overlength: what to do with documents longer than a row.

    Raises:
        DataError: some are longer and are refused; or nothing is left.
    """
    if overlength != "cut":
        return _whole_rows(tokens, positions, separate, most, overlength)
    lengths = np.diff(tokens.starts)
    # A document longer than a row is cut into ⌈length / positions⌉ pieces.
    pieces = -(-lengths // positions)
    # The index of each piece within its document, from 0.
    number = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begins = np.repeat(tokens.starts[:-1], pieces) + number * positions
    remaining = np.minimum(np.repeat(tokens.starts[1:], pieces) - begins, positions)
    return PackedRows(
        tokens=tokens,
        positions=positions,
        separate=separate,
        begins=begins,
        lengths=remaining,
        packing=pack(remaining, positions=positions, most=most),
        cut=int(np.count_nonzero(pieces > 1)),
    )


def _whole_rows(tokens: Tokens, positions: int, separate: bool, most: int | None, overlength: Overlength) -> PackedRows:
    """Rows of documents that are never cut into several pieces."""
    begins, lengths = tokens.starts[:-1], np.diff(tokens.starts)
    long = np.flatnonzero(lengths > positions)
    if overlength == "raise" and len(long):
        raise DataError(
            f"{len(long):,} of {len(lengths):,} are longer than a row of {positions:,} tokens (the longest has "
            f"{int(lengths.max()):,}), and overlength: raise refuses them; set overlength to left, right or drop"
        )
    cut = np.minimum(lengths, positions)
    if overlength == "right":
        begins = begins + (lengths - cut)
    leave = np.zeros(len(lengths), bool)
    if overlength == "drop":
        leave[long] = True
    elif tokens.weighted:
        # Only documents with loss weights can lose everything that counts; of plain text every position counts.
        leave[long] = [not _counts(tokens, int(begins[i]), positions) for i in long]
    if leave.all():
        raise DataError(
            f"all {len(lengths):,} are longer than a row of {positions:,} tokens, and nothing is left of them "
            f"(overlength: {overlength})"
        )
    remaining = ~leave
    return PackedRows(
        tokens=tokens,
        positions=positions,
        separate=separate,
        begins=begins[remaining],
        lengths=cut[remaining],
        packing=pack(cut[remaining], positions=positions, most=most),
        cut=0 if overlength == "drop" else len(long) - int(leave.sum()),
        kept={"left": "beginning", "right": "end"}.get(overlength, ""),
        dropped=len(long) if overlength == "drop" else 0,
        uncounted=0 if overlength == "drop" else int(leave.sum()),
    )


def _counts(tokens: Tokens, begin: int, count: int) -> bool:
    """Whether anything counts in the loss in `count` tokens of a document from `begin` on."""
    _, weights = tokens.read(np.array([begin]), np.array([count]))
    assert weights is not None
    # The last position predicts nothing, whatever its weight.
    return bool((weights[:-1] > 0).any())


def take_mixed(sources: Sequence[Rows], which: np.ndarray, numbers: np.ndarray) -> TrainRows:
    """Rows of several sets.

    Args:
        sources: the sets.
        which: which of them each row comes from.
        numbers: which row of it.
    """
    rows = TrainRows.empty(len(which), sources[0].positions)
    for i in np.unique(which):
        # One read per set: a set's spans are then fetched from its store together.
        indices = np.flatnonzero(which == i)
        rows.put(indices, sources[i].take(numbers[indices]))
    return rows
