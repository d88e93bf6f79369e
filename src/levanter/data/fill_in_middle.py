"""Fill in the middle: documents cut in three, with the middle moved to the end, so that a model learns to fill gaps.

Of each document, by a draw of (seed, document), nothing happens or two cuts divide it into prefix, middle and suffix
(Bavarian et al. 2022, https://arxiv.org/abs/2207.14255, on token ids), in one of two orders:

    PSM   ⟨prefix⟩ prefix ⟨suffix⟩ suffix ⟨middle⟩ middle
    SPM   ⟨prefix⟩⟨suffix⟩ suffix ⟨middle⟩ prefix middle

where the names in brackets are *sentinels*, special tokens of the tokenizer. BOS stays first and EOS last. Every token
counts in the loss. Documents of fewer than two tokens stay as they are.

`FillInMiddleTokens` are `Tokens`: a view of a set that computes any span from its place, so rows are planned on the
changed lengths and a run resumes at any step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from levanter.data.chunked_arrays import span_indices
from levanter.data.config import FILL_ROLES, FillInMiddleConfig
from levanter.data.errors import DataError
from levanter.data.shuffle import mix_words
from levanter.data.store import Tokens
from levanter.data.tokenizer import Tokenizer

KNOWN_SENTINELS: tuple[Mapping[str, str], ...] = (
    {"prefix": "<|fim_prefix|>", "suffix": "<|fim_suffix|>", "middle": "<|fim_middle|>"},
    {"prefix": "<fim_prefix>", "suffix": "<fim_suffix>", "middle": "<fim_middle>"},
    {"prefix": "<fim-prefix>", "suffix": "<fim-suffix>", "middle": "<fim-middle>"},
    {"prefix": "▁<PRE>", "suffix": "▁<SUF>", "middle": "▁<MID>", "end": "▁<EOT>"},
)
"""The sentinels of Qwen and Gemma, StarCoder, SantaCoder, and Code Llama; the first that a tokenizer has are used."""


@dataclass(frozen=True, kw_only=True)
class Sentinels:
    """The ids of the sentinels."""

    prefix: int
    suffix: int
    middle: int
    end: int | None = None

    @property
    def count(self) -> int:
        """The number of sentinels in a changed document."""
        return 3 if self.end is None else 4


def find_sentinels(config: FillInMiddleConfig, tokenizer: Tokenizer) -> Sentinels:
    """The ids of the sentinels in a tokenizer's vocabulary.

    Raises:
        DataError: the tokenizer does not have them as single tokens.
    """
    candidates = KNOWN_SENTINELS if config.sentinels is None else (config.sentinels,)
    for names in candidates:
        ids = {role: _single_id(tokenizer, token) for role, token in names.items()}
        # `end` is optional for the known ones.
        if config.sentinels is None and ids.get("end", 0) is None:
            del ids["end"]
        if None not in ids.values():
            return Sentinels(**ids)  # pyright: ignore[reportArgumentType]
    if config.sentinels is not None:
        absent = [f"{token!r} ({role})" for role, token in config.sentinels.items() if ids[role] is None]
        why = f"has no {', '.join(absent)}"
    else:
        tried = "; ".join(" ".join(names.values()) for names in KNOWN_SENTINELS)
        why = f"has none of the known sentinels ({tried})"
    raise DataError(
        f"fim: tokenizer {tokenizer.name} {why}; without sentinels a model cannot tell where the gap is: use a "
        "tokenizer that has them, name them (fim.sentinels: {prefix: …, suffix: …, middle: …}), or remove fim"
    )


def _single_id(tokenizer: Tokenizer, token: str) -> int | None:
    """The id of an added token; None if the text is not one token of the vocabulary by itself."""
    (ids,) = tokenizer.encode_batch([token])
    # A token that ordinary text could have would be no sentinel.
    added = getattr(tokenizer, "added_ids", None)
    return int(ids[0]) if len(ids) == 1 and (added is None or int(ids[0]) in added) else None


@dataclass(frozen=True, kw_only=True, eq=False)
class FillInMiddleTokens:
    """A set of which some documents are changed.

    Attributes:
        tokens: the documents as they are, without loss weights.
        rate, spm: as configured.
        sentinels: the ids.
        key: the key of the draws.
        bos, eos: whether documents begin with BOS and end with EOS.
    """

    tokens: Tokens
    rate: float
    spm: float
    sentinels: Sentinels
    key: int
    bos: bool
    eos: bool

    @property
    def weighted(self) -> bool:
        """Whether ids carry loss weights: never."""
        return False

    @property
    def skipped(self) -> int:
        """Empty documents that were left out."""
        return self.tokens.skipped

    @property
    def largest_id(self) -> int:
        """The largest id, sentinels included."""
        ids = self.sentinels
        return max(self.tokens.largest_id, ids.prefix, ids.suffix, ids.middle, -1 if ids.end is None else ids.end)

    @cached_property
    def changed(self) -> np.ndarray:
        """Whether each document is changed: bool `[documents]`."""
        documents = len(self.tokens.starts) - 1
        # In pieces, so that the arrays of the hash do not grow with the set.
        pieces = [
            self._draws(np.arange(first, min(first + _AT_ONCE, documents)), 0) < self.rate
            for first in range(0, documents, _AT_ONCE)
        ]
        body = np.diff(self.tokens.starts) - self.bos - self.eos
        return np.concatenate([np.zeros(0, bool), *pieces]) & (body >= 2)

    @property
    def starts(self) -> np.ndarray:
        """The first token of each document, sentinels included: int64 `[documents + 1]`."""
        return self._starts

    @cached_property
    def _starts(self) -> np.ndarray:
        extra = np.concatenate([[0], np.cumsum(self.changed, dtype=np.int64)])
        return self.tokens.starts + extra * self.sentinels.count

    def _draws(self, documents: np.ndarray, purpose: int) -> np.ndarray:
        """A uniform number in [0, 1) for each document."""
        return mix_words(self.key, documents, purpose) / 2.0**53

    def cuts(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The cuts of changed documents and whether they are in SPM order.

        Returns:
            int64 `[documents]` twice, the places of the cuts in the body, the first at most the second; bool.
        """
        body = np.diff(self.tokens.starts)[documents] - self.bos - self.eos
        # Uniform over all places between tokens and both ends; empty parts occur, as at the ends of a file.
        first, second = (
            np.minimum((self._draws(documents, purpose) * (body + 1)).astype(np.int64), body) for purpose in (1, 2)
        )
        return np.minimum(first, second), np.maximum(first, second), self._draws(documents, 3) < self.spm

    def _segments(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What each document consists of, as consecutive segments.

        Returns:
            int64 `[documents, 9]`: the first token of each segment in `tokens`, or −1 − id for a sentinel.
            int64 `[documents, 9]`: the lengths; 0 for segments that a document does not have.
        """
        begin, length = self.tokens.starts[documents], np.diff(self.tokens.starts)[documents]
        origins, lengths = np.zeros((2, len(documents), 9), np.int64)
        # A document that stays is one segment.
        origins[:, 0], lengths[:, 0] = begin, length
        rows = np.flatnonzero(self.changed[documents])
        first, second, spm = self.cuts(documents[rows])
        begin, length = begin[rows], length[rows]
        body = begin + self.bos
        ids = self.sentinels
        # (origin, length) of each part.
        whole_body = length - self.bos - self.eos
        prefix, middle, suffix = (body, first), (body + first, second - first), (body + second, whole_body - second)
        one = np.ones(len(rows), np.int64)
        marks = {role: (-1 - np.int64(getattr(ids, role)) * one, one) for role in FILL_ROLES}
        end = (one, 0 * one) if ids.end is None else (-1 - np.int64(ids.end) * one, one)
        bos, eos = (begin, self.bos * one), (begin + length - self.eos, self.eos * one)
        psm = (bos, marks["prefix"], prefix, marks["suffix"], suffix, marks["middle"], middle, end, eos)
        spm_order = (bos, marks["prefix"], marks["suffix"], suffix, marks["middle"], prefix, middle, end, eos)
        for column, (plain, swapped) in enumerate(zip(psm, spm_order, strict=True)):
            origins[rows, column] = np.where(spm, swapped[0], plain[0])
            lengths[rows, column] = np.where(spm, swapped[1], plain[1])
        return origins, lengths

    def read(self, begins: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """The ids of some spans, end to end."""
        begins, counts = np.asarray(begins, np.int64), np.asarray(counts, np.int64)
        starts = self.starts
        # The documents of each span, span after span, and which part of each is wanted.
        first = np.searchsorted(starts, begins, side="right") - 1
        last = np.maximum(np.searchsorted(starts, begins + counts, side="left"), first)
        documents = span_indices(first, last - first)
        span = np.repeat(np.arange(len(begins)), last - first)
        low = np.maximum(begins[span] - starts[documents], 0)
        high = np.minimum(begins[span] + counts[span], starts[documents + 1]) - starts[documents]
        # The part of each segment within these bounds.
        origins, lengths = self._segments(documents)
        stops = np.cumsum(lengths, axis=1)
        segment_low = np.maximum(stops - lengths, low[:, None])
        sizes = np.maximum(np.minimum(stops, high[:, None]) - segment_low, 0).ravel()
        offsets = (segment_low - (stops - lengths)).ravel()
        origins = origins.ravel()
        out_offsets = np.cumsum(sizes) - sizes
        out = np.empty(int(sizes.sum()), np.int32)
        stored = np.flatnonzero((sizes > 0) & (origins >= 0))
        # All parts are read together, so that a store fetches them in one go.
        ids, _ = self.tokens.read(origins[stored] + offsets[stored], sizes[stored])
        out[span_indices(out_offsets[stored], sizes[stored])] = ids
        marks = np.flatnonzero((sizes > 0) & (origins < 0))
        out[out_offsets[marks]] = -1 - origins[marks]
        return out, None

    def describe(self) -> str:
        """How many documents are changed, in a few words."""
        share = float(self.changed.mean()) if len(self.changed) else 0.0
        return (
            f"fill in the middle: {int(self.changed.sum()):,} documents ({share:.1%}; rate {self.rate:g}, "
            f"{self.spm:g} of them SPM), sentinels {self.sentinels.prefix}, {self.sentinels.suffix}, "
            f"{self.sentinels.middle}" + ("" if self.sentinels.end is None else f", {self.sentinels.end}")
        )


_AT_ONCE = 1 << 20


def original_document(ids: Sequence[int], sentinels: Sentinels, *, bos: bool, eos: bool) -> list[int]:
    """The document that a changed one was made from.

    Args:
        ids: a document of `FillInMiddleTokens`.
        sentinels: their ids.
        bos, eos: whether documents begin with BOS and end with EOS.
    """
    body = list(ids)[int(bos) : len(ids) - int(eos)]
    if not body or body[0] != sentinels.prefix:
        return list(ids)
    if sentinels.end is not None:
        body.pop()
    suffix, middle = body.index(sentinels.suffix), body.index(sentinels.middle)
    # PSM has the prefix before the suffix's mark, SPM behind the middle's, where it precedes the middle anyway.
    document = body[1:suffix] + body[middle + 1 :] + body[suffix + 1 : middle]
    return [*list(ids)[: int(bos)], *document, *list(ids)[len(ids) - int(eos) :]]
