"""The `Tokenizer` protocol of evaluation, training and memorization.

Evaluation and memorization see only this protocol; `compat/hf` implements it and the commands pass it in. Ids come
without special tokens: whether a document begins with BOS or ends with EOS is decided by the data configuration, in one
place.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np


class TextStream(Protocol):
    """The text of ids that come one at a time.

    The pieces, joined, are the text of all ids decoded together.
    """

    def push(self, id: int) -> str:
        """The text that one more id completes; empty while a later id may still change it."""
        ...

    def finish(self) -> str:
        """The rest of the text: call it after the last id."""
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back, with the spans and byte counts that scoring needs."""

    @property
    def name(self) -> str:
        """The tokenizer's origin, for tables and logs."""
        ...

    @property
    def vocab_size(self) -> int:
        """The number of ids, added tokens included."""
        ...

    @property
    def bos_id(self) -> int | None:
        """The id that begins a text; None where the tokenizer has none."""
        ...

    @property
    def eos_id(self) -> int | None:
        """The id that ends a text; None where the tokenizer has none."""
        ...

    @property
    def pad_id(self) -> int | None:
        """The id of padding; None where the tokenizer has none."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The int32 ids of each text, without special tokens."""
        ...

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The int32 ids `[n]` of a text and, for each, its `[n, 2]` span of characters (start, stop)."""
        ...

    def byte_lengths(self) -> np.ndarray:
        """The number of UTF-8 bytes of each id, int32 `[vocab_size]`; 0 for special tokens."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of a sequence of ids."""
        ...

    def stream(self) -> TextStream:
        """A new stream, which decodes ids one by one, without special tokens."""
        ...

    @property
    def hash(self) -> str:
        """Hex SHA-256 of the tokenizer's definition."""
        ...


@runtime_checkable
class TemplateTokenizer(Tokenizer, Protocol):
    """A tokenizer whose files include a chat template."""

    @property
    def chat_template(self) -> str | None:
        """The chat template, in Jinja; None if the files have none."""
        ...

    @property
    def added_ids(self) -> frozenset[int]:
        """The ids that were added to the vocabulary, most of which do not occur in ordinary text."""
        ...
