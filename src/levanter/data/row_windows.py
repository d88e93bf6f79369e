"""Rows as sequences to evaluate: what training lays into rows, scored as training would have predicted it.

Conversations, pairs of input and target, and rows that are held out stay the rows they are: a document is whole within
one (or cut where training cuts it), and what counts is what has a weight there. A weight is 0 or not: in an evaluation
every token that counts counts as one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from levanter.data.eval_sequences import EvalSequences, SetSpan
from levanter.data.rows import TrainRows


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSet:
    """A set that is given as rows.

    Attributes:
        name, tags: as in the `EvaluationSet`.
        rows: all of them.
        chars: characters they were made from; 0 where that is not known.
    """

    name: str
    tags: tuple[str, ...]
    rows: TrainRows
    chars: int = 0


def row_sequences(
    sets: Sequence[RowSet], byte_lengths: np.ndarray, *, positions: int, separate_documents: bool = True
) -> EvalSequences | None:
    """The rows of sets as sequences to evaluate; None where there is no set.

    For evaluation each piece of a document within a row is a document, whose first token is context.

    Args:
        sets: the rows, each of `positions` tokens.
        byte_lengths: int32 `[vocab]`, from the tokenizer.
        positions: tokens in a row.
        separate_documents: as in `build_sequences`.
    """
    spans: list[SetSpan] = []
    lengths: list[np.ndarray] = []
    start = first_row = 0
    for one in sets:
        real = one.rows.segment_ids >= 0
        # A document begins where the row or the segment changes; padding is one more, of which nothing is scored.
        segment = np.concatenate([np.full((len(real), 1), -2), one.rows.segment_ids], axis=1)
        begins = np.diff(segment, axis=1) != 0
        spans.append(
            SetSpan(
                name=one.name,
                tags=one.tags,
                documents=int((begins & real).sum()),
                start=start,
                stop=start + real.size,
                first_row=first_row,
                rows=len(real),
                skipped=0,
                chars=one.chars,
                stride=positions,
            )
        )
        lengths.append(np.diff(np.append(np.flatnonzero(begins), real.size)))
        start, first_row = start + real.size, first_row + len(real)
    if not spans:
        return None
    return EvalSequences(
        max_length=positions,
        sets=tuple(spans),
        stream=np.concatenate([one.rows.tokens.reshape(-1) for one in sets]),
        document_starts=np.cumsum(np.concatenate([[0], *lengths]))[:-1].astype(np.int64),
        byte_lengths=np.asarray(byte_lengths, np.int32),
        separate_documents=separate_documents,
        counts=np.concatenate([_counted(one.rows).reshape(-1) for one in sets]),
        real=np.concatenate([(one.rows.segment_ids >= 0).reshape(-1) for one in sets]),
    )


def _counted(rows: TrainRows) -> np.ndarray:
    """Whether each token counts where it is predicted; a weight is that of predicting *from* a place."""
    counted = np.zeros(rows.tokens.shape, bool)
    counted[:, 1:] = rows.loss_weights[:, :-1] > 0
    return counted & (rows.segment_ids >= 0)


def concatenate_sequences(first: EvalSequences | None, second: EvalSequences | None) -> EvalSequences | None:
    """The sets of two evaluations as one; they must have rows of one length."""
    if first is None or second is None:
        return first or second
    assert first.max_length == second.max_length and first.separate_documents == second.separate_documents
    tokens, rows = len(first.stream), first.row_count
    moved = tuple(
        replace(span, start=span.start + tokens, stop=span.stop + tokens, first_row=span.first_row + rows)
        for span in second.sets
    )
    return replace(
        first,
        sets=(*first.sets, *moved),
        stream=np.concatenate([first.stream, second.stream]),
        document_starts=np.concatenate([first.document_starts, second.document_starts + tokens]),
        counts=_concatenate_marks(first, second, "counts"),
        real=_concatenate_marks(first, second, "real"),
    )


def _concatenate_marks(first: EvalSequences, second: EvalSequences, name: str) -> np.ndarray | None:
    """A mark of each token of both, where one of them has it."""
    marks = [getattr(sequences, name) for sequences in (first, second)]
    if all(mark is None for mark in marks):
        return None
    streams = (first.stream, second.stream)
    return np.concatenate([np.ones(len(s), bool) if m is None else m for m, s in zip(marks, streams, strict=True)])
