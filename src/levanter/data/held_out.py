"""Held-out rows: validation sets taken off the training data (`data.num_validation_sequences`).

They are rows as training would have seen them, and stay these rows: scored is what training would have predicted in
them, from the same context. For evaluation they are sets like any other, `<set>/held_out`: each piece of a document
within a row is a document there, and its first token is context.
"""

from dataclasses import replace

import numpy as np

from levanter.data.sequences import EvalSequences, SetSpan
from levanter.data.training_data import TrainingData

SUFFIX = "/held_out"


def held_out_sequences(
    data: TrainingData, byte_lengths: np.ndarray, *, separate_documents: bool = True
) -> EvalSequences | None:
    """The held-out rows of all sets as sequences to evaluate; None where nothing is held out.

    Args:
        data: the training data.
        byte_lengths: int32 `[vocab]`, from the tokenizer.
        separate_documents: as in `build_sequences`.
    """
    pieces: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    spans: list[SetSpan] = []
    counts: list[np.ndarray] = []
    start = first_row = 0
    for one in data.sets:
        if not one.held_out:
            continue
        rows = one.held_out_rows(0, one.held_out)
        real = rows.segment_ids >= 0
        # A document begins where the row or the segment changes; padding is one more, of which nothing is scored.
        segment = np.concatenate([np.full((len(real), 1), -2), rows.segment_ids], axis=1)
        begins = np.diff(segment, axis=1) != 0
        # A weight is that of predicting *from* a place; here, each token has its own.
        scored = np.zeros(real.shape, bool)
        scored[:, 1:] = rows.loss_weights[:, :-1] > 0
        spans.append(
            SetSpan(
                name=one.name + SUFFIX,
                tags=(one.name, one.name + SUFFIX),
                documents=int((begins & real).sum()),
                start=start,
                stop=start + real.size,
                first_row=first_row,
                rows=len(real),
                skipped=0,
                chars=0,
                stride=data.positions,
            )
        )
        pieces.append(rows.tokens.reshape(-1))
        lengths.append(np.diff(np.append(np.flatnonzero(begins), real.size)))
        counts.append((scored & real).reshape(-1))
        start, first_row = start + real.size, first_row + len(real)
    if not spans:
        return None
    return EvalSequences(
        max_length=data.positions,
        sets=tuple(spans),
        stream=np.concatenate(pieces),
        document_starts=np.cumsum(np.concatenate([[0], *lengths]))[:-1].astype(np.int64),
        byte_lengths=np.asarray(byte_lengths, np.int32),
        separate_documents=separate_documents,
        counts=np.concatenate(counts),
    )


def joined(first: EvalSequences | None, second: EvalSequences | None) -> EvalSequences | None:
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
        counts=np.concatenate([_counts(first), _counts(second)]),
    )


def _counts(sequences: EvalSequences) -> np.ndarray:
    """Whether each token is scored where it is predicted."""
    return np.ones(len(sequences.stream), bool) if sequences.counts is None else sequences.counts
