"""Discoverability: from the probability p_z of a suffix to how many samples reveal it.

A suffix that one sample reproduces with probability p_z is produced at least once in n samples with probability
1 − (1 − p_z)^n. It is *(n, p)-discoverable* where that is at least p (Hayes et al., arXiv 2410.19482). Two questions,
each the other's inverse:

    how likely must it be?      p_z ≥ τ(n, p) = 1 − (1 − p)^(1/n) = −expm1(log1p(−p) / n)
    how many samples are needed?    n = ⌈log1p(−p) / log1p(−p_z)⌉

So the share of windows that are (n, p)-discoverable is the *survival function* of p_z at τ(n, p): with log p_z sorted
once, every point of the (n, p) surface is one binary search, and no power of anything is taken.

Everything is in logarithms, because p_z = e^-900 is an ordinary value for a suffix that was never seen. p_z = 0
(a token outside the top K) needs infinitely many samples and p_z = 1 needs one; neither is dropped.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

DEFAULT_N = tuple(2.0**e for e in range(70))
"""Sample counts of the (n, p) surface: 2^0 … 2^69, as upstream draws it (there clipped to 64-bit integers)."""
DEFAULT_P = (0.1, 0.5, 0.9, 0.99, 0.999)
# A quotient of two rounded logarithms is off by a few units in the last place; a whole number must not become the
# next one by that.
_ROUNDING = 4 * np.finfo(np.float64).eps


def log_threshold(log_n: ArrayLike, p: ArrayLike) -> np.ndarray:
    """log τ(n, p): the log of the smallest p_z that is (n, p)-discoverable.

    Args:
        log_n: natural logarithms of sample counts, so that n may exceed any float.
        p: probabilities in (0, 1); broadcasts against `log_n`.

    Raises:
        ValueError: p outside (0, 1), or n below 1.
    """
    log_n, p = np.asarray(log_n, dtype=np.float64), _probabilities(p)
    if not np.all(log_n >= 0):
        raise ValueError("n must be at least 1")
    # τ = 1 − e^(−x) with x = −log1p(−p) / n; for x below 1e-16, τ = x to the last bit.
    log_x = np.log(-np.log1p(-p)) - log_n
    # Clipped only to keep `exp` from underflowing in the branch that `where` discards.
    x = np.exp(np.maximum(log_x, -700.0))
    return np.where(log_x < -37.0, log_x, np.log(-np.expm1(-x)))


def threshold(n: ArrayLike, p: ArrayLike) -> np.ndarray:
    """τ(n, p) = −expm1(log1p(−p) / n): the smallest p_z that is (n, p)-discoverable.

    Raises:
        ValueError: p outside (0, 1), or n below 1.
    """
    n = np.asarray(n, dtype=np.float64)
    if not np.all(n >= 1):
        raise ValueError("n must be at least 1")
    return -np.expm1(np.log1p(-_probabilities(p)) / n)


def log_required_n(log_pz: ArrayLike, p: ArrayLike) -> np.ndarray:
    """The log of log1p(−p) / log1p(−p_z), before it is rounded up; finite wherever p_z > 0.

    Args:
        log_pz: log p_z ≤ 0; −inf where p_z = 0.
        p: probabilities in (0, 1); broadcasts against `log_pz`.

    Returns:
        +inf where p_z = 0, −inf where p_z = 1.
    """
    # In logarithms, so that n may be beyond float64.
    return np.log(-np.log1p(-_probabilities(p))) - _log_hazard(_log_probabilities(log_pz))


def required_n(log_pz: ArrayLike, p: ArrayLike) -> np.ndarray:
    """n = ⌈log1p(−p) / log1p(−p_z)⌉: the samples that reveal a suffix at least once with probability p.

    Args:
        log_pz: log p_z ≤ 0; −inf where p_z = 0.
        p: probabilities in (0, 1); broadcasts against `log_pz`.

    Returns:
        Whole numbers as float64 (exact up to 2^53); 1 where p_z = 1, +inf where p_z = 0 or where n is beyond float64
        (`log_required_n` is finite there).
    """
    log_pz, p = _log_probabilities(log_pz), _probabilities(p)
    # The hazard −log1p(−p_z) itself, not its log: where p_z is a round number so is the quotient. Below e^-700 floats
    # lose digits, and there the log is the better one.
    usual = np.maximum(log_pz, -700.0)
    with np.errstate(divide="ignore", over="ignore"):
        hazard = np.where(usual > -np.log(2), -np.log(-np.expm1(usual)), -np.log1p(-np.exp(np.minimum(usual, -0.5))))
        quotient = np.where(log_pz < -700.0, np.exp(log_required_n(log_pz, p)), -np.log1p(-p) / hazard)
    # Without the correction, a quotient that should be 10 and came out as 10.000000000000002 would round up to 11. At
    # least one sample is needed, even for p_z = 1.
    return np.maximum(np.ceil(quotient * (1 - _ROUNDING)), 1.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class ExtractionCurve:
    """The share of windows that are (n, p)-discoverable, for every requested n and p.

    Attributes:
        n: float64 `[n]`, sample counts.
        p: float64 `[p]`, probabilities.
        rate: float64 `[p, n]`, shares in [0, 1].
        windows: how many windows there are.
    """

    n: np.ndarray
    p: np.ndarray
    rate: np.ndarray
    windows: int


def extraction_curve(log_pz: ArrayLike, n: ArrayLike = DEFAULT_N, p: ArrayLike = DEFAULT_P) -> ExtractionCurve:
    """The (n, p) surface of some windows: the survival function of log p_z, read at log τ(n, p).

    Args:
        log_pz: log p_z of each window; −inf where p_z = 0.
        n: sample counts, at least 1.
        p: probabilities in (0, 1).

    Raises:
        ValueError: no windows; a log p_z above 0 or not a number; n or p out of range.
    """
    n, p = np.atleast_1d(np.asarray(n, dtype=np.float64)), np.atleast_1d(_probabilities(p))
    if not np.all(n >= 1):
        raise ValueError("n must be at least 1")
    ordered = np.sort(_log_probabilities(log_pz).reshape(-1))
    rate = survival(ordered, log_threshold(np.log(n), p[:, None]))
    return ExtractionCurve(n=n, p=p, rate=rate, windows=ordered.size)


def survival(ordered: np.ndarray, log_threshold: ArrayLike) -> np.ndarray:
    """The share of windows with log p_z at or above each threshold.

    Args:
        ordered: log p_z in ascending order.
        log_threshold: thresholds of any shape; a value within rounding of one counts as reaching it.

    Raises:
        ValueError: no windows.
    """
    if ordered.size == 0:
        raise ValueError("no windows: a share of zero windows is undefined")
    thresholds = np.asarray(log_threshold, dtype=np.float64)
    # Relative for large |log τ|, absolute near 0: it allows for the rounding of both numbers.
    thresholds = thresholds - _ROUNDING * np.maximum(np.abs(thresholds), 1.0)
    return (ordered.size - np.searchsorted(ordered, thresholds, side="left")) / ordered.size


def max_extraction_rate(log_pz: ArrayLike, *, top_k: int | None) -> float | None:
    """The share of windows that some number of samples reveals (n → ∞): those with p_z > 0.

    Returns:
        None for the full vocabulary (`top_k=None`), under which every suffix has p_z > 0 and the limit is meaningless.

    Raises:
        ValueError: no windows.
    """
    log_pz = _log_probabilities(log_pz)
    if log_pz.size == 0:
        raise ValueError("no windows: a share of zero windows is undefined")
    return None if top_k is None else float(np.mean(log_pz > -np.inf))


def expected_rate(log_pz: ArrayLike) -> float:
    """The mean of p_z: the share of windows that one sample each is expected to reveal."""
    log_pz = _log_probabilities(log_pz)
    if log_pz.size == 0:
        raise ValueError("no windows: a share of zero windows is undefined")
    return float(np.mean(np.exp(log_pz)))


def _log_hazard(log_pz: np.ndarray) -> np.ndarray:
    """log(−log1p(−p_z)); +inf at p_z = 1, −inf at p_z = 0."""
    with np.errstate(divide="ignore"):
        # Near 1: 1 − p_z is −expm1(log p_z). In between: as written. Below e^-37, −log1p(−p_z) = p_z to the last bit.
        # The clipping keeps each branch in its own range; `where` below selects the branch that is exact for the value.
        near_one = np.log(-np.log(-np.expm1(np.maximum(log_pz, -1.0))))
        middle = np.log(-np.log1p(-np.exp(np.clip(log_pz, -40.0, -0.5))))
    return np.where(log_pz > -np.log(2), near_one, np.where(log_pz > -37.0, middle, log_pz))


def _probabilities(p: ArrayLike) -> np.ndarray:
    p = np.asarray(p, dtype=np.float64)
    if not np.all((p > 0) & (p < 1)):
        raise ValueError(f"p must be strictly between 0 and 1, got {p.tolist()}")
    return p


def _log_probabilities(log_pz: ArrayLike) -> np.ndarray:
    log_pz = np.asarray(log_pz, dtype=np.float64)
    if not np.all(log_pz <= 0):
        invalid = log_pz[~(log_pz <= 0)].reshape(-1)[0]
        raise ValueError(f"log p_z must be at most 0 (they are logarithms of probabilities); found {invalid}")
    return log_pz
