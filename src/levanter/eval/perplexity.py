"""Perplexity: log-probabilities of tokens → loss, perplexity and bits per byte, per set and per tag.

With n scored tokens that represent b UTF-8 bytes, and N = −Σ log p in nats over them:

    loss = N / n        perplexity = exp(loss)        bits per byte = N / (b · ln 2)

A set whose ids do not keep its text has no b, and so no bits per byte; neither have sums and averages over it.

The *accuracy*, where it is computed, is the share of the scored tokens that were the most likely token.

A *micro* average treats several sets as one (N, n and b are added); a *macro* average is the mean of the sets' own
values. *Tags* group sets; a set with tag `a/b` also has the tag `a`. Log-probabilities arrive as float32 in any pieces,
from any process; sums are float64, first per row and then over rows in order, so that neither the batch size nor the
number of processes changes a result.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from levanter.data.eval_sequences import EvalRows, EvalSequences

if TYPE_CHECKING:
    from haliax import NamedArray


@dataclass(frozen=True, kw_only=True)
class Score:
    """The sums of scored tokens, and the metrics that follow from them.

    Attributes:
        nats: −Σ log p.
        tokens: number of scored tokens.
        bytes: the UTF-8 bytes of the text that these represent; None where ids do not keep the text.
        likeliest: number of tokens that were the most likely token; None if that was not computed.
    """

    nats: float
    tokens: int
    bytes: int | None
    likeliest: int | None = None

    def __add__(self, other: "Score") -> "Score":
        # A sum over sets has an accuracy only if every set has one.
        known = self.likeliest is not None and other.likeliest is not None
        return Score(
            nats=self.nats + other.nats,
            tokens=self.tokens + other.tokens,
            bytes=None if self.bytes is None or other.bytes is None else self.bytes + other.bytes,
            likeliest=(self.likeliest or 0) + (other.likeliest or 0) if known else None,
        )

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return perplexity(self.loss)

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte; None where ids do not keep the text, NaN if no scored token represents a byte."""
        return None if self.bytes is None else self.nats / (self.bytes * math.log(2)) if self.bytes else math.nan

    @property
    def accuracy(self) -> float | None:
        """The share of the tokens that were the most likely token; None if that was not computed."""
        return None if self.likeliest is None or not self.tokens else self.likeliest / self.tokens

    def to_json(self) -> dict[str, Any]:
        """The figures as a JSON object; null for bytes that are not known."""
        accuracy = {} if self.accuracy is None else {"accuracy": self.accuracy}
        return {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            **accuracy,
            "tokens": self.tokens,
            "bytes": self.bytes,
        }


@dataclass(frozen=True, kw_only=True)
class SetScore:
    """The score of one set, with its numbers of rows and documents, and why it has no bytes (`SetSpan.text_loss`)."""

    name: str
    tags: tuple[str, ...]
    score: Score
    rows: int
    documents: int
    text_loss: str | None = None


@dataclass(frozen=True, kw_only=True)
class Average:
    """Micro and macro averages over some sets."""

    sets: tuple[str, ...]
    micro: Score
    macro_loss: float
    macro_bits_per_byte: float | None

    @property
    def macro_perplexity(self) -> float:
        """The perplexity of the macro loss."""
        return perplexity(self.macro_loss)

    def to_json(self) -> dict[str, Any]:
        """The sets' names and both averages as a JSON object."""
        return {
            "sets": list(self.sets),
            "micro": self.micro.to_json(),
            "macro": {
                "loss": self.macro_loss,
                "perplexity": self.macro_perplexity,
                "bits_per_byte": self.macro_bits_per_byte,
            },
        }


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """The result of an evaluation."""

    sets: tuple[SetScore, ...]

    @property
    def overall(self) -> Average:
        """The average over all sets."""
        return _average(self.sets)

    @property
    def tags(self) -> dict[str, Average]:
        """The average of every tag that is not just a set's own name, and of the parents of tags."""
        # A set has its own name as a tag: that average would only repeat the set.
        names = {one.name for one in self.sets}
        sets_by_tag: dict[str, list[SetScore]] = {}
        for one in self.sets:
            # Two tags of a set may have the same parent, which must count the set once.
            for tag in dict.fromkeys(itertools.chain.from_iterable(map(with_parents, one.tags))):
                sets_by_tag.setdefault(tag, []).append(one)
        return {tag: _average(sets) for tag, sets in sets_by_tag.items() if tag not in names or len(sets) > 1}

    @property
    def not_finite(self) -> tuple[str, ...]:
        """Sets whose loss is infinite or not a number: some token had probability 0, or the model overflowed."""
        return tuple(one.name for one in self.sets if not math.isfinite(one.score.nats))

    @property
    def headline(self) -> str:
        """One line: the loss over all sets."""
        return f"validation loss {self.overall.micro.loss:.4f} nats per token"

    def metrics(self, prefix: str = "eval") -> dict[str, float]:
        """The metrics for trackers, with upstream's names.

        `loss` and `bpb` are micro averages, `macro_loss` and `macro_bpb` macro averages (not given for a tag of one
        set); a set is a tag of its own name. The micro loss of a tag that only exists as a parent (`a` of `a/b`) is
        called `micro_loss`. Bits per byte that are not known are left out.
        """
        start = f"{prefix}/" if prefix else ""
        overall = self.overall
        metrics: dict[str, float | None] = {
            f"{start}loss": overall.micro.loss,
            f"{start}perplexity": overall.micro.perplexity,
            f"{start}bpb": overall.micro.bits_per_byte,
            f"{start}macro_loss": overall.macro_loss,
            f"{start}macro_bpb": overall.macro_bits_per_byte,
            f"{start}tokens": overall.micro.tokens,
        }
        if overall.micro.accuracy is not None:
            metrics[f"{start}accuracy"] = overall.micro.accuracy
        for one in self.sets:
            metrics[f"{start}{one.name}/loss"] = one.score.loss
            metrics[f"{start}{one.name}/bpb"] = one.score.bits_per_byte
            if one.score.accuracy is not None:
                metrics[f"{start}{one.name}/accuracy"] = one.score.accuracy
        # Upstream's names differ for tags that sets carry and for parents that only follow from them.
        explicit = {tag for one in self.sets for tag in one.tags}
        for tag, average in self.tags.items():
            metrics[f"{start}{tag}/{'loss' if tag in explicit else 'micro_loss'}"] = average.micro.loss
            metrics[f"{start}{tag}/bpb"] = average.micro.bits_per_byte
            if tag not in explicit or len(average.sets) > 1:
                metrics[f"{start}{tag}/macro_loss"] = average.macro_loss
                metrics[f"{start}{tag}/macro_bpb"] = average.macro_bits_per_byte
        return {name: value for name, value in metrics.items() if value is not None}

    def to_json(self) -> dict[str, Any]:
        """The result as mappings, lists and numbers (some of which may not be finite)."""
        return {
            "overall": self.overall.to_json(),
            "sets": {
                one.name: {
                    **one.score.to_json(),
                    "documents": one.documents,
                    "rows": one.rows,
                    "tags": list(one.tags),
                    **({} if one.text_loss is None else {"no_bits_per_byte": one.text_loss}),
                }
                for one in self.sets
            },
            "tags": {tag: average.to_json() for tag, average in self.tags.items()},
        }


class RowScores:
    """Collects log-probabilities row by row, in any order and in any pieces.

    Each scored position is added once in the entire job: if several devices hold copies of it, one of them adds it.

    Args:
        row_count: the rows of all sets (`EvalSequences.row_count`).
    """

    def __init__(self, row_count: int):
        self.nats = np.zeros(row_count, np.float64)
        self.tokens = np.zeros(row_count, np.int64)
        self.likeliest: np.ndarray | None = None
        self._bad: dict[int, tuple[int, float]] = {}

    def add(
        self,
        batch: EvalRows,
        logprobs: np.ndarray,
        *,
        index: tuple[slice, slice] | None = None,
        likeliest: np.ndarray | None = None,
    ) -> None:
        """Adds the log-probabilities of a batch or of a block of it.

        Args:
            batch: the complete rows.
            logprobs: float `[batch, position]`: entry t is log p(token t+1 | tokens 0 … t). Values at positions that
                are not scored are ignored.
            index: which block of the batch `logprobs` is; by default the entire batch.
            likeliest: bool, of the shape of `logprobs`: whether token t+1 was the most likely token; None if that is
                not computed, in this and in every other batch.
        """
        block = (slice(None), slice(None)) if index is None else index
        mask, rows = batch.loss_mask[block], batch.rows[block[0]]
        # A shape that broadcasts would be summed without an error, and wrongly.
        assert logprobs.shape == mask.shape, f"log-probabilities {logprobs.shape} for a block of {mask.shape}"
        # Rows below 0 are padding of the batch, which several batches may have: they must not be added anywhere.
        real = rows >= 0
        mask, rows, logprobs = mask[real], rows[real], logprobs[real]
        if likeliest is not None:
            self.likeliest = np.zeros(len(self.tokens), np.int64) if self.likeliest is None else self.likeliest
            self.likeliest[rows] += (likeliest[real] & mask).sum(axis=1)
        # `where`, not a product: a position that is not scored may be NaN, and 0 · NaN is NaN.
        added = np.where(mask, logprobs, 0).sum(axis=1, dtype=np.float64)
        self.nats[rows] -= added
        self.tokens[rows] += mask.sum(axis=1)
        for n in np.flatnonzero(~np.isfinite(added)):
            at = int(np.flatnonzero(mask[n] & ~np.isfinite(logprobs[n]))[0])
            # Entry t is the log-probability of token t + 1.
            position_and_value = (at + (block[1].start or 0) + 1, float(logprobs[n, at]))
            first = self._bad.get(int(rows[n]), position_and_value)
            # Blocks arrive in any order, so the first position is the least one that was seen so far.
            self._bad[int(rows[n])] = min(position_and_value, first, key=lambda pair: pair[0])

    def first_not_finite(self, sequences: EvalSequences) -> str | None:
        """Describes the first scored token without a finite log-probability; None if all are finite."""
        if not self._bad:
            return None
        row = min(self._bad)
        position, value = self._bad[row]
        # Rows are numbered over all sets, one set after the other.
        (span,) = [span for span in sequences.sets if span.first_row <= row < span.first_row + span.rows]
        where = f"token {position + 1:,} of row {row - span.first_row + 1:,} of {span.name}"
        return f"the first is {where} (log p = {value}), of {len(self._bad):,} such rows"


def fetch_scores(outputs: "NamedArray | tuple[NamedArray, NamedArray]") -> tuple[np.ndarray, np.ndarray | None]:
    """The outputs of a scoring Program for a batch: log-probabilities, and hits (the most likely token was the target).

    Hits are None for Programs that do not compute them.
    """
    if isinstance(outputs, tuple):
        logprobs, hits = outputs
        return logprobs.array, hits.array  # pyright: ignore
    return outputs.array, None  # pyright: ignore


def summarize(sequences: EvalSequences, scores: RowScores, *, max_rows_per_set: int | None = None) -> EvalResult:
    """The result of an evaluation whose rows have all been scored.

    Args:
        sequences: the rows.
        scores: their log-probabilities, merged over processes.
        max_rows_per_set: number of rows of each set that were to be scored; all by default.
    """
    sets = []
    for span in sequences.sets:
        count = span.rows if max_rows_per_set is None else min(span.rows, max_rows_per_set)
        rows = np.arange(span.first_row, span.first_row + count)
        tokens = num_bytes = 0
        # In pieces, so that a large set is not in memory as a whole.
        for start in range(0, count, 1024):
            taken = sequences.take(rows[start : start + 1024])
            # Every scored token has to be added exactly once: a row that a process missed, or two added, would only
            # show as a plausible loss.
            wrong = np.flatnonzero(scores.tokens[taken.rows] != taken.scored_tokens)
            assert not len(wrong), (
                f"set {span.name}: row {taken.rows[wrong[0]]} scores {taken.scored_tokens[wrong[0]]} tokens, but "
                f"{scores.tokens[taken.rows[wrong[0]]]} were added"
            )
            tokens += int(taken.scored_tokens.sum())
            num_bytes += int(taken.scored_bytes.sum())
        likeliest = None if scores.likeliest is None else int(scores.likeliest[rows].sum())
        score = Score(
            nats=float(scores.nats[rows].sum()),
            tokens=tokens,
            bytes=num_bytes if span.text_loss is None else None,
            likeliest=likeliest,
        )
        sets.append(
            SetScore(
                name=span.name,
                tags=span.tags,
                score=score,
                rows=count,
                documents=span.documents,
                text_loss=span.text_loss,
            )
        )
    return EvalResult(sets=tuple(sets))


def perplexity(loss: float) -> float:
    """exp(loss), infinite if that overflows a float."""
    # exp(709.8) is the largest float64; `math.exp` raises beyond it.
    return math.exp(loss) if loss < 709 or math.isnan(loss) else math.inf


def with_parents(tag: str) -> tuple[str, ...]:
    """A tag and its parents: `a/b/c` → `a/b/c`, `a`, `a/b`."""
    components = tag.split("/")
    return (tag, *("/".join(components[:i]) for i in range(1, len(components)) if components[i - 1]))


def _average(sets: Sequence[SetScore]) -> Average:
    # A set without scored tokens has no loss, and a macro average over it would be NaN.
    scored = [one.score for one in sets if one.score.tokens]
    # A set without bytes (nothing but EOS is scored) has no bits per byte; of one whose bytes are unknown, nothing is
    # known about the average either.
    with_bytes = [score.bits_per_byte for score in scored if score.bytes != 0]
    return Average(
        sets=tuple(one.name for one in sets),
        # The start is a real score: one with `likeliest` None would drop the accuracy.
        micro=sum(scored[1:], start=scored[0]) if scored else Score(nats=0.0, tokens=0, bytes=0),
        macro_loss=_mean([score.loss for score in scored]),
        macro_bits_per_byte=None if None in with_bytes else _mean([bits for bits in with_bytes if bits is not None]),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
