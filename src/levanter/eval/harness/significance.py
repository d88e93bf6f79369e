"""Comparison of two runs on the same documents by the paired bootstrap.

Documents are drawn with replacement, the same ones for both runs, and a metric is computed from each draw. Because both
runs answered the same documents, their common difficulty cancels: the interval is narrower than that of two independent
runs. The *interval* contains 95 % of the differences, and *p* is the probability of a difference of at least this size
without a cause.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from levanter.eval.harness.encoding import HarnessError
from levanter.eval.harness.results import Sample

DRAWS = 10_000
"""Number of bootstrap draws."""
_DRAWS_PER_STEP = 1 << 22
"""Random numbers that are drawn at once."""
Aggregate = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(sums of a metric's values, sums of their weights) → the metric."""


def _perplexity(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    # The bound keeps the exponential finite in float64.
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
        metric: the metric; the answers' filter follows a comma, unless it is `none`.
        documents: number of documents in both runs.
        ours, theirs: the metric of this run and of the other run.
        low, high: the interval of the difference, ours minus theirs.
        p: two-sided p-value.
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
        """`better`, `worse`, `equal`, or `noise` if the interval contains 0."""
        if self.ours == self.theirs and self.low == self.high == 0:
            return "equal"
        # The p-value may disagree with the interval by the resolution of the draws; the interval decides.
        if self.low <= 0 <= self.high:
            return "noise"
        lower = self.metric.partition(",")[0] in LESS_IS_BETTER
        return "better" if (self.ours > self.theirs) != lower else "worse"


def compare(
    ours: Mapping[str, Sequence[Sample]], theirs: Mapping[str, Sequence[Sample]], *, seed: int = 0
) -> list[Difference]:
    """The metrics of tasks that both runs have.

    Args:
        ours: task → samples of this run.
        theirs: task → samples of the other run.
        seed: seed of the draws.

    Raises:
        HarnessError: the runs have no document in common, or different documents have the same index.
    """
    differences, other_documents = [], []
    for task in ours:
        pairs = _pairs(ours[task], theirs.get(task, ()))
        # Documents are paired by index: another version of the data set would pair different documents.
        if any(ours_sample.doc_hash != theirs_sample.doc_hash for ours_sample, theirs_sample in pairs):
            other_documents.append(task)
            continue
        # A new generator for each task: a task has the same interval whatever other tasks are compared.
        differences += _differences(task, pairs, np.random.default_rng(seed))
    if other_documents:
        raise HarnessError(
            f"against: {', '.join(other_documents)}: the other run has different documents under the same indices; "
            "only answers to the same documents can be compared"
        )
    if not differences:
        raise HarnessError(
            f"against: no task and document in common: here {', '.join(ours)}; there {', '.join(theirs)}"
        )
    return differences


def _pairs(ours: Sequence[Sample], theirs: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    others = {(sample.doc_id, sample.filter): sample for sample in theirs}
    return [
        (sample, others[sample.doc_id, sample.filter]) for sample in ours if (sample.doc_id, sample.filter) in others
    ]


def _differences(task: str, pairs: Sequence[tuple[Sample, Sample]], generator: np.random.Generator) -> list[Difference]:
    by_metric: dict[tuple[str, str], list[tuple[object, object]]] = {}
    for mine, other in pairs:
        for name in mine.metrics.keys() & other.metrics.keys():
            by_metric.setdefault((name, mine.filter), []).append((mine.metrics[name], other.metrics[name]))
    differences = []
    # Sorted, because the keys above are a set, and the draws of a metric depend on those before it.
    for (name, filtered), values in sorted(by_metric.items()):
        if not all(_is_value(value) for pair in values for value in pair):
            continue
        a, b = (np.asarray([_weighted(pair[n]) for pair in values], np.float64) for n in (0, 1))
        aggregate = _AGGREGATES.get(name, lambda values, weights: values / weights)
        draws = _bootstrap_differences(a, b, aggregate, generator)
        low, high = np.percentile(draws, [2.5, 97.5])
        # Twice the smaller tail of the bootstrap distribution.
        p = 2 * min((draws <= 0).mean(), (draws >= 0).mean())
        differences.append(
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
    return differences


def _is_value(value: object) -> bool:
    if isinstance(value, tuple):
        return len(value) == 2 and all(isinstance(item, float) for item in value)
    return isinstance(value, float)


def _weighted(value: object) -> tuple[float, float]:
    if isinstance(value, tuple):
        total, weight = value
        return total, weight
    assert isinstance(value, float)
    return value, 1.0


def _bootstrap_differences(
    a: np.ndarray, b: np.ndarray, aggregate: Aggregate, generator: np.random.Generator
) -> np.ndarray:
    """The metric's difference in each draw of documents, `[DRAWS]`."""
    count, differences = len(a), []
    step = max(1, _DRAWS_PER_STEP // count)
    for first in range(0, DRAWS, step):
        # `[draw, document]`: the same documents for both runs, which makes the bootstrap a paired one.
        rows = generator.integers(0, count, (min(step, DRAWS - first), count))
        mine, other = (aggregate(*np.moveaxis(values[rows].sum(axis=1), -1, 0)) for values in (a, b))
        differences.append(mine - other)
    return np.concatenate(differences)


def differences_table(differences: Sequence[Difference]) -> str:
    """The differences as text lines."""
    rows = [
        (
            difference.task,
            difference.metric,
            f"{difference.ours:.4f}",
            f"{difference.theirs:.4f}",
            f"{difference.ours - difference.theirs:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]",
            f"p {difference.p:.3f}",
            difference.verdict,
        )
        for difference in differences
    ]
    head = ("task", "metric", "here", "there", "difference, 95 %", "", "")
    widths = [max(len(row[n]) for row in [head, *rows]) for n in range(len(head))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]
    )
