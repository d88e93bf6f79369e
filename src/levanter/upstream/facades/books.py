"""`levanter.books.util` of the 2025 generation: rates of discoverable windows, and sliding windows of a text.

The rates come from `levanter.memorization.discoverability`, which computes with logarithms: unlike upstream's, they do
not round p_z below 1e-16 to 0, and large sample counts need no clipping.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from levanter.memorization.discoverability import DEFAULT_N, DEFAULT_P, extraction_curve, required_n

Rates = list[list[tuple[float, float, int]]]


def compute_extraction_rates(
    pz_list: Iterable[float], n_list: Iterable[float] | None = None, p_list: Iterable[float] | None = None
) -> Rates:
    """The share of windows that n samples reveal with probability p: for each p, a list of (rate, p, n)."""
    # Upstream's default sample counts; `discoverability` has powers of two.
    n = list(range(1, 10_001, 10)) if n_list is None else list(n_list)
    p = list(DEFAULT_P) if p_list is None else list(p_list)
    curve = extraction_curve(_log(pz_list), n=np.asarray(n, np.float64), p=np.asarray(p, np.float64))
    # Sample counts are Python integers of any size upstream; clipped so that callers may store them as int64.
    limit = np.iinfo(np.int64).max
    return [
        [(float(rate), float(probability), min(limit, int(count))) for rate, count in zip(rates, n, strict=True)]
        for probability, rates in zip(p, curve.rate, strict=True)
    ]


def compute_max_extraction_rates(
    pz_list: Iterable[float], n_list: Iterable[float] | None = None, p_list: Iterable[float] | None = None
) -> Rates:
    """`compute_extraction_rates` for sample counts 2^0 … 2^69."""
    return compute_extraction_rates(pz_list, DEFAULT_N if n_list is None else n_list, p_list)


def compute_n_for_pz_and_p(pz_list: Iterable[float], p: float) -> np.ndarray | int:
    """The number of samples that reveal each window with probability p; windows with p_z 0 or 1 are left out.

    Returns:
        an array of integers, or one integer if one window remains.
    """
    pz = np.asarray(list(pz_list), np.float64)
    counts = np.asarray(required_n(np.log(pz[(pz > 0) & (pz < 1)]), p)).astype(np.int64)
    # Upstream returns a scalar for one window.
    return int(counts[0]) if counts.size == 1 else counts


def compute_n_values_for_pz_and_p_list(
    pz: float, p_list: Sequence[float] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of samples that reveal one window with each of several probabilities: (p, n)."""
    p = np.arange(0.01, 1.0, 0.01) if p_list is None else np.asarray(p_list, np.float64)
    return p, np.asarray(required_n(np.log(np.float64(pz)), p)).astype(np.int64)


def compute_greedy_extraction_rate(pz_list: Iterable[float]) -> float:
    """The mean of p_z, upstream's estimate of the rate of greedy extraction."""
    return float(np.mean(np.asarray(list(pz_list), np.float64)))


OldTokenizer = Any
"""A tokenizer of ours, or of transformers; they have only `decode` in common."""


def chunk_text_to_sliding_window_token_chunks(
    text: str, tokenizer: OldTokenizer, *, chunk_size: int = 100, slice_length: int = 2000, cursor_inc: int = 10
) -> list[dict[str, Any]]:
    """Windows of `chunk_size` tokens that begin at every `cursor_inc`-th character.

    Args:
        text: the book.
        tokenizer: one of ours, or a transformers one.
        chunk_size: tokens of a window.
        slice_length: characters that are tokenized for a window.
        cursor_inc: characters between two windows.

    Returns:
        mappings with `input_ids`, `attention_mask`, `start_idx`, `end_idx` (inclusive), `text_len`, `text`.
    """
    chunks = []
    for start in range(0, len(text), cursor_inc):
        # A slice of text is tokenized for each window: its tokens
        # may differ from those of the whole text at the start.
        ids = _ids(tokenizer, text[start : start + slice_length])[:chunk_size]
        if len(ids) == chunk_size:
            chunks.append(_chunk(tokenizer, ids, start_idx=start))
    return chunks


def chunk_token_ids_to_sliding_windows(
    token_ids: Sequence[int], tokenizer: OldTokenizer, *, chunk_size: int = 100, cursor_inc: int = 5
) -> list[dict[str, Any]]:
    """Windows of `chunk_size` tokens that begin at every `cursor_inc`-th token, with `start_token` and `end_token`."""
    chunks = []
    for start in range(0, len(token_ids) - chunk_size + 1, cursor_inc):
        ids = [int(i) for i in token_ids[start : start + chunk_size]]
        chunk = _chunk(tokenizer, ids, start_idx=start)
        # This form counts tokens instead of characters.
        del chunk["start_idx"], chunk["end_idx"]
        chunks.append({**chunk, "start_token": start, "end_token": start + chunk_size - 1})
    return chunks


def _chunk(tokenizer: OldTokenizer, ids: list[int], *, start_idx: int) -> dict[str, Any]:
    decoded = tokenizer.decode(ids)
    return {
        "input_ids": ids,
        "attention_mask": [1] * len(ids),
        "start_idx": start_idx,
        # Inclusive, in characters of the decoded window.
        "end_idx": start_idx + len(decoded) - 1,
        "text_len": len(decoded),
        "text": decoded,
    }


def _ids(tokenizer: OldTokenizer, text: str) -> list[int]:
    # Only our tokenizers have this method.
    if hasattr(tokenizer, "encode_with_offsets"):
        return [int(i) for i in tokenizer.encode_batch([text])[0]]
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _log(pz_list: Iterable[float]) -> np.ndarray:
    pz = np.asarray(list(pz_list), np.float64)
    # log(0) = −inf is the right value for p_z = 0; NumPy would warn.
    with np.errstate(divide="ignore"):
        return np.log(pz)
