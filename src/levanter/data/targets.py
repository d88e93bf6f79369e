"""Targets: what each position of a row is to predict, made on the host where a batch is put together.

No model and no loss asks what stands beside a token: rows may be packed, cut or laid out over devices in any order, and
a target stays with its position. A position that predicts nothing has `NO_TARGET`.
"""

import numpy as np

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
        targets[..., :-1][segment_ids[..., 1:] != segment_ids[..., :-1]] = NO_TARGET
    return targets
