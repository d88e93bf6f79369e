"""`PassthroughTokenizer`: texts that already are token ids, written as decimal numbers separated by spaces.

`data.tokenizer: passthrough` with `data.vocab_size`. The numbers stand for no text, so there are no bits per byte, and
no BOS or EOS is added to a document.
"""

import hashlib
import re
from collections.abc import Sequence

import numpy as np

from levanter.data.errors import DataError
from levanter.data.incremental_detokenizer import WindowStream
from levanter.data.tokenizer import TextFrame, TextStream

_NUMBER = re.compile(r"\S+")


class PassthroughTokenizer:
    """Implements `Tokenizer` for ids as text.

    Args:
        vocab_size: the number of ids.
    """

    name = "passthrough"
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    frame = TextFrame()

    def __init__(self, vocab_size: int):
        if vocab_size < 1:
            raise ValueError(f"data.vocab_size must be at least 1, got {vocab_size}")
        self.vocab_size = vocab_size

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The int32 ids that each text lists."""
        return [self._ids(text) for text in texts]

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The ids `[n]` and, for each, the `[n, 2]` span of the digits that spell it."""
        spans = np.array([match.span() for match in _NUMBER.finditer(text)], np.int64).reshape(-1, 2)
        return self._ids(text), spans

    def byte_lengths(self) -> np.ndarray:
        """Zeros: the bytes that an id stands for are not known."""
        return np.zeros(self.vocab_size, np.int32)

    def byte_counts(self, text: str, ids: np.ndarray) -> np.ndarray | None:
        """None: the numbers stand for no text."""
        del text, ids
        return None

    def lost_text(self, ids: np.ndarray) -> str | None:
        """The reason why there are no bytes."""
        del ids
        return "the ids of tokenizer passthrough stand for no text"

    adds_space = False

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The ids in decimal digits, separated by spaces."""
        return " ".join(str(int(i)) for i in ids)

    def stream(self, context: Sequence[int] = (), *, special: bool = False) -> TextStream:
        """A stream of numbers, as text."""
        del special
        return WindowStream(self.decode, context=context)

    @property
    def hash(self) -> str:
        """Hex SHA-256 of the tokenizer's kind and vocabulary size."""
        return hashlib.sha256(f"passthrough {self.vocab_size}".encode()).hexdigest()

    def _ids(self, text: str) -> np.ndarray:
        try:
            # int64, so that a number beyond int32 is reported below instead of wrapping around; NumPy parses the
            # digits.
            ids = np.array(text.split(), np.int64)
        except (ValueError, OverflowError) as error:
            raise DataError(
                f"tokenizer passthrough: expected ids below {self.vocab_size} separated by spaces, got {text[:40]!r}"
            ) from error
        outside = ids[(ids < 0) | (ids >= self.vocab_size)]
        if len(outside):
            raise DataError(f"tokenizer passthrough: id {outside[0]} is outside data.vocab_size {self.vocab_size}")
        return ids.astype(np.int32)
