"""Losses of tokens over the bytes of a text, so that models with different tokenizers can be compared on it.

A token's loss is spread evenly over the bytes of the characters that it covers. Tokens that hold parts of one character
cover it alike. A token that covers nothing (a space that a tokenizer puts before a text) gives its loss to the next one
that does, so that no loss is lost.

Two tokenizations are cut into *cells*: the smallest pieces of the text at whose ends both have a border. What a model
says of a cell needs no spreading.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenLosses:
    """What a model says of a text's tokens.

    Attributes:
        begins, ends: int64 `[tokens]`, the bytes that each token covers.
        nats: float64 `[tokens]`, −log p of each; NaN for a first one that nothing stands before.
        bytes: of the text.
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
        """The byte from which on the text is scored."""
        scored = self.scored
        return int(self.begins[np.argmax(scored)]) if scored.any() else self.bytes

    @property
    def per_byte(self) -> np.ndarray:
        """float64 `[bytes]`: the nats of each byte; their sum is that of the tokens."""
        scored = self.scored
        begins, widths = self.begins[scored], (self.ends - self.begins)[scored]
        nats, covers = self.nats[scored], widths > 0
        # What covers nothing goes to the next token that does, behind the last of those to that one.
        places = np.flatnonzero(covers)
        found = np.zeros(self.bytes)
        if not len(places):
            return found
        heir = places[np.minimum(np.searchsorted(places, np.arange(len(nats))), len(places) - 1)]
        owned = np.bincount(heir, weights=nats, minlength=len(nats))[places]
        begins, widths = begins[places], widths[places]
        firsts = np.cumsum(widths) - widths
        where = np.arange(int(widths.sum())) + np.repeat(begins - firsts, widths)
        np.add.at(found, where, np.repeat(owned / widths, widths))
        return found


def byte_offsets(text: str) -> np.ndarray:
    """int64 `[characters + 1]`: the byte at which each character begins, and the end."""
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + (points > 0x7F).astype(np.int64) + (points > 0x7FF) + (points > 0xFFFF)
    return np.concatenate([[0], np.cumsum(widths)]).astype(np.int64)


def token_losses(text: str, offsets: ArrayLike, nats: ArrayLike, *, leading: int) -> TokenLosses:
    """What a model says of a text.

    Args:
        text: the text.
        offsets: `[tokens, 2]`, the characters that each of its tokens covers.
        nats: of the tokens and of what stands before them.
        leading: how many tokens stand before the text's own (BOS).
    """
    at = byte_offsets(text)
    spans = at[np.clip(np.asarray(offsets, np.int64).reshape(-1, 2), 0, len(text))]
    return TokenLosses(
        begins=spans[:, 0],
        ends=np.maximum(spans[:, 1], spans[:, 0]),
        nats=np.asarray(nats, np.float64)[leading : leading + len(spans)],
        bytes=int(at[-1]),
    )


def cells(one: TokenLosses, other: TokenLosses) -> np.ndarray:
    """int64 `[cells + 1]`: the bytes at which both tokenizations have a border, the ends of the text among them."""
    inside = np.intersect1d(_borders(one), _borders(other))
    return np.unique(np.concatenate([[0], inside, [one.bytes]]))


def _borders(losses: TokenLosses) -> np.ndarray:
    """Where a token begins and none reaches across."""
    reached = np.maximum.accumulate(np.concatenate([[0], losses.ends]))[:-1]
    return losses.begins[losses.begins >= reached]
