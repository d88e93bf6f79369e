"""Results: lm_eval's dictionary, its files, and numbers for trackers."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np

from levanter.io import join

NO_FILTER = ",none"
"""How lm_eval marks a metric of unfiltered answers."""


def date_id(now: datetime) -> str:
    """A moment as lm_eval writes it into names of files."""
    return now.isoformat().replace(":", "-")


def results_name(date: str) -> str:
    """The file of a run's results."""
    return f"results_{date}.json"


def samples_name(task: str, date: str) -> str:
    """The file of a task's documents, questions and answers."""
    return f"samples_{task.replace('/', '__')}_{date}.jsonl"


def result_files(
    folder: str, found: Mapping[str, Any], samples: Mapping[str, Sequence[Any]], date: str
) -> dict[str, bytes]:
    """The files of a run by their paths, in the order in which they are written: that of the results comes last.

    Args:
        folder: where.
        found: the results.
        samples: of each task; nothing for those that are not written.
        date: of the run, as `date_id` gives it.
    """
    contents = {}
    for task, lines in samples.items():
        written = (json.dumps(_line(line), default=_plain, ensure_ascii=False) for line in lines)
        contents[join(folder, samples_name(task, date))] = "".join(f"{line}\n" for line in written).encode()
    results = json.dumps(found, indent=2, default=_plain, ensure_ascii=False)
    return {**contents, join(folder, results_name(date)): results.encode()}


def _line(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A sample as lm_eval writes it: what was asked by name, what was answered as texts."""
    asked = {
        f"gen_args_{n}": {f"arg_{k}": one for k, one in enumerate(args)} for n, args in enumerate(sample["arguments"])
    }
    return {
        **sample,
        "arguments": asked,
        "resps": _texts(sample["resps"]),
        "filtered_resps": _texts(sample["filtered_resps"]),
        "target": str(sample["target"]),
    }


def _texts(value: object) -> object:
    return [_texts(each) for each in value] if isinstance(value, (list, tuple)) else str(value)


def _plain(value: object) -> object:
    if isinstance(value, (np.integer, np.floating, np.bool_)):
        return value.item()
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)


def numbers(found: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """The metrics of a run's results: task or group, metric, value.

    A metric of filtered answers keeps the filter's name behind a comma; standard errors are metrics too.
    """
    for table in ("results", "groups"):
        for task, metrics in (found.get(table) or {}).items():
            if table == "groups" and task in (found.get("results") or {}):
                continue
            for name, value in metrics.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool) and "," in name:
                    yield task, name.removesuffix(NO_FILTER), float(value)


def tracked(found: Mapping[str, Any], prefix: str = "lm_eval") -> dict[str, float]:
    """The metrics for trackers: `lm_eval/<task>/<metric>`, and averages over the tasks that have a metric."""
    named = {f"{prefix}/{task}/{metric}": value for task, metric, value in numbers(found)}
    return {**named, **{f"{prefix}/averages/{name}": value for name, value in averages(found).items()}}


def averages(found: Mapping[str, Any]) -> dict[str, float]:
    """Means of each metric over tasks: `macro_avg_…` counts tasks, `micro_avg_…` documents."""
    counts = {task: each.get("effective", 0) for task, each in (found.get("n-samples") or {}).items()}
    by_metric: dict[str, list[tuple[float, int]]] = {}
    for task, metric, value in numbers(found):
        if task in counts and "_stderr" not in metric and math.isfinite(value):
            by_metric.setdefault(metric, []).append((value, counts[task]))
    result = {}
    for metric, values in by_metric.items():
        total = sum(count for _, count in values)
        result[f"macro_avg_{metric}"] = sum(value for value, _ in values) / len(values)
        if total:
            result[f"micro_avg_{metric}"] = sum(value * count for value, count in values) / total
    return result


def table_of(found: Mapping[str, Any]) -> str:
    """The results as lines: task, metric, value and standard error."""
    values = {(task, metric): value for task, metric, value in numbers(found)}
    rows = []
    for (task, metric), value in values.items():
        if "_stderr" in metric:
            continue
        name, _, filtered = metric.partition(",")
        error = values.get((task, f"{name}_stderr{',' + filtered if filtered else ''}"))
        rows.append((task, metric, f"{value:.4f}", "" if error is None else f"± {error:.4f}"))
    if not rows:
        return "no metrics"
    widths = [max(len(row[n]) for row in rows) for n in range(4)]
    return "\n".join(
        f"{task:<{widths[0]}}  {metric:<{widths[1]}}  {value:>{widths[2]}}  {error}".rstrip()
        for task, metric, value, error in rows
    )
