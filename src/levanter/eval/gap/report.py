"""Comparison of two models on the same bytes: bits per byte of each set and category, and the largest differences.

    bits per byte = Σ −log2 p over the counted bytes / their number        gap = that of A − that of B

A gap above 0 means that the text is harder for A. *Groups* are the tags of sets and the parents of their names. The
keys of `summary` are upstream's.

For categories, a text is split into *segments* of one kind: an address (`https://…`), white space, a number with its
dots and dashes, a word with its apostrophes and hyphens, or anything else. *Literals* are short segments that occur
repeatedly, summed by content. The names of categories are upstream's.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from levanter.eval.gap.byte_losses import ComparedDocument, GapSums, TokenLosses, byte_offsets
from levanter.eval.perplexity import with_parents

DOCUMENTS, SEGMENTS, LITERALS = 25, 40, 40
"""How many documents, segments and literals are listed for each model."""
LITERAL_BYTES = 32


_URL = re.compile(r"(?:https?://|www\.)\S+")
_CONNECTORS = "'\u2019-.,:/"
# Matches a text's shadow, in which every letter is `a`, every digit `0` and white space a space.
_SHADOW = re.compile(
    r"(?P<space> +)|(?P<number>0+(?:[.,:/-]0+)*)|(?P<word>[a_]+(?:['\u2019-][a_]+)*)|(?P<other>[^a0 ]+)"
)
# The first letters of what `_URL` matches: the expression is tried at these characters only.
_MAY_BE_URL = frozenset("hw")


class _Shadows(dict[int, str]):
    """Character → its class; computed once per character."""

    def __missing__(self, point: int) -> str:
        character = chr(point)
        category = unicodedata.category(character)
        if character.isspace():
            character_class = " "
        elif category[0] in "LM":
            character_class = "a"
        elif category[0] == "N":
            character_class = "0"
        else:
            character_class = character if character in _CONNECTORS or character == "_" else "!"
        self[point] = character_class
        return character_class


# Shared by all texts: there are far fewer distinct characters than characters.
_SHADOWS = _Shadows()


def segments(text: str) -> Iterator[tuple[int, int, str]]:
    """A text's segments in order, as (first character, end, category); together they are the text."""
    # One character for each, so that positions in the shadow are positions in the text.
    shadow = text.translate(_SHADOWS)
    at = 0
    while at < len(text):
        if text[at] in _MAY_BE_URL and (address := _URL.match(text, at)):
            yield at, address.end(), "text/url"
            at = address.end()
            continue
        match = _SHADOW.match(shadow, at)
        assert match is not None, shadow[at : at + 8]
        end = match.end()
        yield at, end, _kind(text[at:end], match.lastgroup or "")
        at = end


@lru_cache(maxsize=1 << 16)
def _kind(segment: str, group: str) -> str:
    if group == "space":
        return f"whitespace/{_space(segment)}"
    if group == "number":
        return "text/number"
    if group == "word":
        return "text/word" if segment.isascii() else "text/non_ascii_word"
    return "text/punctuation" if segment.isascii() else "text/non_ascii"


def _space(segment: str) -> str:
    if "\t" in segment or "\r" in segment:
        return "tab_or_cr"
    if set(segment) == {" "}:
        return "single_space" if len(segment) == 1 else "multi_space"
    if set(segment) == {"\n"}:
        return "newline" if len(segment) == 1 else "multi_newline"
    return "mixed"


_WHITESPACE_SYMBOLS = str.maketrans({" ": "\u2420", "\n": "\u23ce", "\t": "\u21e5", "\r": "\u21b5"})
_LONGEST, _WINDOW = 32, 120


def visible(text: str, limit: int = _LONGEST) -> str:
    """A text with symbols for white space, truncated to a length."""
    shown = text.translate(_WHITESPACE_SYMBOLS)
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}…"


def window(text: str, first: int, end: int, limit: int = _WINDOW) -> str:
    """The surroundings of a span of a text, with symbols for white space."""
    if len(text) <= limit:
        return text.translate(_WHITESPACE_SYMBOLS)
    # The span in the middle, moved inwards at the ends of the text.
    begin = max(0, min((first + end) // 2 - limit // 2, len(text) - limit))
    shown = text[begin : begin + limit].translate(_WHITESPACE_SYMBOLS)
    return f"{'…' if begin else ''}{shown}{'…' if begin + limit < len(text) else ''}"


def boundaries(text: bytes, losses: TokenLosses, first: int, end: int) -> str:
    """The tokens of a span of a text, separated by bars; an ellipsis where one extends beyond the span."""
    # Tokens that overlap with the span; those that cover no bytes cannot be shown.
    overlapping = np.flatnonzero((losses.ends > first) & (losses.begins < end) & (losses.ends > losses.begins))
    if not len(overlapping):
        return "(no token)"
    pieces: list[str] = []
    spans = [(int(losses.begins[n]), int(losses.ends[n])) for n in overlapping]
    # Tokens that share a character are shown once.
    for begin, stop in dict.fromkeys(spans):
        # The span of a token may cut a character.
        shown = text[max(begin, first) : min(stop, end)].decode(errors="replace").translate(_WHITESPACE_SYMBOLS)
        pieces.append(f"{'…' if begin < first else ''}{shown}{'…' if stop > end else ''}")
    return f"|{'|'.join(pieces)}|"


@dataclass(kw_only=True)
class _Literal:
    """The sums of a literal, and its occurrence with the largest difference: document and bytes."""

    sums: GapSums
    delta: float
    example: ComparedDocument
    place: tuple[int, int]


@dataclass(kw_only=True)
class Literals:
    """Sums pieces of text with equal content."""

    rows: dict[tuple[str, str], _Literal] = field(default_factory=dict)

    def add(self, kind: str, text: str, sums: GapSums, where: ComparedDocument, place: tuple[int, int]) -> None:
        """Adds an occurrence.

        Args:
            kind: category of the text.
            text: the piece.
            sums: sums of its bytes.
            where: the document that contains it.
            place: its first byte in the document, and its end.
        """
        delta = abs(sums.delta_bits)
        entry = self.rows.get((kind, text))
        # Memory grows with the distinct short segments, not with their occurrences.
        if entry is None:
            self.rows[kind, text] = _Literal(sums=sums, delta=delta, example=where, place=place)
            return
        entry.sums = entry.sums + sums
        if delta > entry.delta:
            entry.delta, entry.example, entry.place = delta, where, place

    def top(self, count: int) -> dict[str, list[dict[str, Any]]]:
        """The literals with the largest differences, for each model."""
        ordered = sorted(self.rows.items(), key=lambda item: -item[1].sums.delta_bits)
        return {
            # Differences are A minus B, in falling order: A is worse at the beginning, B at the end.
            "model_a_worse": _rows([item for item in ordered[:count] if item[1].sums.delta_bits > 0]),
            "model_b_worse": _rows([item for item in ordered[::-1][:count] if item[1].sums.delta_bits < 0]),
        }


def _rows(literals: Sequence[tuple[tuple[str, str], _Literal]]) -> list[dict[str, Any]]:
    rows = []
    for (kind, text), one in literals:
        row = one.sums.row(visible(text))
        document = one.example.text.text
        content = document.encode()
        # From a byte of the document to its character.
        first = len(content[: one.place[0]].decode(errors="ignore"))
        rows.append(
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
    return rows


@dataclass(kw_only=True)
class _Top:
    """The rows with the largest differences, for each model; a difference above 0 means that A is worse.

    Attributes:
        count: number of rows for each model.
        rows: candidates, more than `count`.
        floors: sign of the difference → the size that a new row has to exceed.
    """

    count: int
    rows: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    floors: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})

    def may_rank(self, delta: float) -> bool:
        """Whether a row may be among them."""
        return abs(delta) > self.floors[delta > 0]

    def add(self, delta: float, row: dict[str, Any]) -> None:
        """Adds a row that may rank."""
        self.rows.append((delta, row))
        # Rows are pruned in batches: sorting at every addition would cost more than keeping some candidates.
        if len(self.rows) > 8 * self.count:
            self.rows = [*self._largest(above=True), *self._largest(above=False)]

    def _largest(self, *, above: bool) -> list[tuple[float, dict[str, Any]]]:
        largest = sorted((entry for entry in self.rows if (entry[0] > 0) == above), key=lambda entry: -abs(entry[0]))
        # The list is full: only larger differences than its last one can still enter.
        if len(largest) >= self.count:
            self.floors[above] = abs(largest[self.count - 1][0])
        return largest[: self.count]

    @property
    def rows_by_model(self) -> dict[str, list[dict[str, Any]]]:
        """The rows, in descending order of difference."""
        return {
            "model_a_worse": [row for _, row in self._largest(above=True)],
            "model_b_worse": [row for _, row in self._largest(above=False)],
        }


@dataclass(kw_only=True)
class GapReport:
    """Sums up documents one by one.

    Attributes:
        model_a, model_b: names of the models.
    """

    model_a: str
    model_b: str
    sets: dict[str, GapSums] = field(default_factory=dict)
    kinds: dict[str, GapSums] = field(default_factory=dict)
    leaves: dict[str, set[str]] = field(default_factory=dict)
    _documents: _Top = field(default_factory=lambda: _Top(count=DOCUMENTS))
    _segments: _Top = field(default_factory=lambda: _Top(count=SEGMENTS))
    _literals: Literals = field(default_factory=Literals)

    def add(self, document: ComparedDocument) -> None:
        """Adds a document."""
        name, whole = document.text.name, document.sums
        self.sets[name] = self.sets.get(name, GapSums()) + whole
        for tag in {part for tag_name in (*document.text.tags, name) for part in with_parents(tag_name)}:
            self.leaves.setdefault(tag, set()).add(name)
        # Nothing of it is scored by both models; it still counts as a document of its set.
        if not whole.bytes:
            return
        worst = self._add_segments(document)
        # The row with its preview is built only if it can be listed.
        if not self._documents.may_rank(whole.delta_bits):
            return
        worst_place = worst.get(whole.delta_bits > 0)
        text = document.text.text
        row = whole.row(name)
        self._documents.add(
            whole.delta_bits,
            {
                "dataset": name,
                "shard": document.text.shard,
                "row_index": document.text.row,
                "bytes": whole.bytes,
                "score_byte_start": document.begin,
                "score_byte_end": document.a.bytes,
                **{key: row[key] for key in ("model_a_bpb", "model_b_bpb", "gap_bpb", "delta_bits")},
                "worst_bucket": None if worst_place is None else worst_place.kind,
                "worst_text": None if worst_place is None else visible(text[worst_place.first : worst_place.end]),
                "worst_gap_bpb": None if worst_place is None else worst_place.delta / worst_place.bytes,
                "preview": window(text, *((0, 0) if worst_place is None else (worst_place.first, worst_place.end))),
            },
        )

    def _add_segments(self, document: ComparedDocument) -> dict[bool, "_Place"]:
        """Adds the segments of a document; returns the one with the largest difference of each sign."""
        text, begin = document.text.text, document.begin
        bytes_at = byte_offsets(text)
        first_counted = int(np.searchsorted(bytes_at, begin))
        # Prefix sums: the nats of any span are one subtraction.
        prefix_a, prefix_b = (
            np.concatenate([[0.0], np.cumsum(losses.per_byte)]) for losses in (document.a, document.b)
        )
        worst: dict[bool, _Place] = {}
        for first, end, kind in segments(text):
            # The segment lies before the first byte that counts; one that spans it is cut there.
            if bytes_at[end] <= begin:
                continue
            # The text of a cut segment begins at the first counted character.
            first = max(first, first_counted)
            low, high = max(int(bytes_at[first]), begin), int(bytes_at[end])
            sums = GapSums(
                a=float(prefix_a[high] - prefix_a[low]),
                b=float(prefix_b[high] - prefix_b[low]),
                bytes=high - low,
                count=1,
            )
            self.kinds[kind] = self.kinds.get(kind, GapSums()) + sums
            delta, segment = sums.delta_bits, text[first:end]
            if sums.bytes <= LITERAL_BYTES:
                self._literals.add(kind, segment, sums, document, (low, high))
            if not delta:
                continue
            place = _Place(first=first, end=end, kind=kind, delta=delta, bytes=sums.bytes)
            above, known = delta > 0, worst.get(delta > 0)
            if known is None or abs(delta) > abs(known.delta):
                worst[above] = place
            if not self._segments.may_rank(delta):
                continue
            self._segments.add(
                delta,
                {
                    "dataset": document.text.name,
                    "bucket": kind,
                    "bytes": sums.bytes,
                    "delta_bits": delta,
                    "gap_bpb": delta / sums.bytes,
                    "text": visible(segment),
                    "doc_preview": window(text, first, end),
                },
            )
        return worst

    def summary(self, seconds: tuple[float, float] = (0.0, 0.0)) -> dict[str, Any]:
        """The summary, with the largest differences first.

        Args:
            seconds: seconds of scoring, by model.
        """
        groups = {
            tag: sum((self.sets[leaf] for leaf in sorted(leaves)), GapSums())
            for tag, leaves in sorted(self.leaves.items())
            # A set's own name is a tag, and would repeat the set as a group.
            if not (tag in self.sets and leaves == {tag})
        }
        everything = sum(self.sets.values(), GapSums())

        def timed(name: str, sums: GapSums) -> dict[str, Any]:
            row = sums.row(name)
            for model, tokens, total, took in zip("ab", sums.tokens, everything.tokens, seconds, strict=True):
                # Sets are scored in common batches, so their time is not measured: it is divided by tokens.
                share = took * tokens / total if total else 0.0
                row |= {
                    f"model_{model}_tokens": tokens,
                    f"model_{model}_eval_seconds": share,
                    f"model_{model}_tokens_per_second": tokens / share if share else None,
                    f"model_{model}_bytes_per_second": sums.bytes / share if share else None,
                }
            return row

        return {
            "model_a": self.model_a,
            "model_b": self.model_b,
            "datasets": _ordered(timed(name, sums) for name, sums in sorted(self.sets.items())),
            "dataset_groups": _ordered(timed(name, sums) for name, sums in groups.items() if sums.bytes),
            "pattern_buckets": _ordered(sums.row(name) for name, sums in sorted(self.kinds.items())),
            "top_documents": self._documents.rows_by_model,
            "top_segments": self._segments.rows_by_model,
            "top_literals": self._literals.top(LITERALS),
        }


@dataclass(frozen=True, kw_only=True)
class _Place:
    """A segment of a document: its characters, kind, bits and bytes."""

    first: int
    end: int
    kind: str
    delta: float
    bytes: int


def _ordered(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: -abs(row["delta_bits"]))
