"""The HTML page of a harness run: metrics with standard errors, every document with its answers, a comparison.

Documents are data in the page, which its script inserts as text.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from levanter.eval.harness.results import Sample, metric_values
from levanter.eval.harness.significance import Difference
from levanter.html.page import result_page

_PAGE = Path(__file__).with_name("page.html")
_SHARES = ("acc", "acc_norm", "exact_match", "f1")
"""Metrics between 0 and 1, which are drawn as bars."""


def harness_page(
    results: Mapping[str, Any],
    samples: Mapping[str, Sequence[Sample]],
    *,
    title: str,
    facts: Mapping[str, str],
    differences: Sequence[Difference] = (),
    against: str = "",
) -> str:
    """The page.

    Args:
        results: lm_eval's results.
        samples: task → samples; empty for a page without documents.
        title: heading of the page.
        facts: facts of the run, by name.
        differences: differences from another run.
        against: the name of the other run.
    """
    data = {
        "metrics": _metrics(results),
        "against": against,
        "differences": [
            {
                **{key: getattr(item, key) for key in ("task", "metric", "documents", "verdict")},
                **{key: _finite(getattr(item, key)) for key in ("ours", "theirs", "low", "high", "p")},
            }
            for item in differences
        ],
        "samples": {task: [_sample_json(item) for item in some] for task, some in samples.items()},
    }
    return result_page(_PAGE, data, title=title, facts=facts)


def _metrics(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    values = {(task, metric): value for task, metric, value in metric_values(results)}
    counts = results.get("n-samples") or {}
    rows = []
    for (task, metric), value in values.items():
        if "_stderr" in metric:
            continue
        # lm_eval appends the filter of the answers to both: `acc_stderr,strict` is the error of `acc,strict`.
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


def _sample_json(sample: Sample) -> dict[str, Any]:
    probabilities = sample.probabilities
    answers = []
    for n, (arguments, answer) in enumerate(zip(sample.arguments, sample.answers, strict=False)):
        if isinstance(answer, tuple):
            answers.append(
                {
                    "text": str(arguments[1]),
                    "logprob": _finite(answer[0]),
                    "greedy": answer[1],
                    "share": probabilities[n] if probabilities else None,
                }
            )
        else:
            # A rolling log-probability is a number alone; generated text is a string.
            number = isinstance(answer, float)
            answers.append({"text": None if number else str(answer), "logprob": _finite(answer) if number else None})
    # The choices of a document usually have one context; tasks like Winogrande have one for each.
    contexts = list(dict.fromkeys(str(arguments[0]) for arguments in sample.arguments))
    return {
        "id": sample.doc_id,
        "filter": sample.filter,
        "context": contexts[0] if len(contexts) == 1 else "\n———\n".join(contexts),
        "target": sample.target,
        "right": sample.is_right,
        "answers": answers,
        "metrics": {name: _finite(value) for name, value in sample.metrics.items() if isinstance(value, float)},
    }
