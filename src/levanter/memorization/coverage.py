"""Coverage: the share of a book's characters that are in a window the model reproduces.

A window *reaches* a threshold τ if p_z ≥ τ. The characters that its suffix spans are then covered; coverage is the
covered characters over all characters of the book (Cooper et al., arXiv 2505.12546, with τ = 0.1 %). Spans are
half-open character ranges and come from the tokenizer's offsets, so a character of several bytes that a token boundary
splits belongs to the windows on both sides.

Three definitions of the characters that a window covers (`Cover`):

- `suffix`: those of the suffix, which is what the model produced. This is the definition above.
- `window`: prefix and suffix. Upstream's curves use it.
- `paper_v1`: from 50 characters after the window's start up to its last character, that one left out. The first
  published code adds the *number of prefix tokens* to a *character* offset; it is available for comparison with its
  numbers.
"""

from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from levanter.memorization.results import BookResult

Cover = Literal["suffix", "window", "paper_v1"]
DEFAULT_THRESHOLD = 0.001
"""τ = 0.1 %, at which the published coverages are counted."""


def cover_spans(book: BookResult, cover: Cover = "suffix") -> np.ndarray:
    """The character ranges that a book's windows cover: int64 `[N, 2]`, half-open; possibly empty.

    Raises:
        ValueError: an unknown `cover`.
    """
    if cover == "suffix":
        return book.suffix_char_spans
    if cover == "window":
        return book.char_spans
    if cover == "paper_v1":
        # A number of tokens added to a character offset, as in the published code; the stop never falls before the
        # start.
        start = book.char_spans[:, 0] + book.prefix_tokens
        return np.stack([start, np.maximum(start, book.char_spans[:, 1] - 1)], axis=1)
    raise ValueError(f"cover: {cover!r} is not one of {', '.join(get_args(Cover))}")


def characters(book: BookResult) -> int:
    """The number of characters of the book: from its text, the manifest, or the last window's end."""
    if book.text is not None:
        return len(book.text)
    identity = book.manifest.get("identity", {})
    recorded = identity.get("text.characters") if isinstance(identity, Mapping) else None
    # Without text and manifest, nothing behind the last window is known.
    return recorded if isinstance(recorded, int) else int(book.char_spans[:, 1].max(initial=0))


def log_or_minus_inf(threshold: float) -> float:
    """log τ.

    Raises:
        ValueError: τ is outside (0, 1].
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold must be a probability in (0, 1], got {threshold} (0.1 % is 0.001)")
    return float(np.log(threshold))


def covered(spans: np.ndarray, characters: int) -> np.ndarray:
    """Which characters are in at least one span: bool `[characters]`.

    Args:
        spans: int `[M, 2]`, half-open ranges within the text.
        characters: the text's length.

    Raises:
        ValueError: a span that is not within the text.
    """
    spans = checked_spans(spans, characters)
    # +1 where a span begins, −1 where it ends: the running sum is the number of spans over a character.
    # One more entry than characters: a span may end at the end of the text.
    steps = np.bincount(spans[:, 0], minlength=characters + 1) - np.bincount(spans[:, 1], minlength=characters + 1)
    return np.cumsum(steps)[:characters] > 0


def coverage(log_pz: ArrayLike, spans: np.ndarray, characters: int, *, threshold: float = DEFAULT_THRESHOLD) -> float:
    """The share of characters in at least one span whose window has p_z ≥ threshold.

    Args:
        log_pz: `[N]`, log p_z of each window.
        spans: int `[N, 2]`, the half-open character range of each window's suffix.
        characters: the text's length.
        threshold: τ, a probability.

    Raises:
        ValueError: an empty text, a span that is not within it, different numbers of log p_z and spans, a threshold
            that is not a probability.
    """
    if characters < 1:
        raise ValueError("the text is empty: a share of an empty text is undefined")
    spans, log_pz = checked_spans(spans, characters), np.asarray(log_pz)
    if log_pz.shape != (len(spans),):
        raise ValueError(f"expected one log p_z per span: {len(spans)} spans, log p_z of shape {log_pz.shape}")
    return float(covered(spans[log_pz >= log_or_minus_inf(threshold)], characters).mean())


def checked_spans(spans: np.ndarray, characters: int) -> np.ndarray:
    """The spans as they are, if every one is a half-open range within the text; else a ValueError."""
    spans = np.asarray(spans)
    if spans.ndim != 2 or spans.shape[1] != 2:
        raise ValueError(f"spans are pairs (start, stop): expected shape [N, 2], got {list(spans.shape)}")
    invalid = (spans[:, 0] < 0) | (spans[:, 1] < spans[:, 0]) | (spans[:, 1] > characters)
    if invalid.any():
        row = int(np.argmax(invalid))
        raise ValueError(
            f"span {row} is [{spans[row, 0]}, {spans[row, 1]}), which is not a range within a text of {characters} "
            f"characters"
            f" ({int(invalid.sum())} such spans)"
        )
    return spans
