"""Examples: a prepared set of prompts and continuations, scored like windows of a book.

Windows that a study has prepared (rows of a prompt and its continuation) need not all have the same length. They are
aligned at their ends: each is padded on the left up to the longest, tokens do not see the padding and count their
positions from the first real token, so a row's scores do not depend on the other rows.

A row whose suffix is shorter than the longest has log-probability 0 and rank 0 beyond its end: such positions are
certain and change no p_z.

A row is a record of one of three formats: `chat` with `single_turn: true` (the user's message is the prompt, the
assistant's the continuation), `supervised` (its input and its target), `prebuilt` (`input_ids`, of which the first
`sources_len` are the prompt). Texts are tokenized separately, without special tokens and without a chat template.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from levanter.data import (
    ChatLmDatasetFormat,
    LmDatasetFormatBase,
    PrebuiltLmDatasetFormat,
    SupervisedLmDatasetFormat,
    Tokenizer,
    format_name,
)
from levanter.data.errors import DataError
from levanter.memorization.results import Scores

PROMPT_LENGTH = "sources_len"
"""The key of a prebuilt row with the number of ids of its prompt."""
_ROLES = ("user", "assistant")


@dataclass(frozen=True, kw_only=True, eq=False)
class Examples:
    """N rows, in order.

    Attributes:
        ids: int32, the tokens of all rows, one after the other.
        ends: int64 `[N]`, where each row ends in `ids`.
        lengths: int64 `[N]`, tokens of each.
        prompts: int64 `[N]`, the number of tokens of each prompt.
        pad_id: the id of the padding on the left.
    """

    ids: np.ndarray = field(repr=False)
    ends: np.ndarray = field(repr=False)
    lengths: np.ndarray = field(repr=False)
    prompts: np.ndarray = field(repr=False)
    pad_id: int = 0

    @classmethod
    def of(cls, rows: Sequence[tuple[np.ndarray, int]]) -> "Examples":
        """From pairs (tokens, how many of them are the prompt).

        Raises:
            ValueError: lists the rows without a prompt or a continuation.
        """
        # The model predicts the first suffix token from the prompt, so both parts need at least one token.
        bad = [n for n, (tokens, prompt) in enumerate(rows) if not 0 < prompt < len(tokens)]
        if bad or not rows:
            shown = ", ".join(f"row {n}: {len(rows[n][0])} tokens, prompt {rows[n][1]}" for n in bad[:5])
            raise ValueError(
                f"every row needs a prompt and a continuation; {len(bad)} of {len(rows)} lack one"
                + (f" ({shown}{', …' if len(bad) > 5 else ''})" if bad else "")
            )
        lengths = np.array([len(tokens) for tokens, _ in rows], np.int64)
        return cls(
            ids=np.concatenate([np.asarray(tokens, np.int32) for tokens, _ in rows]),
            ends=np.cumsum(lengths),
            lengths=lengths,
            prompts=np.array([prompt for _, prompt in rows], np.int64),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def positions(self) -> int:
        """Tokens of the longest row, after alignment."""
        # The token before the longest suffix must have a position, whichever row it is in.
        return int(max(self.lengths.max(), self.suffix_tokens + 1))

    @property
    def suffix_tokens(self) -> int:
        """Tokens of the longest suffix."""
        return int((self.lengths - self.prompts).max())

    @property
    def padded(self) -> bool:
        """Whether any row is shorter than the longest."""
        return bool((self.lengths < self.positions).any())

    def take(self, rows: np.ndarray) -> np.ndarray:
        """The tokens of some rows, aligned at their ends, int32 `[rows, positions]`."""
        # The last column is the last token of each row; columns before a row's first token point into the row before,
        # or below 0, and are masked.
        indices = self.ends[rows][:, None] - self.positions + np.arange(self.positions)
        real = np.arange(self.positions) >= self.left_padding(rows)[:, None]
        return np.where(real, self.ids[np.maximum(indices, 0)], np.int32(self.pad_id)).astype(np.int32)

    def left_padding(self, rows: np.ndarray) -> np.ndarray:
        """How many positions at the left of each row hold no token."""
        return (self.positions - self.lengths[rows]).astype(np.int32)

    def aligned(self, scores: Scores) -> Scores:
        """Scores whose column j is the j-th token of each row's suffix; positions beyond its end have log p = 0."""
        k = self.suffix_tokens
        lengths = (self.lengths - self.prompts)[:, None]
        column = np.arange(k)[None, :]
        # Scores are of the last k tokens, so a suffix of length l begins in column k − l; move it to column 0.
        source = np.minimum(column + (k - lengths), k - 1)
        within = column < lengths

        def move(array: np.ndarray) -> np.ndarray:
            # Zero is rank 0 and log-probability 0: a certain token, which changes neither p_z nor a top-K rule.
            return np.where(within, np.take_along_axis(array, source, axis=1), np.zeros((), array.dtype))

        return Scores.of_arrays({name: move(array) for name, array in scores.arrays.items()})

    def spans(self) -> dict[str, Any]:
        """Token spans in the concatenated rows; a prepared set has no text, so there are no character spans."""
        starts = self.ends - self.lengths
        unknown = np.full((len(self), 2), -1, np.int64)
        return {
            "token_spans": np.stack([starts, self.ends], axis=1),
            "char_spans": unknown,
            "suffix_char_spans": unknown.copy(),
        }


def prompt_pairs(records: Iterable[tuple[Any, str]], format: LmDatasetFormatBase) -> list[tuple[Any, Any]]:
    """The prompt and the continuation of each record: texts, or lists of ids.

    Raises:
        DataError: the format has no prompts, or a record does not match it (the message names the record).
    """
    if isinstance(format, ChatLmDatasetFormat) and not format.single_turn:
        raise DataError(
            "format: chat needs single_turn: true here, so that one message is the prompt and one the continuation"
        )
    if not isinstance(format, (ChatLmDatasetFormat, SupervisedLmDatasetFormat, PrebuiltLmDatasetFormat)):
        raise DataError(
            f"format: {format_name(format)} has no prompts; a prepared set must be chat (single_turn: true), "
            "supervised or prebuilt"
        )
    return [_pair(record, format, origin) for record, origin in records]


def tokenized(pairs: Sequence[tuple[Any, Any]], tokenizer: Tokenizer, *, bos: bool) -> list[tuple[np.ndarray, int]]:
    """Tokenizes each pair; returns its ids and the length of the prompt.

    Raises:
        ValueError: BOS is requested, and the tokenizer has none.
    """
    if bos and tokenizer.bos_id is None:
        raise ValueError(f"bos: the tokenizer {tokenizer.name} has no BOS token; set bos: false")
    first = [] if not bos else [tokenizer.bos_id]
    # One batch for all texts of the set, so that the tokenizer's threads are used; `next` takes the results in the same
    # order.
    texts = [text for pair in pairs for text in pair if isinstance(text, str)]
    ids = iter(tokenizer.encode_batch(texts))
    rows = []
    for pair in pairs:
        prompt, continuation = (next(ids) if isinstance(part, str) else np.asarray(part, np.int32) for part in pair)
        prompt = np.concatenate([np.asarray(first, np.int32), prompt])
        # BOS counts as a part of the prompt.
        rows.append((np.concatenate([prompt, continuation]).astype(np.int32), len(prompt)))
    return rows


def pairs_digest(pairs: Sequence[tuple[Any, Any]]) -> str:
    """SHA-256 of a prepared set."""
    digest = hashlib.sha256()
    for pair in pairs:
        digest.update(repr(pair).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _pair(record: object, format: LmDatasetFormatBase, origin: str) -> tuple[Any, Any]:
    if not isinstance(record, Mapping):
        raise DataError(f"{origin}: expected an object, found {type(record).__name__}")
    if isinstance(format, PrebuiltLmDatasetFormat):
        ids, length = _get(record, format.input_ids_key, list, origin), _get(record, PROMPT_LENGTH, int, origin)
        if not all(isinstance(i, int) and i >= 0 for i in ids):
            raise DataError(f"{origin}: {format.input_ids_key!r} is not a list of ids")
        return ids[:length], ids[length:]
    if isinstance(format, SupervisedLmDatasetFormat):
        return _get(record, format.input_key, str, origin), _get(record, format.target_key, str, origin)
    assert isinstance(format, ChatLmDatasetFormat)
    messages = _get(record, format.messages_field, list, origin)
    contents = {}
    for message in messages:
        if not isinstance(message, Mapping):
            raise DataError(f"{origin}: a message is an object with role and content, found {type(message).__name__}")
        # The first message of each role; further turns do not belong to the example.
        contents.setdefault(_get(message, "role", str, origin), _get(message, "content", str, origin))
    lacking = [role for role in _ROLES if role not in contents]
    if lacking:
        raise DataError(f"{origin}: no message of {' and '.join(lacking)}; there are {', '.join(contents) or 'none'}")
    return contents["user"], contents["assistant"]


T = TypeVar("T")


def _get(record: Mapping[str, Any], key: str, kind: type[T], origin: str) -> T:
    if key not in record:
        raise DataError(f"{origin}: no key {key!r}; it has {', '.join(map(repr, record)) or 'none'}")
    value = record[key]
    # A boolean is an `int` in Python, but `true` is no length.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise DataError(f"{origin}: {key!r} is {type(value).__name__}, expected {kind.__name__}")
    return value
