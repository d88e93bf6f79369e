"""`pack: best_fit_cropped`: full rows that begin with the beginning of a document.

nanochat's algorithm. Documents are read in order into a *buffer*. A row takes the longest document of the buffer that
fits into the space that is left, the earliest of equally long ones, until none fits; then the shortest document of the
buffer is cropped to that space, and the rest of it is dropped. The buffer is filled up in batches whenever it holds
fewer documents than it should. So every row is full, every document in it has its beginning, and what is lost is the
ends of the cropped ones: about a third of the tokens of web text at 2,048 tokens a row.

Rows depend on the lengths alone. They are planned once, in one pass, and stored as (document, start, length); a step's
rows are then a look-up, and a run resumes anywhere at once. Rows that were planned stay the same when documents are
added behind the others (`RowPlanner`), except for the last ones, which are planned when no more are to come.
"""

import hashlib
import heapq
import io
import logging
import zipfile
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from levanter.data.packing import Packing
from levanter.data.rows import PackedRows, TrainRows
from levanter.data.store import Tokens
from levanter.io.atomic import atomic_write
from levanter.io.paths import exists, join, open_read

logger = logging.getLogger(__name__)

BEST_FIT = "best_fit_cropped"
BUFFER = 1000
"""The fewest documents in the buffer while a row chooses among them."""
REFILL = 128
"""Documents that are added to the buffer at once."""
VERSION = 1
"""The version of the algorithm and of the file; plans of another one are made again."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowPlan:
    """The pieces of each row.

    Attributes:
        row_starts: int64 `[rows + 1]`: where each row's pieces begin in the other arrays.
        documents: int64 `[pieces]`: the document of each piece.
        starts: int64 `[pieces]`: the first token of the piece within its document.
        lengths: int64 `[pieces]`: the tokens of the piece.
        dropped: tokens of cropped documents that no row has.
        cropped: documents that were cropped.
    """

    row_starts: np.ndarray
    documents: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    dropped: int
    cropped: int


@dataclass(kw_only=True, eq=False)
class RowPlanner:
    """Plans rows while documents arrive.

    Attributes:
        positions: tokens in a row.
        buffer: the fewest documents in the buffer while a row chooses.
        refill: documents that are added to the buffer at once.
    """

    positions: int
    buffer: int = BUFFER
    refill: int = REFILL
    _lengths: list[int] = field(default_factory=list)
    _next: int = 0
    _count: int = 0
    # Documents in the buffer by length, in their order; bit l of `_present` says that there are some of length l.
    _by_length: dict[int, deque[int]] = field(default_factory=dict)
    _present: int = 0
    # Documents longer than a row never fit, so they are candidates for cropping only.
    _long: list[tuple[int, int]] = field(default_factory=list)
    _documents: list[int] = field(default_factory=list)
    _pieces: list[int] = field(default_factory=list)
    _row_starts: list[int] = field(default_factory=lambda: [0])
    _remaining: int = 0
    _dropped: int = 0
    _cropped: int = 0

    def __post_init__(self) -> None:
        self._remaining = self.positions

    def add(self, lengths: np.ndarray, *, final: bool) -> None:
        """Takes the lengths of further documents and plans as many rows as do not depend on later ones.

        Args:
            lengths: int64 `[documents]`, each at least 1.
            final: whether no more documents follow: the buffer is then used up, and the last row may be short.
        """
        self._lengths += np.asarray(lengths, np.int64).tolist()
        while True:
            # The buffer takes whole batches, so that rows do not depend on when documents arrived.
            while self._count < self.buffer and len(self._lengths) - self._next >= self.refill:
                self._fill(self.refill)
            if self._count < self.buffer:
                if not final:
                    return
                self._fill(len(self._lengths) - self._next)
                if not self._count:
                    break
            self._take_one()
        if self._remaining < self.positions:
            # The last row is short: it is padded.
            self._end_row()

    def _fill(self, count: int) -> None:
        for number in range(self._next, self._next + count):
            length = self._lengths[number]
            if length > self.positions:
                heapq.heappush(self._long, (length, number))
                continue
            self._by_length.setdefault(length, deque()).append(number)
            self._present |= 1 << length
        self._next += count
        self._count += count

    def _take_one(self) -> None:
        """Puts one document of the buffer into the row, and ends the row if it is full."""
        # The highest set bit that is at most `_remaining`: the longest document that fits.
        fitting = self._present & ((2 << self._remaining) - 1)
        if fitting:
            length = taken = fitting.bit_length() - 1
        # The lowest set bit: the shortest document, of which too much is left all the same.
        elif self._present:
            length, taken = (self._present & -self._present).bit_length() - 1, self._remaining
        else:
            length, taken = self._long[0][0], self._remaining
        if length > self.positions:
            number = heapq.heappop(self._long)[1]
        else:
            same = self._by_length[length]
            number = same.popleft()
            if not same:
                self._present &= ~(1 << length)
        self._count -= 1
        if taken < length:
            self._cropped += 1
            self._dropped += length - taken
        self._documents.append(number)
        self._pieces.append(taken)
        self._remaining -= taken
        if not self._remaining:
            self._end_row()

    def _end_row(self) -> None:
        self._row_starts.append(len(self._documents))
        self._remaining = self.positions

    def plan(self) -> RowPlan:
        """The rows so far, without one that is not complete yet."""
        pieces = self._row_starts[-1]
        return RowPlan(
            row_starts=np.array(self._row_starts, np.int64),
            documents=np.array(self._documents[:pieces], np.int64),
            starts=np.zeros(pieces, np.int64),
            lengths=np.array(self._pieces[:pieces], np.int64),
            dropped=self._dropped,
            cropped=self._cropped,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class BestFitRows(PackedRows):
    """Full rows of documents, each from its beginning; `PackedRows` reads them.

    Attributes:
        lost: tokens that no row has.
    """

    lost: int = 0

    def take(self, numbers: np.ndarray) -> TrainRows:
        """The rows with these numbers."""
        rows = super().take(numbers)
        if not self.separate:
            # Where documents see each other, the last token of one predicts the beginning of the next, as in nanochat.
            real = rows.segment_ids >= 0
            rows.loss_weights[:, :-1] = real[:, :-1] & real[:, 1:]
        return rows

    def describe(self) -> str:
        """Describes the rows and what is lost."""
        total = self.lost + int(self.lengths.sum())
        return (
            f"best fit, cropped: {len(self.lengths) / len(self):.1f} documents to a row, {self.filled:.1%} of "
            f"positions filled; {self.lost:,} of {total:,} tokens ({self.lost / total:.1%}) dropped from the ends of "
            f"{self.cut:,} documents"
        )


def best_fit_rows(tokens: Tokens, *, positions: int, separate: bool, folder: str | None = None) -> BestFitRows:
    """Full rows of a set's documents, planned now or read from the file of an earlier run.

    Args:
        tokens: the documents, without loss weights.
        positions: tokens in a row.
        separate: whether a token sees only its own document.
        folder: where the plan is stored; None for nowhere.
    """
    assert not tokens.weighted
    starts = tokens.starts
    plan = _stored_plan(starts, positions, folder)
    return BestFitRows(
        tokens=tokens,
        positions=positions,
        separate=separate,
        begins=starts[plan.documents] + plan.starts,
        lengths=plan.lengths,
        # Every piece is used once, in this order.
        packing=Packing(row_starts=plan.row_starts, pieces=np.arange(len(plan.lengths))),
        cut=plan.cropped,
        lost=plan.dropped,
    )


def plan_best_fit(lengths: np.ndarray, *, positions: int, buffer: int = BUFFER, refill: int = REFILL) -> RowPlan:
    """The rows of documents of these lengths, to the last one."""
    planner = RowPlanner(positions=positions, buffer=buffer, refill=refill)
    planner.add(lengths, final=True)
    return planner.plan()


def _stored_plan(starts: np.ndarray, positions: int, folder: str | None) -> RowPlan:
    """The plan from its file, which is written if it is not there."""
    if folder is None:
        return plan_best_fit(np.diff(starts), positions=positions)
    # The lengths of all documents are part of the name: a plan of other documents is another file.
    facts = f"{VERSION} {positions} {BUFFER} {REFILL} ".encode() + np.ascontiguousarray(starts, np.int64).tobytes()
    path = join(folder, f"{BEST_FIT}-{positions}-{hashlib.sha256(facts).hexdigest()[:16]}.npz")
    if exists(path):
        try:
            return _read_plan(path, documents=len(starts) - 1)
        # Zip members carry checksums, so damage shows here.
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            logger.warning("%s: damaged (%s); the rows are planned again", path, error)
    plan = plan_best_fit(np.diff(starts), positions=positions)
    try:
        _write_plan(path, plan)
    except OSError as error:
        # The store may be read-only; then every run plans its rows anew.
        logger.info("%s: not written (%s)", path, str(error).splitlines()[0])
    return plan


_ARRAYS = ("row_starts", "documents", "starts", "lengths")


def _write_plan(path: str, plan: RowPlan) -> None:
    content = io.BytesIO()
    arrays = {name: getattr(plan, name) for name in _ARRAYS}
    np.savez(content, **arrays, totals=np.array([plan.dropped, plan.cropped], np.int64))
    with atomic_write(path) as file:
        file.write(content.getvalue())


def _read_plan(path: str, *, documents: int) -> RowPlan:
    with open_read(path) as file:
        content = np.load(io.BytesIO(file.read()), allow_pickle=False)
    arrays = {name: content[name] for name in _ARRAYS}
    dropped, cropped = content["totals"].tolist()
    pieces = len(arrays["documents"])
    if arrays["row_starts"][-1] != pieces or any(len(arrays[name]) != pieces for name in _ARRAYS[1:]):
        raise ValueError("its arrays do not belong together")
    if pieces and not 0 <= arrays["documents"].min() <= arrays["documents"].max() < documents:
        raise ValueError("it names documents that the set does not have")
    return RowPlan(**arrays, dropped=dropped, cropped=cropped)
