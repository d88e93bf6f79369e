"""Windows: the stretches of a book that a model has to continue.

A *window* is `window_tokens` tokens: a *prefix*, the prompt, and a *suffix* that is scored. There are two ways to slide
over a book.

*Token mode* tokenizes the entire book once and takes every `stride_tokens`-th run of tokens, so a window begins where a
token of the book does: N = ⌊(T − n) / s⌋ + 1 windows of n tokens out of T.

*Text mode* moves a cursor by `stride_chars` characters; at each stop the next `slice_chars` characters are tokenized
separately, and the first tokens are the window if there are enough of them. A window may begin inside a word.

With `bos` the first token of every window is BOS, so the prefix has one less token of the book.

The tokens of all windows are slices of one int32 array; per window, only its start is stored.
"""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from levanter.data import Tokenizer

CHARACTERS_A_TOKEN = 4.25
"""Mean of English prose under a vocabulary of 128k entries; only for estimates if a text is unavailable."""
_SLICES_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class Windowing:
    """The settings by which a book is split into windows.

    Attributes:
        window_tokens: tokens of a window, BOS included.
        prefix_tokens: how many of them are the prompt, BOS included; the others are scored.
        token_mode: slide over tokens, not over characters.
        stride_tokens: tokens between two windows (token mode).
        stride_chars: characters between two windows (text mode).
        slice_chars: characters that are tokenized for a window (text mode).
        bos: every window begins with BOS.
        drop_duplicates: a window with the tokens of an earlier one is left out.
    """

    window_tokens: int = 100
    prefix_tokens: int = 50
    token_mode: bool = False
    stride_tokens: int = 1
    stride_chars: int = 10
    slice_chars: int = 2000
    bos: bool = False
    drop_duplicates: bool = False

    @property
    def suffix_tokens(self) -> int:
        """Tokens that are scored."""
        return self.window_tokens - self.prefix_tokens

    @property
    def text_tokens(self) -> int:
        """Tokens of a window that come from the book."""
        return self.window_tokens - int(self.bos)

    def problems(self) -> list[str]:
        """Problems of the settings, each with its configuration key."""
        messages = []
        if not 0 < self.prefix_tokens < self.window_tokens:
            messages.append(
                f"prompt_tokens: a window has a prefix and a suffix, so prompt_tokens must be between 1 and "
                f"chunk_size − 1; "
                f"got prompt_tokens {self.prefix_tokens} of chunk_size {self.window_tokens}"
            )
        for name, value in (
            ("cursor_inc_tokens", self.stride_tokens),
            ("cursor_inc_chars", self.stride_chars),
            ("slice_length", self.slice_chars),
        ):
            if value < 1:
                messages.append(f"{name}: must be at least 1, got {value}")
        return messages

    def count(self, tokens: int) -> int:
        """How many windows a book of `tokens` tokens has: exact in token mode, an estimate in text mode."""
        if self.token_mode:
            # A window needs `text_tokens` tokens behind its start; a shorter book has none.
            return max(0, (tokens - self.text_tokens) // self.stride_tokens + 1)
        return self.count_in_text(int(tokens * CHARACTERS_A_TOKEN))

    def count_in_text(self, characters: int) -> int:
        """An estimate of how many windows a book of `characters` characters has."""
        if self.token_mode:
            return self.count(int(characters / CHARACTERS_A_TOKEN))
        last = characters - self.text_tokens * CHARACTERS_A_TOKEN
        # The last cursor must leave enough characters for a window, by the mean length of a token.
        return max(0, int(last // self.stride_chars) + 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Windows:
    """N windows of one book, in order.

    Attributes:
        windowing: the settings of the windows.
        ids: int32, the tokens that windows are slices of.
        starts: int64 `[N]`, where each begins in `ids`.
        bos_id: the token that each begins with, if `windowing.bos`.
        token_spans: int64 `[N, 2]`, the window's tokens among the book's; −1 in text mode.
        char_spans: int64 `[N, 2]`, the window's characters in the book (start, stop).
        suffix_char_spans: int64 `[N, 2]`, the suffix's.
        duplicates: how many were left out because an earlier one has the same tokens.
    """

    windowing: Windowing
    ids: np.ndarray = field(repr=False)
    starts: np.ndarray = field(repr=False)
    bos_id: int | None
    token_spans: np.ndarray = field(repr=False)
    char_spans: np.ndarray = field(repr=False)
    suffix_char_spans: np.ndarray = field(repr=False)
    duplicates: int = 0

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, rows: np.ndarray) -> np.ndarray:
        """The tokens of some windows, int32 `[rows, window_tokens]`."""
        # BOS is not in `ids`; it is added here, so overlapping windows can share the book's tokens.
        tokens = self.ids[self.starts[rows][:, None] + np.arange(self.windowing.text_tokens)]
        if not self.windowing.bos:
            return tokens
        assert self.bos_id is not None
        return np.concatenate([np.full((len(tokens), 1), self.bos_id, np.int32), tokens], axis=1)

    def left_padding(self, rows: np.ndarray) -> None:
        """Windows of a book have no padding."""
        del rows

    def only(self, rows: np.ndarray) -> "Windows":
        """Some of these windows."""
        return Windows(
            windowing=self.windowing,
            ids=self.ids,
            starts=self.starts[rows],
            bos_id=self.bos_id,
            token_spans=self.token_spans[rows],
            char_spans=self.char_spans[rows],
            suffix_char_spans=self.suffix_char_spans[rows],
            duplicates=self.duplicates,
        )


def build_windows(
    text: str,
    tokenizer: Tokenizer,
    windowing: Windowing,
    *,
    max_windows: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Windows:
    """Splits a book into windows.

    Args:
        text: the book.
        tokenizer: the model's.
        windowing: the settings.
        max_windows: the maximum number of windows, from the beginning of the book; None for all.
        on_progress: called with the number of characters done.

    Raises:
        ValueError: BOS is requested but the tokenizer has none, or the book has no window.
    """
    if windowing.bos and tokenizer.bos_id is None:
        raise ValueError(f"bos: the tokenizer {tokenizer.name} has no BOS token; set bos: false")
    cut = _in_tokens if windowing.token_mode else _in_text
    windows = cut(text, tokenizer, windowing, max_windows, on_progress or (lambda _: None))
    if not len(windows):
        raise ValueError(
            f"the text has no window of {windowing.text_tokens} tokens: it has {len(text):,} characters"
            + ("" if windowing.token_mode else f", taken {windowing.slice_chars:,} at a time (slice_length)")
        )
    return windows


def _in_tokens(
    text: str, tokenizer: Tokenizer, windowing: Windowing, limit: int | None, on_progress: Callable[[int], None]
) -> Windows:
    ids, offsets = tokenizer.encode_with_offsets(text)
    on_progress(len(text))
    starts = np.arange(windowing.count(len(ids)), dtype=np.int64) * windowing.stride_tokens
    ends = starts + windowing.text_tokens
    # The suffix is the last `suffix_tokens` tokens of the window, with or without BOS.
    suffixes = ends - windowing.suffix_tokens
    # Offsets are characters of the book: start of the first token, end of the last.
    offsets = offsets.astype(np.int64)
    windows = Windows(
        windowing=windowing,
        ids=ids,
        starts=starts,
        bos_id=tokenizer.bos_id if windowing.bos else None,
        token_spans=np.stack([starts, ends], axis=1),
        char_spans=np.stack([offsets[starts, 0], offsets[ends - 1, 1]], axis=1),
        suffix_char_spans=np.stack([offsets[suffixes, 0], offsets[ends - 1, 1]], axis=1),
    )
    if windowing.drop_duplicates:
        windows = _without_duplicates(windows)
    return windows.only(np.arange(len(windows))[:limit])


def _in_text(
    text: str, tokenizer: Tokenizer, windowing: Windowing, limit: int | None, on_progress: Callable[[int], None]
) -> Windows:
    length = windowing.text_tokens
    first_of_suffix = length - windowing.suffix_tokens
    tokens: list[np.ndarray] = []
    # `text_tokens` excludes BOS, which belongs to the prefix.
    spans: list[tuple[int, int, int]] = []
    seen: set[bytes] = set()
    duplicates = 0
    for cursor, ids, offsets in _slices(text, tokenizer, windowing):
        if len(tokens) == limit:
            break
        # About every 10,000 characters; a cursor need not hit a multiple.
        if cursor % 10_000 < windowing.stride_chars:
            on_progress(cursor)
        if len(ids) < length:
            continue
        window = ids[:length]
        if windowing.drop_duplicates:
            # Only the tokens decide: the same words at another place are the same window.
            key = window.tobytes()
            if key in seen:
                duplicates += 1
                continue
            seen.add(key)
        tokens.append(window)
        stop = int(offsets[length - 1, 1])
        # Offsets are within the slice, so the cursor is added.
        spans.append((cursor + int(offsets[0, 0]), cursor + int(offsets[first_of_suffix, 0]), cursor + stop))
    on_progress(len(text))
    span = np.array(spans, np.int64).reshape(-1, 3)
    return Windows(
        windowing=windowing,
        ids=np.concatenate(tokens) if tokens else np.zeros(0, np.int32),
        # Windows of separate slices share no tokens, so each has its own stretch of `ids`.
        starts=np.arange(len(tokens), dtype=np.int64) * length,
        bos_id=tokenizer.bos_id if windowing.bos else None,
        token_spans=np.full((len(tokens), 2), -1, np.int64),
        char_spans=span[:, [0, 2]],
        suffix_char_spans=span[:, [1, 2]],
        duplicates=duplicates,
    )


def _slices(text: str, tokenizer: Tokenizer, windowing: Windowing) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Each cursor with the ids and spans of its slice. Tokenizers release the GIL, so threads help."""
    cursors = iter(range(0, len(text), windowing.stride_chars))

    def encode(cursor: int) -> tuple[int, np.ndarray, np.ndarray]:
        return cursor, *tokenizer.encode_with_offsets(text[cursor : cursor + windowing.slice_chars])

    with ThreadPoolExecutor(thread_name_prefix="tokenize") as pool:
        # A bounded number of slices at a time: `pool.map` would submit all of them at once.
        while batch := list(itertools.islice(cursors, _SLICES_AT_ONCE)):
            yield from pool.map(encode, batch)


def _without_duplicates(windows: Windows) -> Windows:
    seen: set[bytes] = set()
    first_rows = []
    for row, start in enumerate(windows.starts):
        key = windows.ids[start : start + windows.windowing.text_tokens].tobytes()
        if key not in seen:
            seen.add(key)
            first_rows.append(row)
    unique = windows.only(np.array(first_rows, np.int64))
    return Windows(**{**unique.__dict__, "duplicates": len(windows) - len(unique)})
