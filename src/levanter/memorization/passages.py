"""Top passages: the suffixes that a model reproduces most reliably, each with its prefix.

Windows start every few tokens, so one memorized sentence appears in dozens of windows. A *passage* is the likeliest
window of its neighbourhood: windows are taken from the likeliest down, and one whose suffix overlaps the suffix of a
passage already taken is merged into that passage. The *run* of a passage is the stretch of text around it in which
every character is covered.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from levanter.memorization.coverage import covered


@dataclass(frozen=True, kw_only=True)
class Passage:
    """One memorized suffix.

    Attributes:
        window: index of the window.
        log_pz: its log p_z.
        prefix: characters of the prompt, start and stop.
        suffix: characters that were scored, start and stop.
        merged: windows at or above the threshold whose suffix overlaps this one, itself included. A window between two
            passages counts for the likelier one.
        run: the covered stretch that the suffix lies in, start and stop.
    """

    window: int
    log_pz: float
    prefix: tuple[int, int]
    suffix: tuple[int, int]
    merged: int
    run: tuple[int, int]


def top_passages(
    log_pz: ArrayLike,
    char_spans: np.ndarray,
    suffix_spans: np.ndarray,
    characters: int,
    *,
    log_threshold: float,
    count: int = 20,
) -> tuple[Passage, ...]:
    """The likeliest passages, at most `count`, likeliest first; equally likely ones in text order.

    Args:
        log_pz: `[N]`.
        char_spans: int `[N, 2]`, characters of each whole window.
        suffix_spans: int `[N, 2]`, characters of each suffix.
        characters: the text's length.
        log_threshold: log τ; windows below it are not passages.
        count: how many at most.

    Raises:
        ValueError: spans outside the text.
    """
    log_pz = np.asarray(log_pz, dtype=np.float64)
    # A suffix without characters (special tokens only) has no place in the text.
    candidates = np.flatnonzero((log_pz >= log_threshold) & (suffix_spans[:, 1] > suffix_spans[:, 0]))
    stretches = runs(covered(suffix_spans[candidates], characters))
    # Stable, so that equally likely windows stay in text order.
    remaining = candidates[np.argsort(-log_pz[candidates], kind="stable")]
    passages = []
    while remaining.size and len(passages) < count:
        best = int(remaining[0])
        start, stop = (int(x) for x in suffix_spans[best])
        # Half-open ranges that do not intersect.
        apart = (suffix_spans[remaining, 1] <= start) | (suffix_spans[remaining, 0] >= stop)
        passages.append(
            Passage(
                window=best,
                log_pz=float(log_pz[best]),
                prefix=(int(char_spans[best, 0]), start),
                suffix=(start, stop),
                # The passage itself is among the windows that overlap it.
                merged=int(remaining.size - np.count_nonzero(apart)),
                run=_run_around(stretches, start),
            )
        )
        remaining = remaining[apart]
    return tuple(passages)


def runs(inked: np.ndarray) -> np.ndarray:
    """The covered stretches of a text: int64 `[R, 2]`, half-open, in order.

    Args:
        inked: bool `[characters]`, which characters are covered.
    """
    # +1 where a stretch begins, −1 behind its end; the added False values close stretches at both ends of the text.
    steps = np.diff(np.concatenate([[False], inked, [False]]).astype(np.int8))
    return np.stack([np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)], axis=1)


def _run_around(stretches: np.ndarray, position: int) -> tuple[int, int]:
    # The last stretch that begins at or before `at`; the suffix reaches τ, so it lies in one.
    start, stop = stretches[int(np.searchsorted(stretches[:, 0], position, side="right")) - 1]
    return int(start), int(stop)
