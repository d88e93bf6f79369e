"""The `Tokenizer` protocol of evaluation, training and memorization.

Evaluation and memorization see only this protocol; `compat/hf` implements it and the commands pass it in. Ids come
without special tokens. Training, evaluation and memorization add BOS and EOS by their configuration
(`data.enforce_bos`, `data.enforce_eos`, `bos`); generation, serving and the harness add what the tokenizer's files put
around a text (`Tokenizer.frame`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np


@dataclass(frozen=True)
class TextFrame:
    """The special tokens that a tokenizer's files put around a text.

    Attributes:
        prefix: the ids before a text.
        suffix: the ids after it.
    """

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    def around(self, ids: Iterable[int]) -> list[int]:
        """The ids of a text with its special tokens."""
        return [*self.prefix, *ids, *self.suffix]

    def with_bos(self, bos: int | None, *, enforce: bool | None) -> "TextFrame":
        """The same with or without BOS at its beginning.

        Args:
            bos: the id of BOS; None if the tokenizer has none.
            enforce: whether a text begins with BOS; None for what the files decide.

        Raises:
            ValueError: BOS is required, and the tokenizer has none.
        """
        begins = bos is not None and self.prefix[:1] == (bos,)
        if enforce is None or enforce == begins:
            return self
        if not enforce:
            return TextFrame(self.prefix[1:], self.suffix)
        if bos is None:
            raise ValueError("enforce_bos: true, and the files of the tokenizer name no BOS token (bos_token)")
        return TextFrame((bos, *self.prefix), self.suffix)


def empty_text_ids(tokenizer: "Tokenizer", frame: TextFrame) -> tuple[int, ...]:
    """The ids of a prompt without text: its special tokens, or else BOS, which a model needs to begin a text.

    Args:
        tokenizer: of the model.
        frame: the special tokens around a text.

    Returns:
        The ids; empty if there are no special tokens and the tokenizer has no BOS.
    """
    ids = tuple(frame.around(()))
    return ids if ids or tokenizer.bos_id is None else (tokenizer.bos_id,)


EMPTY_PROMPT_NOTE = "a prompt without text begins with BOS, which this tokenizer does not write by itself"


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

    @property
    def frame(self) -> TextFrame:
        """The special tokens that the tokenizer's files put around a text."""
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

    def byte_counts(self, text: str, ids: np.ndarray) -> np.ndarray | None:
        """The number of UTF-8 bytes of a text that each of its ids stands for, int32 `[n]`; their sum is the text's.

        None where the ids do not spell the text: part of it is unknown, or was changed before it was tokenized.
        """
        ...

    def lost_text(self, ids: np.ndarray) -> str | None:
        """Why `byte_lengths` of ids whose text is not at hand may not be the bytes of their text; None where they are.

        Args:
            ids: int32 `[n]`.
        """
        ...

    @property
    def adds_space(self) -> bool:
        """Whether the first token of a text begins with a space that the text does not have."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of a sequence of ids."""
        ...

    def stream(self, context: Sequence[int] = (), *, special: bool = False) -> TextStream:
        """A new stream, which decodes ids one by one.

        Args:
            context: the ids of a prompt that the text continues; empty where the text begins.
            special: whether special tokens are part of the text.
        """
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
    def chat_templates(self) -> Mapping[str, str]:
        """All chat templates by name; a single one is `default`."""
        ...

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """Special tokens by name (`bos_token`, …), for chat templates."""
        ...

    @property
    def added_ids(self) -> frozenset[int]:
        """The ids that were added to the vocabulary, most of which do not occur in ordinary text."""
        ...


def bos_note(tokenizer: Tokenizer, *, enforce: bool, what: str, key: str) -> str | None:
    """A line for a run whose texts begin with a BOS that the tokenizer's own files do not put there.

    Args:
        tokenizer: the tokenizer of the run.
        enforce: whether the run's texts begin with BOS, if the tokenizer has one.
        what: one of the run's texts, in words.
        key: the key that decides.
    """
    if not enforce or tokenizer.bos_id is None or tokenizer.bos_id in tokenizer.frame.prefix:
        return None
    return f"BOS before each {what} (`{key}`), which this tokenizer does not write by itself"
