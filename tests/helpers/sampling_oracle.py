"""What sampling should do, by sorting, in float64, one row at a time."""

from collections.abc import Mapping, Sequence

import mpmath
import numpy as np

from levanter.inference.requests import SamplingParams


def changed(
    logits: np.ndarray,
    params: SamplingParams,
    *,
    generated: Sequence[int] = (),
    prompt: Sequence[int] = (),
    stop_ids: Sequence[int] = (),
    ends_allowed: bool = True,
) -> np.ndarray:
    """The logits of one row `[vocab]` after biases and penalties, before the temperature."""
    x = logits.astype(np.float64).copy()
    for i, bias in params.logit_bias.items():
        x[i] += bias
    times: Mapping[int, int] = {i: list(generated).count(i) for i in set(generated)}
    for i in {*generated, *prompt}:
        x[i] = x[i] / params.repetition_penalty if x[i] > 0 else x[i] * params.repetition_penalty
    for i, count in times.items():
        x[i] -= params.presence_penalty + params.frequency_penalty * count
    if not ends_allowed:
        x[list(stop_ids)] = -np.inf
    return x


def probabilities(x: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution that a token is drawn from, given changed logits `[vocab]`."""
    if params.temperature == 0:
        return (np.arange(len(x)) == int(np.argmax(x))).astype(np.float64)
    x = x / params.temperature
    p = np.exp(x - x.max())
    kept = np.ones(len(x), bool)
    if params.top_k > 0:
        kept &= x >= np.sort(x)[::-1][min(params.top_k, len(x)) - 1]
    if params.top_p < 1:
        left = np.where(kept, p, 0) / p[kept].sum()
        order = np.argsort(-left, kind="stable")
        last = order[np.searchsorted(np.cumsum(left[order]), params.top_p)]
        kept &= x >= x[last]
    kept &= p >= params.min_p
    p = np.where(kept, p, 0)
    return p / p.sum()


def p_value(drawn: np.ndarray, expected: np.ndarray) -> float:
    """The probability of draws at least as unlikely, by χ².

    Args:
        drawn: ids.
        expected: the probability of each id. Those expected fewer than 5 times are counted together.
    """
    count = np.bincount(drawn, minlength=len(expected)).astype(np.float64)
    assert not count[expected == 0].any(), "an id was drawn that must not be"
    mean = expected * len(drawn)
    rare = mean < 5
    count = np.append(count[~rare], count[rare].sum())
    mean = np.append(mean[~rare], mean[rare].sum())
    if mean[-1] < 5:
        # Too few even together: with the rarest of the others.
        least = int(np.argmin(mean[:-1]))
        count[least] += count[-1]
        mean[least] += mean[-1]
        count, mean = count[:-1], mean[:-1]
    statistic = float(((count - mean) ** 2 / mean).sum())
    return float(mpmath.gammainc((len(mean) - 1) / 2, statistic / 2, mpmath.inf, regularized=True))
