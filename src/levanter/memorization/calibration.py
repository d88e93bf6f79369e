"""Calibration: how low the threshold may be, and how certain a result is.

*Threshold from controls.* Texts that the model cannot have seen (published after its training, or written for the
purpose) are scored like the book. Any of their windows with p_z ≥ τ is a false positive: guessed, not
memorized. `calibrate` gives the smallest τ whose share of false positives among control windows does not exceed a
chosen rate. With N control windows the rate can only be resolved to 1/N.

*Intervals.* Windows overlap, and neighbouring passages are memorized together, so neither windows nor characters are
independent draws; an interval that treats them as such is far too narrow. The *circular block bootstrap* (Politis &
Romano 1992) resamples contiguous blocks, drawn with replacement from the sequence closed to a ring, and so preserves
the dependence between neighbours. Blocks are several windows long. Everything is seeded: the same numbers give the same
interval.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

RESAMPLES = 2000
BLOCK_WINDOWS = 8
"""Minimum block length, in window lengths."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A percentile interval from a bootstrap.

    Attributes:
        low, high: its ends.
        confidence: how often such an interval contains the true value, if blocks are long enough.
        block: elements of a block.
        resamples: how many were drawn.
    """

    low: float
    high: float
    confidence: float
    block: int
    resamples: int


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A threshold from control texts.

    Attributes:
        log_threshold: log τ; windows with log p_z at or above it count. Above 0 if more control windows than allowed
            have p_z = 1: then no window counts.
        requested: the requested false-positive rate.
        reached: the share of control windows at or above τ, at most `requested`.
        windows: how many control windows there are.
        interval: of log τ.
    """

    log_threshold: float
    requested: float
    reached: float
    windows: int
    interval: Interval

    @property
    def threshold(self) -> float:
        """τ; 0 if it is too small for a float: then every p_z > 0 counts."""
        return math.exp(self.log_threshold)


def block_length(window: float, elements: int) -> int:
    """The length of a block: `BLOCK_WINDOWS` windows, or √elements if that is more, and at most a quarter of all.

    Args:
        window: elements that one window spans (characters of a window, or windows that overlap it).
        elements: the sequence's length.
    """
    # √elements lets blocks grow with the sequence. At least four of them must fit, or all resamples are nearly the
    # same.
    block = max(math.ceil(BLOCK_WINDOWS * window), math.isqrt(elements), 1)
    return max(1, min(block, elements // 4))


def block_bootstrap(
    values: ArrayLike,
    *,
    block: int,
    resamples: int = RESAMPLES,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """A percentile interval of the mean of a sequence whose neighbours depend on each other.

    Each resample is the mean of ⌈length / block⌉ blocks; the last one is truncated, so that all resamples have the
    length of the sequence.

    Args:
        values: `[length]`, in order.
        block: elements of a block, 1 … length.
        resamples: how many means are drawn.
        confidence: in (0, 1).
        seed: of the draws.

    Raises:
        ValueError: an empty sequence; a block that is not within it; no resamples; a confidence outside (0, 1).
    """
    values = np.asarray(values, dtype=np.float64).reshape(-1)
    length = values.size
    _check(length, block=block, resamples=resamples, confidence=confidence)
    # ⌈length / block⌉ blocks, the last of them truncated to `last` elements.
    blocks = -(-length // block)
    last = length - (blocks - 1) * block
    # The ring, unrolled: the sum of any block is a difference of the running sum.
    # The first `block` values follow the last one, so that a block may begin anywhere. running[i] is the sum of the
    # first i.
    running = np.concatenate([[0.0], np.cumsum(np.concatenate([values, values[:block]]))])
    starts = np.random.default_rng(seed).integers(0, length, size=(resamples, blocks))
    sums = (running[starts[:, :-1] + block] - running[starts[:, :-1]]).sum(axis=1)
    sums += running[starts[:, -1] + last] - running[starts[:, -1]]
    low, high = np.quantile(sums / length, [(1 - confidence) / 2, (1 + confidence) / 2])
    # Differences of running sums have rounding errors; a mean cannot leave the range of its values.
    bounds = (float(values.min()), float(values.max()))
    return Interval(
        low=float(np.clip(low, *bounds)),
        high=float(np.clip(high, *bounds)),
        confidence=confidence,
        block=block,
        resamples=resamples,
    )


def calibrate(
    controls: Sequence[ArrayLike],
    *,
    false_positive_rate: float = 0.01,
    block: int = 1,
    resamples: int = 500,
    confidence: float = 0.95,
    seed: int = 0,
) -> Calibration:
    """The smallest τ at which at most `false_positive_rate` of the control windows reach it.

    Args:
        controls: log p_z of the windows of each control text, in order.
        false_positive_rate: in [0, 1); 0 puts τ just above the likeliest control window.
        block: windows of a bootstrap block; several times as many as overlap one.
        resamples, confidence, seed: of the interval.

    Raises:
        ValueError: no control windows, or a rate outside [0, 1).
    """
    values = np.concatenate([np.asarray(c, dtype=np.float64).reshape(-1) for c in controls] or [np.zeros(0)])
    if not 0 <= false_positive_rate < 1:
        raise ValueError(f"false_positive_rate must be in [0, 1), got {false_positive_rate}")
    if values.size == 0:
        raise ValueError("no control windows: τ cannot be calibrated")
    # A set of controls may be shorter than a block.
    block = min(block, values.size)
    _check(values.size, block=block, resamples=resamples, confidence=confidence)
    log_threshold = _upper_quantile(values, false_positive_rate)
    random = np.random.default_rng(seed)
    blocks = -(-values.size // block)
    offsets = np.arange(block)
    drawn = np.empty(resamples)
    for n in range(resamples):
        # The same blocks as in `block_bootstrap`, but a quantile needs the values themselves: indices `[blocks,
        # block]`, cut to the length and closed to a ring.
        indices = (random.integers(0, values.size, size=blocks)[:, None] + offsets).reshape(-1)[: values.size]
        drawn[n] = _upper_quantile(values[indices % values.size], false_positive_rate)
    # A quantile of resamples must be one of them: interpolating between τ = 0 and another is meaningless.
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2], method="nearest")
    return Calibration(
        log_threshold=log_threshold,
        requested=false_positive_rate,
        reached=float(np.mean(values >= log_threshold)),
        windows=values.size,
        interval=Interval(low=float(low), high=float(high), confidence=confidence, block=block, resamples=resamples),
    )


def _upper_quantile(values: np.ndarray, rate: float) -> float:
    """The smallest float that at most a fraction `rate` of the values reach."""
    # This many may reach it (rounding of rate × N must not lose one); the next largest may not.
    allowed = min(math.floor(rate * values.size * (1 + 1e-12) + 1e-12), values.size - 1)
    # `np.partition` puts the element of rank `at` in its sorted place; the next float above it is the smallest τ that
    # it misses.
    rank = values.size - 1 - allowed
    return float(np.nextafter(np.partition(values, rank)[rank], np.inf))


def _check(length: int, *, block: int, resamples: int, confidence: float) -> None:
    problems = []
    if length == 0:
        problems.append("nothing to resample: the sequence is empty")
    elif not 1 <= block <= length:
        problems.append(f"block must be within 1 … {length}, the sequence's length; got {block}")
    if resamples < 1:
        problems.append(f"resamples must be positive, got {resamples}")
    if not 0 < confidence < 1:
        problems.append(f"confidence must be between 0 and 1, got {confidence}")
    if problems:
        raise ValueError("\n".join(problems))
