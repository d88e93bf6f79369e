"""Book results made by hand: windows over a text whose tokens are single UTF-8 bytes or whole characters."""

import numpy as np

from levanter.memorization.results import FULL, BookResult, Scheme


def byte_spans(text: str) -> np.ndarray:
    """The character range of every byte of a text, int64 `[bytes, 2]`: a character of three bytes appears thrice."""
    lengths = [len(character.encode()) for character in text]
    at = np.repeat(np.arange(len(text), dtype=np.int64), lengths)
    return np.stack([at, at + 1], axis=1)


def window_spans(token_spans: np.ndarray, starts: np.ndarray, first: int, last: int) -> np.ndarray:
    """The characters of tokens `start + first … start + last − 1` of each window."""
    return np.stack([token_spans[starts + first, 0], token_spans[starts + last - 1, 1]], axis=1).astype(np.int64)


def book_of_bytes(
    text: str,
    log_pz: np.ndarray | None = None,
    *,
    prefix: int = 4,
    suffix: int = 3,
    stride: int = 2,
    seed: int = 0,
    title: str = "A Book",
    preset: str = "levanter",
    scheme: Scheme = FULL,
    model: str = "a-model",
) -> BookResult:
    """A book whose tokens are bytes, with the given log p_z under the whole vocabulary (default: random ones)."""
    spans = byte_spans(text)
    starts = np.arange(0, len(spans) - prefix - suffix + 1, stride)
    random = np.random.default_rng(seed)
    if log_pz is None:
        logprobs = -random.exponential(2.0, (len(starts), suffix))
    else:
        assert len(log_pz) == len(starts), (len(log_pz), len(starts))
        logprobs = np.repeat(np.asarray(log_pz)[:, None] / suffix, suffix, axis=1)
    logprobs = logprobs.astype(np.float32)
    return BookResult(
        title=title,
        preset=preset,
        scheme=scheme,
        manifest={"model": model, "identity": {"text.characters": len(text)}},
        text=text,
        prefix_tokens=prefix,
        suffix_tokens=suffix,
        token_spans=np.stack([starts, starts + prefix + suffix], axis=1).astype(np.int64),
        char_spans=window_spans(spans, starts, 0, prefix + suffix),
        suffix_char_spans=window_spans(spans, starts, prefix, prefix + suffix),
        logprobs=logprobs,
        # Likely tokens rank first; the top 40 have all the probability that the token's own rank leaves them.
        ranks=np.where(logprobs > -0.5, 0, np.where(logprobs > -4, 7, 60)).astype(np.int32),
        top_lse=np.maximum(logprobs, np.float32(-0.05)).astype(np.float32),
    )
