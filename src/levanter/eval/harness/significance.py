"""Two runs on the same documents: how much of a difference is noise, by the paired bootstrap.

Documents are drawn with replacement, the same ones for both runs, and a metric is computed of each draw. Because both
runs answered the same documents, what is hard for both cancels: an interval is narrower than that of two separate ones.
The *interval* holds 95 % of the differences, and *p* is how often a difference this far from none would come of chance.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from levanter.eval.harness.encoding import HarnessError
from levanter.eval.harness.samples import Sample

DRAWS = 10_000
"""Samples of the bootstrap."""
_AT_ONCE = 1 << 22
"""Numbers that are drawn at once."""
Aggregate = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Sums of a metric's values and of their weights → the metric."""


def _perplexity(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return np.exp(np.minimum(-values / weights, 700.0))


_AGGREGATES: Mapping[str, Aggregate] = {
    "perplexity": _perplexity,
    "word_perplexity": _perplexity,
    "byte_perplexity": _perplexity,
    "bits_per_byte": lambda values, weights: -values / weights / math.log(2),
}
LESS_IS_BETTER = frozenset(_AGGREGATES)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A metric of two runs on the same documents.

    Attributes:
        task: the task.
        metric: the metric, with the answers' filter behind a comma unless there is none.
        documents: how many both answered.
        ours, theirs: the metric of this run and of the other.
        low, high: the interval of the difference, ours less theirs.
        p: the probability of a difference as large without a cause.
    """

    task: str
    metric: str
    documents: int
    ours: float
    theirs: float
    low: float
    high: float
    p: float

    @property
    def verdict(self) -> str:
        """`better`, `worse`, `equal`, or `noise` where the interval holds no difference."""
        if self.ours == self.theirs and self.low == self.high == 0:
            return "equal"
        if self.low <= 0 <= self.high:
            return "noise"
        lower = self.metric.partition(",")[0] in LESS_IS_BETTER
        return "better" if (self.ours > self.theirs) != lower else "worse"


def compare(
    ours: Mapping[str, Sequence[Sample]], theirs: Mapping[str, Sequence[Sample]], *, seed: int = 0
) -> list[Difference]:
    """The metrics of tasks that both runs have.

    Args:
        ours: samples of this run, by task.
        theirs: those of the other.
        seed: of the draws.

    Raises:
        HarnessError: they have no document in common, or documents of one number differ.
    """
    found, other_documents = [], []
    for task in ours:
        pairs = _pairs(ours[task], theirs.get(task, ()))
        if any(mine.doc_hash != other.doc_hash for mine, other in pairs):
            other_documents.append(task)
            continue
        found += _differences(task, pairs, np.random.default_rng(seed))
    if other_documents:
        raise HarnessError(
            f"against: {', '.join(other_documents)}: the other run had other documents under the same numbers; only "
            "answers to the same documents are compared"
        )
    if not found:
        raise HarnessError(
            f"against: no task and document in common: here {', '.join(ours)}; there {', '.join(theirs)}"
        )
    return found


def _pairs(ours: Sequence[Sample], theirs: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    others = {(each.doc_id, each.filter): each for each in theirs}
    return [(each, others[each.doc_id, each.filter]) for each in ours if (each.doc_id, each.filter) in others]


def _differences(task: str, pairs: Sequence[tuple[Sample, Sample]], dice: np.random.Generator) -> list[Difference]:
    by_metric: dict[tuple[str, str], list[tuple[object, object]]] = {}
    for mine, other in pairs:
        for name in mine.metrics.keys() & other.metrics.keys():
            by_metric.setdefault((name, mine.filter), []).append((mine.metrics[name], other.metrics[name]))
    found = []
    for (name, filtered), values in sorted(by_metric.items()):
        if not all(_is_value(each) for pair in values for each in pair):
            continue
        a, b = (np.asarray([_weighted(pair[n]) for pair in values], np.float64) for n in (0, 1))
        aggregate = _AGGREGATES.get(name, lambda values, weights: values / weights)
        draws = _drawn(a, b, aggregate, dice)
        low, high = np.percentile(draws, [2.5, 97.5])
        p = 2 * min((draws <= 0).mean(), (draws >= 0).mean())
        found.append(
            Difference(
                task=task,
                metric=name if filtered == "none" else f"{name},{filtered}",
                documents=len(values),
                ours=float(aggregate(*a.sum(axis=0))),
                theirs=float(aggregate(*b.sum(axis=0))),
                low=float(low),
                high=float(high),
                p=float(min(1.0, p)),
            )
        )
    return found


def _is_value(value: object) -> bool:
    if isinstance(value, tuple):
        return len(value) == 2 and all(isinstance(each, float) for each in value)
    return isinstance(value, float)


def _weighted(value: object) -> tuple[float, float]:
    if isinstance(value, tuple):
        total, weight = value
        return total, weight
    assert isinstance(value, float)
    return value, 1.0


def _drawn(a: np.ndarray, b: np.ndarray, aggregate: Aggregate, dice: np.random.Generator) -> np.ndarray:
    """Differences of the metric in draws of documents, `[DRAWS]`."""
    count, found = len(a), []
    step = max(1, _AT_ONCE // count)
    for first in range(0, DRAWS, step):
        rows = dice.integers(0, count, (min(step, DRAWS - first), count))
        mine, other = (aggregate(*np.moveaxis(each[rows].sum(axis=1), -1, 0)) for each in (a, b))
        found.append(mine - other)
    return np.concatenate(found)


def table_of(found: Sequence[Difference]) -> str:
    """The differences as lines."""
    rows = [
        (
            each.task,
            each.metric,
            f"{each.ours:.4f}",
            f"{each.theirs:.4f}",
            f"{each.ours - each.theirs:+.4f} [{each.low:+.4f}, {each.high:+.4f}]",
            f"p {each.p:.3f}",
            each.verdict,
        )
        for each in found
    ]
    head = ("task", "metric", "here", "there", "difference, 95 %", "", "")
    widths = [max(len(row[n]) for row in [head, *rows]) for n in range(len(head))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]
    )
