"""How often the token that is there was the likeliest one: what a greedy model would have written.

Only evaluations with conversations ask for it: it takes the output head once more.
"""

from typing import Any

import haliax as hax
import numpy as np

from levanter.models.base import LmHeadModel
from levanter.models.suffix_scores import score_targets

_POSITION, _SUFFIX = "position", "suffix"


def likeliest(
    model: LmHeadModel, activations: hax.NamedArray, targets: hax.NamedArray, *, chunk: int | None = None
) -> hax.NamedArray:
    """Whether each target is the likeliest token of the vocabulary; of equally likely ones the lowest id is.

    Args:
        model: its weights in the compute dtype.
        activations: the model's, `[batch, position, embed]`.
        targets: ids, `[batch, position]`; what is found where one is negative means nothing.
        chunk: positions at a time.

    Returns:
        bool `[batch, position]`.
    """
    found = score_targets(
        activations.rename({_POSITION: _SUFFIX}),
        model.head,
        targets.rename({_POSITION: _SUFFIX}),
        laws=(),
        chunk=chunk,
        vocab_size=model.config.vocab_size,
        soft_cap=model.config.logit_soft_cap,
    )
    ranks = found.ranks.rename({_SUFFIX: _POSITION})
    return hax.named(ranks.array == 0, ranks.axes).rearrange(targets.axes)


def fetched(found: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """What a Program that scores has returned for a batch: log-probabilities, and `likeliest` where asked for."""
    if isinstance(found, tuple):
        logprobs, hits = found
        return logprobs.array, hits.array
    return found.array, None
