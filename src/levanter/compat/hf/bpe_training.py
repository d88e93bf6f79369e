"""Trains a byte-level BPE tokenizer with the `tokenizers` library.

The ids are those of tiktoken's ranks: 0 to 255 are the bytes in their order, the merges follow in the order in which
they were learned, the special tokens are the last ids. Of pairs that occur equally often, the one with the smaller ids
is merged first, so the ids of the bytes decide about ties. `tokenizers` by itself numbers the bytes by their spelling;
with the ids above, the merges are those of `rustbpe` on the same text, ties included. They depend on the text only,
not on the number of threads.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from levanter.compat.hf.errors import CheckpointError
from levanter.compat.hf.token_bytes import byte_alphabet

BYTES = 256


class SmallTextError(CheckpointError):
    """The text has too few different pairs for the vocabulary."""


@dataclass(frozen=True, kw_only=True)
class BpeSpecification:
    """What is trained.

    Attributes:
        vocab_size: the number of ids: bytes, merges and special tokens.
        pattern: the regular expression (Oniguruma) whose matches are the pieces of a text; no merge crosses two pieces.
        special_tokens: the special tokens, in the order of their ids.
        bos: the one of them that the post-processor puts before a text.
    """

    vocab_size: int
    pattern: str
    special_tokens: tuple[str, ...]
    bos: str

    @property
    def merges(self) -> int:
        """The number of merges."""
        return self.vocab_size - BYTES - len(self.special_tokens)

    @property
    def smallest(self) -> int:
        """The smallest vocabulary: no merges."""
        return BYTES + len(self.special_tokens)


def train_bpe(texts: Iterator[str], specification: BpeSpecification) -> Mapping[str, Any]:
    """Learns merges from texts; returns the tokenizer.json.

    Args:
        texts: read once.
        specification: what is trained.

    Raises:
        SmallTextError: the texts have fewer merges than the vocabulary needs.
    """
    assert specification.merges >= 0, specification
    learned = tokenizers.Tokenizer(models.BPE())
    # `use_regex` would cut the pieces again by GPT-2's pattern.
    learned.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(specification.pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )  # pyright: ignore[reportAttributeAccessIssue]
    spellings = {byte: spelling for spelling, byte in byte_alphabet().items()}
    trainer = trainers.BpeTrainer(
        vocab_size=BYTES + specification.merges,
        # Special tokens of a trainer get the first ids in the order of this list; its alphabet would be sorted.
        special_tokens=[spellings[byte] for byte in range(BYTES)],
        show_progress=False,
    )
    learned.train_from_iterator(texts, trainer)
    # Ids in order: bytes first, then one id for each merge.
    vocabulary = sorted(learned.get_vocab(with_added_tokens=True).items(), key=lambda entry: entry[1])
    # The library stops early without a message where no pair occurs any more.
    reached = len(vocabulary) + len(specification.special_tokens)
    if reached < specification.vocab_size:
        raise SmallTextError(
            "the text",
            f"no pair is left to merge after {len(vocabulary) - BYTES:,} merges; the vocabulary of "
            f"{specification.vocab_size:,} needs {specification.merges:,}",
            suggestion=f"train on more text, or set vocab_size to at most {reached:,}",
        )
    merges = _merges(learned)
    return _definition(vocabulary, merges, specification)


def _merges(learned: tokenizers.Tokenizer) -> list[Any]:
    return json.loads(learned.to_str())["model"]["merges"]


def _definition(
    vocabulary: Sequence[tuple[str, int]], merges: list[Any], specification: BpeSpecification
) -> Mapping[str, Any]:
    """A tokenizer.json from what was learned; the bytes are ordinary tokens in it."""
    special = {token: len(vocabulary) + n for n, token in enumerate(specification.special_tokens)}
    bos = specification.bos
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        # `normalized: false`: their spelling is looked for in the text as it is.
        "added_tokens": [
            {
                "id": number,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token, number in special.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": specification.pattern},
                    "behavior": "Isolated",
                    "invert": False,
                },
                byte_level,
            ],
        },
        # Applied where a text is to be continued (`Tokenizer.frame`): the model has seen BOS before every document.
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [
                {"SpecialToken": {"id": bos, "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 0}},
            ],
            "special_tokens": {bos: {"id": bos, "ids": [special[bos]], "tokens": [bos]}},
        },
        # The settings of a decoder have no effect; the library writes them anyway.
        "decoder": {**byte_level, "add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            # A piece that is itself in the vocabulary is one token, as in tiktoken.
            "ignore_merges": True,
            "vocab": dict(vocabulary),
            "merges": merges,
        },
    }
