"""Held-out rows: validation sets taken off the training data (`data.num_validation_sequences`).

They are rows as training would have seen them, and stay these rows: scored is what training would have predicted in
them, from the same context. For evaluation they are sets like any other, `<set>/held_out`.
"""

import numpy as np

from levanter.data.eval_sequences import EvalSequences
from levanter.data.row_windows import RowSet, row_sequences
from levanter.data.train_dataset import TrainingData

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
    sets = [
        RowSet(
            name=one.name + SUFFIX,
            tags=(one.name, one.name + SUFFIX),
            rows=one.held_out_rows(0, one.held_out),
        )
        for one in data.sets
        if one.held_out
    ]
    return row_sequences(sets, byte_lengths, positions=data.positions, separate_documents=separate_documents)
