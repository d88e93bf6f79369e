"""How often the token that is there was the likeliest one: what a greedy model would have written.

Only evaluations with conversations ask for it. It is read off the logits of which log-probabilities are made
(`models.scoring.token_hits`).
"""

from typing import Any

import numpy as np


def fetched(found: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """What a Program that scores has returned for a batch: log-probabilities, and hits where these were asked for."""
    if isinstance(found, tuple):
        logprobs, hits = found
        return logprobs.array, hits.array
    return found.array, None
