"""Histograms of p_z: counts of windows in equal steps of log10 p_z, and of windows outside the logarithmic range.

Most windows of a book are far from memorized, so both axes are logarithmic: p_z, and the number of windows. Windows
below the lowest edge are counted together, and those with p_z = 0 (a token outside the top K) on their own.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

DECADES = 10
STEPS_PER_DECADE = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Histogram:
    """The number of windows in each range of p_z.

    Attributes:
        edges: float64 `[bins + 1]`, log10 p_z, ascending, the last one 0.
        counts: int64 `[bins]`; a bin includes its lower edge, the last one also p_z = 1.
        below: windows with 0 < p_z < the lowest edge.
        zero: windows with p_z = 0.
    """

    edges: np.ndarray
    counts: np.ndarray
    below: int
    zero: int


def histogram(log_pz: ArrayLike, *, decades: int = DECADES, steps_per_decade: int = STEPS_PER_DECADE) -> Histogram:
    """Counts windows by log10 p_z.

    Args:
        log_pz: natural logarithms ≤ 0; −inf for p_z = 0.
        decades: powers of ten below 1 that have bins.
        steps_per_decade: bins of one power of ten.
    """
    log_pz = np.asarray(log_pz, dtype=np.float64).reshape(-1)
    bins = decades * steps_per_decade
    edges = np.arange(-bins, 1) / steps_per_decade
    zero = log_pz == -np.inf
    # Edges as natural logarithms, so that a p_z given as one (log 0.001) falls where it should.
    position = np.searchsorted(edges * np.log(10.0), log_pz[~zero] + 1e-12, side="right") - 1
    # 1e-12 lifts values that rounding has put just below their edge. The last bin includes p_z = 1, which `right` puts
    # behind the last edge.
    counts = np.bincount(np.clip(position[position >= 0], 0, bins - 1), minlength=bins)
    return Histogram(edges=edges, counts=counts, below=int((position < 0).sum()), zero=int(zero.sum()))
