"""Sums of two models over the same bytes, and a document as both see it."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from levanter.data.gap_texts import ComparedText
from levanter.eval.gap.byte_losses import TokenLosses

BITS = 1 / math.log(2)
"""Bits of a nat."""


@dataclass(frozen=True, kw_only=True)
class GapSums:
    """The sums of some bytes.

    Attributes:
        a, b: nats of the two models.
        bytes: that count.
        count: documents, or segments, that these are of.
        tokens: of the two tokenizers.
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
        """Bits that A takes beyond those of B."""
        return (self.a - self.b) * BITS

    def row(self, name: str) -> dict[str, Any]:
        """The figures as a row of a report."""
        there = self.bytes > 0
        return {
            "name": name,
            "documents": self.count,
            "bytes": self.bytes,
            "model_a_bpb": self.a * BITS / self.bytes if there else None,
            "model_b_bpb": self.b * BITS / self.bytes if there else None,
            "gap_bpb": self.delta_bits / self.bytes if there else None,
            "delta_bits": self.delta_bits,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class ComparedDocument:
    """A document as both models see it.

    Attributes:
        text: the document.
        a, b: what each says of its tokens.
    """

    text: ComparedText
    a: TokenLosses
    b: TokenLosses

    @cached_property
    def begin(self) -> int:
        """The byte from which on both models score it, and it counts."""
        return min(max(self.text.begin, self.a.begin, self.b.begin), self.a.bytes)

    @property
    def sums(self) -> GapSums:
        """Of the whole document."""
        begin = self.begin
        return GapSums(
            a=float(self.a.per_byte[begin:].sum()),
            b=float(self.b.per_byte[begin:].sum()),
            bytes=self.a.bytes - begin,
            count=1,
            tokens=(int(self.a.scored.sum()), int(self.b.scored.sum())),
        )
