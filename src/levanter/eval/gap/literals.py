"""Short pieces of text that occur again and again, summed up by what they are; and how text is shown in a report."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from levanter.eval.gap.byte_losses import TokenLosses
from levanter.eval.gap.sums import ComparedDocument, GapSums

_SHOWN = str.maketrans({" ": "\u2420", "\n": "\u23ce", "\t": "\u21e5", "\r": "\u21b5"})
_LONGEST, _WINDOW = 32, 120


def visible(text: str, limit: int = _LONGEST) -> str:
    """A text with its white space drawn, cut to a length."""
    shown = text.translate(_SHOWN)
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}…"


def window(text: str, first: int, end: int, limit: int = _WINDOW) -> str:
    """What stands around a place of a text, with its white space drawn."""
    if len(text) <= limit:
        return text.translate(_SHOWN)
    begin = max(0, min((first + end) // 2 - limit // 2, len(text) - limit))
    shown = text[begin : begin + limit].translate(_SHOWN)
    return f"{'…' if begin else ''}{shown}{'…' if begin + limit < len(text) else ''}"


def boundaries(text: bytes, losses: TokenLosses, first: int, end: int) -> str:
    """The tokens of a piece of a text, between bars; an ellipsis where one reaches beyond it."""
    here = np.flatnonzero((losses.ends > first) & (losses.begins < end) & (losses.ends > losses.begins))
    if not len(here):
        return "(no token)"
    pieces: list[str] = []
    spans = [(int(losses.begins[n]), int(losses.ends[n])) for n in here]
    # Tokens that share a character show it once.
    for begin, stop in dict.fromkeys(spans):
        shown = text[max(begin, first) : min(stop, end)].decode(errors="replace").translate(_SHOWN)
        pieces.append(f"{'…' if begin < first else ''}{shown}{'…' if stop > end else ''}")
    return f"|{'|'.join(pieces)}|"


@dataclass(kw_only=True)
class _Literal:
    """A literal's sums, and where it differs most: the document, and its bytes there."""

    sums: GapSums
    delta: float
    example: ComparedDocument
    place: tuple[int, int]


@dataclass(kw_only=True)
class Literals:
    """Takes pieces of text, and sums equal ones up."""

    rows: dict[tuple[str, str], _Literal] = field(default_factory=dict)

    def add(self, kind: str, text: str, sums: GapSums, where: ComparedDocument, place: tuple[int, int]) -> None:
        """Adds a piece.

        Args:
            kind: of text.
            text: the piece.
            sums: of its bytes.
            where: the document that it is in.
            place: its first byte there, and the end.
        """
        delta = abs(sums.delta_bits)
        known = self.rows.get((kind, text))
        if known is None:
            self.rows[kind, text] = _Literal(sums=sums, delta=delta, example=where, place=place)
            return
        known.sums = known.sums + sums
        if delta > known.delta:
            known.delta, known.example, known.place = delta, where, place

    def found(self, count: int) -> dict[str, list[dict[str, Any]]]:
        """Those that differ most, for each model."""
        ordered = sorted(self.rows.items(), key=lambda each: -each[1].sums.delta_bits)
        return {
            "model_a_worse": _rows([each for each in ordered[:count] if each[1].sums.delta_bits > 0]),
            "model_b_worse": _rows([each for each in ordered[::-1][:count] if each[1].sums.delta_bits < 0]),
        }


def _rows(literals: Sequence[tuple[tuple[str, str], _Literal]]) -> list[dict[str, Any]]:
    found = []
    for (kind, text), one in literals:
        row = one.sums.row(visible(text))
        document = one.example.text.text
        content = document.encode()
        first = len(content[: one.place[0]].decode(errors="ignore"))
        found.append(
            {
                "name": row["name"],
                "bucket": kind,
                **{key: row[key] for key in list(row)[1:]},
                "example_dataset": one.example.text.name,
                "example_doc_preview": window(document, first, first + len(text)),
                "model_a_token_boundaries": boundaries(content, one.example.a, *one.place),
                "model_b_token_boundaries": boundaries(content, one.example.b, *one.place),
            }
        )
    return found
