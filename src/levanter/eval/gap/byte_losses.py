"""Losses of tokens over the bytes of a text, so that models with different tokenizers can be compared on it.

A token's loss is spread evenly over the bytes of the characters that it covers. Tokens that are parts of one character
cover all of its bytes. The loss of a token that covers nothing (a space that a tokenizer puts before a text) is added
to that of the next token that does, so that no loss is lost.

Two tokenizations are split into *cells*: the smallest pieces of the text at whose ends both have a boundary. The losses
of a cell need no spreading.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from levanter.data.gap_texts import ComparedText

BITS = 1 / math.log(2)
"""Bits per nat."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenLosses:
    """The losses of a text's tokens under one model.

    Attributes:
        begins, ends: int64 `[tokens]`, the bytes that each token covers.
        nats: float64 `[tokens]`, −log p of each; NaN for a first token without a context.
        bytes: number of bytes of the text.
    """

    begins: np.ndarray
    ends: np.ndarray
    nats: np.ndarray
    bytes: int

    @property
    def scored(self) -> np.ndarray:
        """Which tokens have a loss."""
        return ~np.isnan(self.nats)

    @property
    def begin(self) -> int:
        """The first byte that is scored."""
        scored = self.scored
        # `argmax` of booleans is the index of the first true one.
        return int(self.begins[np.argmax(scored)]) if scored.any() else self.bytes

    @property
    def per_byte(self) -> np.ndarray:
        """float64 `[bytes]`: the nats of each byte; their sum equals that of the tokens."""
        scored = self.scored
        begins, widths = self.begins[scored], (self.ends - self.begins)[scored]
        nats, covers = self.nats[scored], widths > 0
        # `receiver[n]` is the token that gets the loss of token n: itself if it covers bytes, else the next one that
        # does (the last one for tokens at the end).
        covering = np.flatnonzero(covers)
        nats_per_byte = np.zeros(self.bytes)
        if not len(covering):
            return nats_per_byte
        receiver = covering[np.minimum(np.searchsorted(covering, np.arange(len(nats))), len(covering) - 1)]
        # Sums at the receivers, of which there is one for each covering token.
        token_nats = np.bincount(receiver, weights=nats, minlength=len(nats))[covering]
        begins, widths = begins[covering], widths[covering]
        # Flat indices of all covered bytes: for each token, begins, begins + 1, …, begins + width − 1.
        firsts = np.cumsum(widths) - widths
        byte_index = np.arange(int(widths.sum())) + np.repeat(begins - firsts, widths)
        # Unbuffered: tokens that are parts of one character cover the same bytes, and all of their losses count.
        np.add.at(nats_per_byte, byte_index, np.repeat(token_nats / widths, widths))
        return nats_per_byte


def byte_offsets(text: str) -> np.ndarray:
    """int64 `[characters + 1]`: the byte at which each character begins, and the end."""
    # Bytes of a character in UTF-8: one more above each of these code points.
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + (points > 0x7F).astype(np.int64) + (points > 0x7FF) + (points > 0xFFFF)
    return np.concatenate([[0], np.cumsum(widths)]).astype(np.int64)


def token_losses(text: str, offsets: ArrayLike, nats: ArrayLike, *, leading: int) -> TokenLosses:
    """The losses of a text's tokens.

    Args:
        text: the text.
        offsets: `[tokens, 2]`, the characters that each of its tokens covers.
        nats: −log p of the leading tokens and of the text's tokens.
        leading: number of tokens before the text's own (BOS).
    """
    bytes_at = byte_offsets(text)
    # Special tokens may have offsets outside of the text; clipped they cover nothing.
    spans = bytes_at[np.clip(np.asarray(offsets, np.int64).reshape(-1, 2), 0, len(text))]
    return TokenLosses(
        begins=spans[:, 0],
        ends=np.maximum(spans[:, 1], spans[:, 0]),
        nats=np.asarray(nats, np.float64)[leading : leading + len(spans)],
        bytes=int(bytes_at[-1]),
    )


def cells(one: TokenLosses, other: TokenLosses) -> np.ndarray:
    """int64 `[cells + 1]`: the bytes at which both tokenizations have a boundary, including the ends of the text."""
    # Both ends of the text are boundaries, whether or not a token begins there.
    common = np.intersect1d(_borders(one), _borders(other))
    return np.unique(np.concatenate([[0], common, [one.bytes]]))


def _borders(losses: TokenLosses) -> np.ndarray:
    """The bytes at which a token begins and no earlier token extends beyond."""
    # The largest end of all earlier tokens: tokens may overlap where they share a character.
    reached = np.maximum.accumulate(np.concatenate([[0], losses.ends]))[:-1]
    return losses.begins[losses.begins >= reached]


@dataclass(frozen=True, kw_only=True)
class GapSums:
    """Sums over some bytes.

    Attributes:
        a, b: nats of the two models.
        bytes: number of counted bytes.
        count: number of documents or segments.
        tokens: number of tokens of the two tokenizers.
    """

    a: float = 0.0
    b: float = 0.0
    bytes: int = 0
    count: int = 0
    tokens: tuple[int, int] = (0, 0)

    def __add__(self, other: "GapSums") -> "GapSums":
        return GapSums(
            a=self.a + other.a,
            b=self.b + other.b,
            bytes=self.bytes + other.bytes,
            count=self.count + other.count,
            tokens=(self.tokens[0] + other.tokens[0], self.tokens[1] + other.tokens[1]),
        )

    @property
    def delta_bits(self) -> float:
        """Bits of A minus those of B."""
        return (self.a - self.b) * BITS

    def row(self, name: str) -> dict[str, Any]:
        """The figures as a row of a report."""
        has_bytes = self.bytes > 0
        return {
            "name": name,
            "documents": self.count,
            "bytes": self.bytes,
            "model_a_bpb": self.a * BITS / self.bytes if has_bytes else None,
            "model_b_bpb": self.b * BITS / self.bytes if has_bytes else None,
            "gap_bpb": self.delta_bits / self.bytes if has_bytes else None,
            "delta_bits": self.delta_bits,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class ComparedDocument:
    """A document with the losses of both models.

    Attributes:
        text: the document.
        a, b: losses of its tokens.
    """

    text: ComparedText
    a: TokenLosses
    b: TokenLosses

    @cached_property
    def begin(self) -> int:
        """The first byte that both models score and that counts."""
        # Both models are compared on the same bytes: where one has no score yet, neither counts.
        return min(max(self.text.begin, self.a.begin, self.b.begin), self.a.bytes)

    @property
    def sums(self) -> GapSums:
        """The sums of the document."""
        begin = self.begin
        return GapSums(
            a=float(self.a.per_byte[begin:].sum()),
            b=float(self.b.per_byte[begin:].sum()),
            bytes=self.a.bytes - begin,
            count=1,
            tokens=(int(self.a.scored.sum()), int(self.b.scored.sum())),
        )
