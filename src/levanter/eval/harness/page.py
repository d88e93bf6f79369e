"""A page of a harness's run: tasks with error bars, every document with what the model made of it, another run.

It is one self-contained file. Documents are data in it, which its script shows, so their text is never taken for HTML.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from levanter.eval.harness.results import numbers
from levanter.eval.harness.samples import Sample
from levanter.eval.harness.significance import Difference
from levanter.html.page import result_page

_PAGE = Path(__file__).with_name("page.html")
_SHARES = ("acc", "acc_norm", "exact_match", "f1")
"""Metrics between 0 and 1."""


def page_of(
    found: Mapping[str, Any],
    samples: Mapping[str, Sequence[Sample]],
    *,
    title: str,
    facts: Mapping[str, str],
    differences: Sequence[Difference] = (),
    against: str = "",
) -> str:
    """The page.

    Args:
        found: the results.
        samples: of each task; nothing for a page without documents.
        title: above it.
        facts: of the run.
        differences: from another run.
        against: what that one is called.
    """
    data = {
        "metrics": _metrics(found),
        "against": against,
        "differences": [
            {
                **{key: getattr(each, key) for key in ("task", "metric", "documents", "verdict")},
                **{key: _finite(getattr(each, key)) for key in ("ours", "theirs", "low", "high", "p")},
            }
            for each in differences
        ],
        "samples": {task: [_shown(each) for each in some] for task, some in samples.items()},
    }
    return result_page(_PAGE, data, title=title, facts=facts)


def _metrics(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    values = {(task, metric): value for task, metric, value in numbers(found)}
    counts = found.get("n-samples") or {}
    rows = []
    for (task, metric), value in values.items():
        if "_stderr" in metric:
            continue
        name, _, filtered = metric.partition(",")
        error = values.get((task, f"{name}_stderr{',' + filtered if filtered else ''}"))
        rows.append(
            {
                "task": task,
                "metric": metric,
                "value": _finite(value),
                "error": _finite(error),
                "documents": (counts.get(task) or {}).get("effective"),
                "share": name in _SHARES,
            }
        )
    return rows


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _shown(sample: Sample) -> dict[str, Any]:
    chances = sample.probabilities
    answers = []
    for n, (asked, answer) in enumerate(zip(sample.asked, sample.answers, strict=False)):
        if isinstance(answer, tuple):
            answers.append(
                {
                    "text": str(asked[1]),
                    "logprob": _finite(answer[0]),
                    "greedy": answer[1],
                    "share": chances[n] if chances else None,
                }
            )
        else:
            number = isinstance(answer, float)
            answers.append({"text": None if number else str(answer), "logprob": _finite(answer) if number else None})
    contexts = list(dict.fromkeys(str(asked[0]) for asked in sample.asked))
    return {
        "id": sample.doc_id,
        "filter": sample.filter,
        "context": contexts[0] if len(contexts) == 1 else "\n———\n".join(contexts),
        "target": sample.target,
        "right": sample.is_right,
        "answers": answers,
        "metrics": {name: _finite(value) for name, value in sample.metrics.items() if isinstance(value, float)},
    }
