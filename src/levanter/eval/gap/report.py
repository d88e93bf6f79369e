"""What two models say of the same bytes: bits per byte of each set, of each kind of text, and where they part.

    bits per byte = Σ −log2 p over the bytes that count / how many there are        gap = that of A − that of B

A gap above 0 says that A finds the text harder. *Groups* are the tags of sets and the parents of their names. The names
in `summary` are upstream's, so that what reads its files reads ours.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from levanter.eval.gap.byte_losses import byte_offsets
from levanter.eval.gap.categories import segments
from levanter.eval.gap.literals import Literals, visible, window
from levanter.eval.gap.sums import ComparedDocument, GapSums
from levanter.eval.perplexity import with_parents

DOCUMENTS, SEGMENTS, LITERALS = 25, 40, 40
"""Of each how many are listed for each model."""
LITERAL_BYTES = 32


@dataclass(kw_only=True)
class _Top:
    """The rows that stand out most, for each model: those above 0 say that A is worse.

    Attributes:
        count: how many are kept for each.
        rows: those so far, more than are kept.
        floors: by whether a row is above 0, what it has to exceed.
    """

    count: int
    rows: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    floors: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})

    def wants(self, delta: float) -> bool:
        """Whether a row may be among them."""
        return abs(delta) > self.floors[delta > 0]

    def add(self, delta: float, row: dict[str, Any]) -> None:
        """Adds a row that is wanted."""
        self.rows.append((delta, row))
        if len(self.rows) > 8 * self.count:
            self.rows = [*self._kept(above=True), *self._kept(above=False)]

    def _kept(self, *, above: bool) -> list[tuple[float, dict[str, Any]]]:
        kept = sorted((each for each in self.rows if (each[0] > 0) == above), key=lambda each: -abs(each[0]))
        if len(kept) >= self.count:
            self.floors[above] = abs(kept[self.count - 1][0])
        return kept[: self.count]

    @property
    def found(self) -> dict[str, list[dict[str, Any]]]:
        """The rows, the largest first."""
        return {
            "model_a_worse": [row for _, row in self._kept(above=True)],
            "model_b_worse": [row for _, row in self._kept(above=False)],
        }


@dataclass(kw_only=True)
class GapReport:
    """Takes documents one by one, and sums them up.

    Attributes:
        model_a, model_b: what the models are called.
    """

    model_a: str
    model_b: str
    sets: dict[str, GapSums] = field(default_factory=dict)
    kinds: dict[str, GapSums] = field(default_factory=dict)
    leaves: dict[str, set[str]] = field(default_factory=dict)
    _documents: _Top = field(default_factory=lambda: _Top(count=DOCUMENTS))
    _segments: _Top = field(default_factory=lambda: _Top(count=SEGMENTS))
    _literals: Literals = field(default_factory=Literals)

    def add(self, one: ComparedDocument) -> None:
        """Adds a document."""
        name, whole = one.text.name, one.sums
        self.sets[name] = self.sets.get(name, GapSums()) + whole
        for tag in {part for each in (*one.text.tags, name) for part in with_parents(each)}:
            self.leaves.setdefault(tag, set()).add(name)
        if not whole.bytes:
            return
        worst = self._add_segments(one)
        if not self._documents.wants(whole.delta_bits):
            return
        place = worst.get(whole.delta_bits > 0)
        text = one.text.text
        row = whole.row(name)
        self._documents.add(
            whole.delta_bits,
            {
                "dataset": name,
                "shard": one.text.shard,
                "row_index": one.text.row,
                "bytes": whole.bytes,
                "score_byte_start": one.begin,
                "score_byte_end": one.a.bytes,
                **{key: row[key] for key in ("model_a_bpb", "model_b_bpb", "gap_bpb", "delta_bits")},
                "worst_bucket": None if place is None else place.kind,
                "worst_text": None if place is None else visible(text[place.first : place.end]),
                "worst_gap_bpb": None if place is None else place.delta / place.bytes,
                "preview": window(text, *((0, 0) if place is None else (place.first, place.end))),
            },
        )

    def _add_segments(self, one: ComparedDocument) -> dict[bool, "_Place"]:
        """Adds the segments of a document; the worst of each sign."""
        text, begin = one.text.text, one.begin
        at = byte_offsets(text)
        first_counted = int(np.searchsorted(at, begin))
        ahead_a, ahead_b = (np.concatenate([[0.0], np.cumsum(each.per_byte)]) for each in (one.a, one.b))
        worst: dict[bool, _Place] = {}
        for first, end, kind in segments(text):
            if at[end] <= begin:
                continue
            first = max(first, first_counted)
            low, high = max(int(at[first]), begin), int(at[end])
            sums = GapSums(
                a=float(ahead_a[high] - ahead_a[low]), b=float(ahead_b[high] - ahead_b[low]), bytes=high - low, count=1
            )
            self.kinds[kind] = self.kinds.get(kind, GapSums()) + sums
            delta, segment = sums.delta_bits, text[first:end]
            if sums.bytes <= LITERAL_BYTES:
                self._literals.add(kind, segment, sums, one, (low, high))
            if not delta:
                continue
            place = _Place(first=first, end=end, kind=kind, delta=delta, bytes=sums.bytes)
            above, known = delta > 0, worst.get(delta > 0)
            if known is None or abs(delta) > abs(known.delta):
                worst[above] = place
            if not self._segments.wants(delta):
                continue
            self._segments.add(
                delta,
                {
                    "dataset": one.text.name,
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
        """Everything, with the largest differences first.

        Args:
            seconds: that scoring took with each model.
        """
        groups = {
            tag: sum((self.sets[leaf] for leaf in sorted(leaves)), GapSums())
            for tag, leaves in sorted(self.leaves.items())
            if not (tag in self.sets and leaves == {tag})
        }
        everything = sum(self.sets.values(), GapSums())

        def timed(name: str, sums: GapSums) -> dict[str, Any]:
            row = sums.row(name)
            for model, tokens, total, took in zip("ab", sums.tokens, everything.tokens, seconds, strict=True):
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
            "top_documents": self._documents.found,
            "top_segments": self._segments.found,
            "top_literals": self._literals.found(LITERALS),
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
