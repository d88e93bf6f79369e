"""Encoders: a record of some format → token ids, and the weight of each position in the loss.

A weight belongs to the position *from* which a token is predicted, as everywhere in training: `weights[t]` counts the
prediction of `ids[t + 1]`. Plain text has no weights: every token after a document's first counts. Records of the other
formats are JSON values (or rows of Parquet) with their origin (file and position):

- `prebuilt`: ids as they are, and weights as they are if the record has them.
- `supervised`: BOS, input, target, EOS. With `mask_inputs` only what predicts the target and EOS counts.
- `chat`: in `conversations`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from levanter.data.errors import DataError
from levanter.data.formats import PrebuiltLmDatasetFormat, SupervisedLmDatasetFormat
from levanter.data.readers import Document
from levanter.data.record_values import record_value
from levanter.data.store_write import Encoded
from levanter.data.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class TextEncoder:
    """Encodes plain documents: BOS, text, EOS.

    Attributes:
        tokenizer: text to ids.
        bos, eos: the ids added before and after each document; None for none.
        vocab_size: the number of ids.
    """

    tokenizer: Tokenizer
    bos: int | None
    eos: int | None
    vocab_size: int

    def chars(self, record: Document) -> int:
        """The characters of the document."""
        return len(record.text)

    def encode(self, records: Sequence[Document]) -> list[Encoded]:
        """The ids of each document.

        Raises:
            DataError: an id outside the model's vocabulary.
        """
        before = np.array([] if self.bos is None else [self.bos], np.int32)
        after = np.array([] if self.eos is None else [self.eos], np.int32)
        documents = []
        for record, ids in zip(records, self.tokenizer.encode_batch([r.text for r in records]), strict=True):
            # The ids of the text only: BOS and EOS are the tokenizer's own and in its vocabulary.
            check_ids(ids, record.origin, self.tokenizer, self.vocab_size)
            documents.append(Encoded(np.concatenate([before, np.asarray(ids, np.int32), after])))
        return documents


def check_ids(ids: np.ndarray, origin: str, tokenizer: Tokenizer | None, vocab_size: int) -> None:
    """Raises a `DataError` if an id is outside the vocabulary."""
    if len(ids) and (int(ids.max()) >= vocab_size or int(ids.min()) < 0):
        outside = ids[(ids < 0) | (ids >= vocab_size)][0]
        source = "the ids" if tokenizer is None else f"tokenizer {tokenizer.name} ({tokenizer.vocab_size} ids)"
        raise DataError(
            f"{origin}: token id {outside} is outside the model's vocabulary of {vocab_size}; {source} and model do "
            "not match"
        )


Record = tuple[Any, str]
"""A JSON value with its origin."""


@dataclass(frozen=True, kw_only=True)
class PrebuiltEncoder:
    """Encodes records that already hold ids.

    Attributes:
        format: the keys of a record.
        vocab_size: the number of ids.
    """

    format: PrebuiltLmDatasetFormat
    vocab_size: int

    def chars(self, record: Record) -> int:
        """The number of ids in the record, used as its number of characters."""
        value, origin = record
        return len(record_value(value, self.format.input_ids_key, list, origin))

    def encode(self, records: Sequence[Record]) -> list[Encoded]:
        """The ids and weights of each record.

        Raises:
            DataError: ids that are not whole numbers or are outside the vocabulary; weights of another length.
        """
        return [self._encoded(value, origin) for value, origin in records]

    def _encoded(self, value: object, origin: str) -> Encoded:
        key, weights_key = self.format.input_ids_key, self.format.loss_weights_key
        # int64 first: an id beyond int32 must be reported, not wrapped around into the vocabulary.
        ids = _numbers(record_value(value, key, list, origin), np.int64, key, origin)
        check_ids(ids, origin, None, self.vocab_size)
        weights = np.ones(len(ids), np.float32)
        if weights_key is not None:
            weights = _numbers(record_value(value, weights_key, list, origin), np.float32, weights_key, origin)
            if len(weights) != len(ids):
                raise DataError(f"{origin}: {len(weights)} {weights_key} for {len(ids)} {key}")
            if self.format.loss_weight_transform == "shift_left":
                # The record weighs the token itself; here a weight belongs to the position before it.
                weights = np.concatenate([weights[1:], np.zeros(1, np.float32)])
        return Encoded(ids.astype(np.int32), weights)


@dataclass(frozen=True, kw_only=True)
class SupervisedEncoder:
    """Encodes records of an input and its target.

    Attributes:
        format: the keys of a record.
        tokenizer: text to ids; input and target are tokenized separately.
        bos, eos: as in `TextEncoder`.
    """

    format: SupervisedLmDatasetFormat
    tokenizer: Tokenizer
    bos: int | None
    eos: int | None

    def chars(self, record: Record) -> int:
        """The characters of prompt and answer together."""
        return sum(map(len, self._texts(*record)))

    def encode(self, records: Sequence[Record]) -> list[Encoded]:
        """The ids and weights of each record.

        Raises:
            DataError: a key is missing or is not text.
        """
        texts = [text for record in records for text in self._texts(*record)]
        # Input and target alternate in one batch, so that the tokenizer's threads share all of the work.
        pieces = self.tokenizer.encode_batch(texts)
        return [self._encoded(pieces[i], pieces[i + 1]) for i in range(0, len(pieces), 2)]

    def _texts(self, value: object, origin: str) -> tuple[str, str]:
        separator = self.format.separate_with if isinstance(self.format.separate_with, str) else ""
        prompt = record_value(value, self.format.input_key, str, origin)
        return prompt + separator, record_value(value, self.format.target_key, str, origin)

    def _encoded(self, prompt: np.ndarray, target: np.ndarray) -> Encoded:
        separator = self.format.separate_with
        # `separate_with` is text, which joins the input before it is tokenized, or an id, which follows the input's
        # ids.
        before = [] if self.bos is None else [self.bos]
        middle = [separator] if isinstance(separator, int) else []
        after = [] if self.eos is None else [self.eos]
        ids = np.concatenate([before, prompt, middle, target, after]).astype(np.int32)
        weights = np.ones(len(ids), np.float32)
        if self.format.mask_inputs:
            # The last token of the prompt predicts the first one of the target, so its weight stays 1.
            prompt_length = len(before) + len(prompt) + len(middle)
            weights[: max(prompt_length - 1, 0)] = 0.0
        return Encoded(ids, weights)


def _numbers(values: list, dtype: type[np.generic], key: str, origin: str) -> np.ndarray:
    try:
        array = np.asarray(values) if values else np.zeros(0, dtype)
    except ValueError:
        # Lists of different lengths inside of the list, which NumPy refuses before it has a shape.
        array = np.asarray(None)
    # Ids must be integers; weights may be integers, floats or booleans. A nested list has more axes, and a list with
    # text has kind `U`.
    kinds = "iu" if np.issubdtype(dtype, np.integer) else "iufb"
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise DataError(f"{origin}: {key!r} must be a list of {'whole ' if kinds == 'iu' else ''}numbers")
    return array.astype(dtype)
