"""Heat maps: for every character of a book, the p_z of the likeliest window that spans it.

`character_heat` is log max p_z over the spans that contain a character, −inf if none does. `shade` turns it into ink
between 0 (white) and 1 (dark): on a logarithmic scale everything below the threshold τ is white, τ itself is the
lightest ink and p_z = 1 the darkest; on a linear one ink is p_z itself. On the `token` scale, ink is the mean log p of
a suffix token, from `FLOOR` to 0, whatever the threshold: it also distinguishes text that is far from memorized.

The maximum over many overlapping ranges is computed like a sparse table in reverse: a span of length L is the union of
two (overlapping) spans whose length is the largest power of two ≤ L. All spans are entered into the table of their
power of two; then each table, from the largest down, passes its maxima on to the two halves in the next one. That is
O(N + C log L) in whole-array operations for N spans over C characters.
"""

from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from levanter.memorization.coverage import checked_spans

Scale = Literal["log", "linear", "token"]
LIGHTEST = 0.1
"""The ink at the threshold: enough to be distinguished from white."""
FLOOR = -8.0
"""The log p per token that is white on the `token` scale; a guess among 3,000 tokens."""


def character_heat(log_pz: ArrayLike, spans: np.ndarray, characters: int) -> np.ndarray:
    """Per character, the largest log p_z of the spans that contain it: float64 `[characters]`, −inf if none does.

    Args:
        log_pz: `[N]`.
        spans: int `[N, 2]`, half-open character ranges; empty ones count for nothing.
        characters: the text's length.

    Raises:
        ValueError: a span that is not within the text.
    """
    spans = checked_spans(spans, characters)
    values = np.asarray(log_pz, dtype=np.float64)
    length = spans[:, 1] - spans[:, 0]
    nonempty = length > 0
    start, stop, length, values = spans[nonempty, 0], spans[nonempty, 1], length[nonempty], values[nonempty]
    heat = np.full(characters, -np.inf)
    if length.size == 0:
        return heat
    # The exponent of the largest power of two ≤ length (exact: lengths are far below 2^53).
    level = np.frexp(length.astype(np.float64))[1] - 1
    upper: np.ndarray | None = None
    for power in range(int(level.max()), -1, -1):
        # table[i] is the maximum of the spans [i, i + 2^power); `upper` is the table of the next larger power.
        table = np.full(characters, -np.inf)
        if upper is not None:
            half = 1 << power
            # A span of length 2^(power + 1) at i has its halves at i and at i + 2^power.
            np.maximum(table, upper, out=table)
            np.maximum(table[half:], upper[:-half], out=table[half:])
        mask = level == power
        # `maximum.at` because several windows may begin at the same character.
        np.maximum.at(table, start[mask], values[mask])
        np.maximum.at(table, stop[mask] - (1 << power), values[mask])
        upper = table
    assert upper is not None
    # At power 0 a span is a single character.
    return upper


def shade(heat: ArrayLike, *, log_threshold: float, scale: Scale = "log", tokens: int = 1) -> np.ndarray:
    """Ink in [0, 1] for log-probabilities: float64 of the same shape.

    Args:
        heat: log p_z; −inf is white.
        log_threshold: log τ.
        scale: `log` is 0 below τ, and from there rises with log p_z from `LIGHTEST` to 1; `linear` is p_z; `token` is
            log p per token.
        tokens: of a suffix, for `token`.

    Raises:
        ValueError: an unknown scale.
    """
    heat = np.asarray(heat, dtype=np.float64)
    if scale == "linear":
        return np.exp(heat)
    if scale == "token":
        return np.clip(1.0 - heat / tokens / FLOOR, 0.0, 1.0)
    if scale != "log":
        raise ValueError(f"scale: {scale!r} is not one of {', '.join(get_args(Scale))}")
    # τ = 1, or above it after a calibration: the logarithmic scale has no range, so only full ink remains.
    if log_threshold >= 0:
        return np.where(heat >= log_threshold, 1.0, 0.0)
    # heat / log τ is 1 at τ and 0 at p_z = 1, so the ink rises from `LIGHTEST` to 1.
    ink = LIGHTEST + (1.0 - LIGHTEST) * (1.0 - heat / log_threshold)
    return np.where(heat >= log_threshold, ink, 0.0)


def columns(ink: np.ndarray, width: int) -> np.ndarray:
    """The mean ink of each of `width` equal parts of the text: the columns of a picture of that many pixels.

    A part may begin within a character, which then counts for both parts in proportion. A text shorter than `width`
    gives columns that repeat.
    """
    assert width > 0
    if ink.size == 0:
        return np.zeros(width)
    edges = np.linspace(0.0, ink.size, width + 1)
    # The integral of ink up to each edge, interpolated within a character; differences of it are sums over the columns.
    total = np.interp(edges, np.arange(ink.size + 1), np.concatenate([[0.0], np.cumsum(ink)]))
    return np.clip(np.diff(total) / np.diff(edges), 0.0, 1.0)
