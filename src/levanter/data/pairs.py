"""Pairs as rows: a row has two texts side by side, the preferred one and the rejected one, each in its own half.

A token store holds a pair as two documents, one behind the other: document 2n is the chosen text of pair n, document 2n
+ 1 the rejected one. A *row* has room for both, `2 × positions` tokens: the first half is the chosen text, the second
the rejected one, each padded behind its end. So the code that mixes, shuffles, divides and holds out rows works for
pairs.

Both texts of a pair are left out or cut together: the probability of a text without its end, or without its answer,
cannot be compared with the probability of the other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from levanter.data.errors import DataError
from levanter.data.rows import NO_TARGET, TrainRows
from levanter.data.store import Tokens, span_indices

CHOSEN, REJECTED = 0, 1
SIDES = ("chosen", "rejected")
Slice = Literal["left", "right", "raise", "drop"]
MOST_ALIKE = 0.05
"""The share of pairs whose two texts may be equal."""
_READ_AT_ONCE = 1 << 22


@dataclass(frozen=True, kw_only=True, eq=False)
class PairRows:
    """Pairs of texts, each pair a row.

    Attributes:
        tokens: the texts, two documents a pair.
        half: the maximum number of tokens of a text.
        begins: int64 `[pairs, 2]`: where each text that is used begins.
        lengths: int64 `[pairs, 2]`: its tokens.
        alike: pairs whose two texts are equal.
        cut: pairs of which a text is longer than that, and is cut.
        dropped: pairs left out for that reason.
        uncounted: pairs left out since nothing that counts is left of a text.
        kept: the part of longer texts that is kept, in words.
    """

    tokens: Tokens
    half: int
    begins: np.ndarray
    lengths: np.ndarray
    alike: int = 0
    cut: int = 0
    dropped: int = 0
    uncounted: int = 0
    kept: str = ""

    @property
    def positions(self) -> int:
        """Tokens in a row: those of two texts."""
        return 2 * self.half

    def __len__(self) -> int:
        return len(self.begins)

    def take(self, numbers: np.ndarray) -> TrainRows:
        """The pairs with these numbers; segment 0 is the chosen text, segment 1 the rejected one."""
        numbers = np.asarray(numbers, np.int64)
        assert ((numbers >= 0) & (numbers < len(self))).all(), numbers
        # Chosen and rejected alternate; text i of the batch fills the half row i from its beginning.
        lengths = self.lengths[numbers].reshape(-1)
        positions = span_indices(np.arange(2 * len(numbers)) * self.half, lengths)
        ids, weights = self.tokens.read(self.begins[numbers].reshape(-1), lengths)
        assert weights is not None, "what counts of a pair is stored with it"
        rows = TrainRows.empty(len(numbers), self.positions)
        rows.tokens.reshape(-1)[positions] = ids
        rows.loss_weights.reshape(-1)[positions] = weights
        # From the last token of a text nothing is predicted; a text that is cut has a weight there.
        rows.loss_weights.reshape(-1)[np.arange(2 * len(numbers)) * self.half + lengths - 1] = 0.0
        rows.segment_ids.reshape(-1)[positions] = np.repeat(np.tile([CHOSEN, REJECTED], len(numbers)), lengths)
        return rows

    @cached_property
    def filled(self) -> float:
        """The share of the rows' positions that have a token."""
        return float(self.lengths.sum() / (len(self) * self.positions))

    def describe(self) -> str:
        """Describes how full rows are, and how many pairs are cut, left out or alike."""
        clauses = [f"a pair is two texts of up to {self.half:,} tokens, {self.filled:.1%} of positions filled"]
        if self.cut:
            clauses.append(f"{self.cut:,} pairs with a longer text, of which the {self.kept} is kept")
        if self.dropped:
            clauses.append(f"{self.dropped:,} pairs with a longer text left out")
        if self.uncounted:
            clauses.append(f"{self.uncounted:,} pairs left out: nothing counts in the {self.kept} of a text")
        if self.alike:
            clauses.append(f"{self.alike:,} pairs are one text twice, which teaches nothing")
        return ", ".join(clauses)


def pair_rows(tokens: Tokens, *, half: int, slices: Slice) -> PairRows:
    """Plans the rows of pairs.

    Args:
        tokens: the texts, two documents a pair.
        half: the maximum number of tokens of a text.
        slices: what to do with a pair that has a longer text: the beginning of each is kept (`left`), or the end
            (`right`), the pair is left out (`drop`), or refused (`raise`).

    Raises:
        DataError: such pairs are refused; the texts of too many pairs are equal; nothing is left.
    """
    assert len(tokens.starts) % 2 == 1, "a pair is two documents"
    begins, lengths = tokens.starts[:-1].reshape(-1, 2), np.diff(tokens.starts).reshape(-1, 2)
    alike = sum(int(mask.sum()) for mask in _alike(tokens, begins, lengths))
    if alike > MOST_ALIKE * len(begins):
        raise DataError(
            f"{alike:,} of {len(begins):,} pairs ({alike / len(begins):.1%}) have the same text as chosen and "
            f"rejected, which teaches nothing; more than {MOST_ALIKE:.0%} are refused: "
            "check chosen_field and rejected_field"
        )
    # bool `[pairs]`: one text that is too long makes the pair too long.
    long = np.any(lengths > half, axis=1).reshape(-1)
    if slices == "raise" and long.any():
        raise DataError(
            f"{int(long.sum()):,} of {len(long):,} pairs have a text longer than a row of {half:,} tokens (the longest "
            f"has {int(lengths.max()):,}), and slice_strategy: raise refuses them; raise train_seq_len, or set "
            "slice_strategy to left, right or drop"
        )
    # `left` keeps the beginnings, which is what `begins` already says.
    cut = np.minimum(lengths, half)
    if slices == "right":
        begins = begins + (lengths - cut)
    leave = long.copy() if slices == "drop" else np.zeros(len(long), bool)
    if slices in ("left", "right"):
        # Only truncated pairs are read: of the others, building the store has checked that something counts.
        leave[long] = [not _counts(tokens, begins[n], cut[n]) for n in np.flatnonzero(long)]
    if leave.all():
        raise DataError(
            f"all {len(long):,} pairs have a text longer than a row of {half:,} tokens, and nothing is left of them "
            f"(slice_strategy: {slices})"
        )
    dropped = slices == "drop"
    return PairRows(
        tokens=tokens,
        half=half,
        begins=begins[~leave],
        lengths=cut[~leave],
        alike=alike,
        cut=0 if dropped else int(long.sum() - leave.sum()),
        dropped=int(leave.sum()) if dropped else 0,
        uncounted=0 if dropped else int(leave.sum()),
        kept={"left": "beginning", "right": "end"}.get(slices, ""),
    )


def pair_targets(rows: TrainRows) -> tuple[np.ndarray, np.ndarray]:
    """Ids and targets of pairs, int32 `[pairs, 2, positions]`; a position that does not count has no target."""
    pairs, positions = rows.tokens.shape
    shape = (pairs, 2, positions // 2)
    tokens, weights = rows.tokens.reshape(shape), rows.loss_weights.reshape(shape)
    targets = np.full(shape, NO_TARGET, np.int32)
    targets[..., :-1] = np.where(weights[..., :-1] > 0, tokens[..., 1:], NO_TARGET)
    return tokens, targets


def _alike(tokens: Tokens, begins: np.ndarray, lengths: np.ndarray) -> Iterator[np.ndarray]:
    """For the pairs whose texts are equally long, whether they are equal: bool arrays, some pairs at a time."""
    same = np.flatnonzero(lengths[:, 0] == lengths[:, 1])
    if not len(same):
        return
    # Groups of pairs of about _READ_AT_ONCE tokens.
    ends = np.cumsum(lengths[same, 0])
    # Cut after every `_READ_AT_ONCE` tokens, so that the memory is bounded whatever the number of pairs.
    for group in np.split(same, np.searchsorted(ends, np.arange(_READ_AT_ONCE, ends[-1], _READ_AT_ONCE)) + 1):
        if not len(group):
            continue
        chosen, rejected = (tokens.read(begins[group, side], lengths[group, side])[0] for side in (CHOSEN, REJECTED))
        starts = np.cumsum(lengths[group, 0]) - lengths[group, 0]
        # The number of different ids of each pair.
        yield np.add.reduceat(chosen != rejected, starts) == 0


def _counts(tokens: Tokens, begins: np.ndarray, lengths: np.ndarray) -> bool:
    """Whether each of the two texts of a pair has a position that counts."""
    for begin, length in zip(begins, lengths, strict=True):
        _, weights = tokens.read(np.array([begin]), np.array([length]))
        assert weights is not None
        # The last position of a text predicts nothing.
        if not (weights[:-1] > 0).any():
            return False
    return True
