"""Results of a harness run: lm_eval's dictionary and samples, their files, and metrics for trackers."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np

from levanter.eval.harness.encoding import HarnessError
from levanter.io import exists, join, open_read
from levanter.io.paths import base_name

NO_FILTER = ",none"
"""lm_eval's suffix of a metric of unfiltered answers."""


def date_id(now: datetime) -> str:
    """A date as lm_eval writes it into file names."""
    return now.isoformat().replace(":", "-")


def results_name(date: str) -> str:
    """The file name of a run's results."""
    return f"results_{date}.json"


def samples_name(task: str, date: str) -> str:
    """The file name of a task's samples."""
    return f"samples_{task.replace('/', '__')}_{date}.jsonl"


def result_files(
    folder: str, results: Mapping[str, Any], samples: Mapping[str, Sequence[Any]], date: str
) -> dict[str, bytes]:
    """Path → content of a run's files, in the order in which they are written: the results come last.

    Args:
        folder: folder of the files.
        results: lm_eval's results.
        samples: task → samples to write.
        date: date of the run, see `date_id`.
    """
    contents = {}
    for task, lines in samples.items():
        written = (json.dumps(_line(line), default=_plain, ensure_ascii=False) for line in lines)
        contents[join(folder, samples_name(task, date))] = "".join(f"{line}\n" for line in written).encode(
            errors="backslashreplace"
        )
    content = json.dumps(results, indent=2, default=_plain, ensure_ascii=False)
    return {**contents, join(folder, results_name(date)): content.encode(errors="backslashreplace")}


def _line(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A sample in lm_eval's file format: arguments by name, answers as text."""
    arguments = {
        f"gen_args_{n}": {f"arg_{k}": one for k, one in enumerate(args)} for n, args in enumerate(sample["arguments"])
    }
    return {
        **sample,
        "arguments": arguments,
        # lm_eval writes numbers and flags of answers as text; `_answer` reads them back.
        "resps": _texts(sample["resps"]),
        "filtered_resps": _texts(sample["filtered_resps"]),
        "target": str(sample["target"]),
    }


def _texts(value: object) -> object:
    return [_texts(item) for item in value] if isinstance(value, (list, tuple)) else str(value)


def _plain(value: object) -> object:
    if isinstance(value, (np.integer, np.floating, np.bool_)):
        return value.item()
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)


def metric_values(results: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """The metrics of a run: (task or group, metric, value).

    A metric of filtered answers has the filter's name after a comma; standard errors are metrics too.
    """
    for table in ("results", "groups"):
        for task, metrics in (results.get(table) or {}).items():
            if table == "groups" and task in (results.get("results") or {}):
                continue
            for name, value in metrics.items():
                # Keys without a comma (`alias`, `sample_len`) are no metrics.
                if isinstance(value, (int, float)) and not isinstance(value, bool) and "," in name:
                    yield task, name.removesuffix(NO_FILTER), float(value)


def tracker_metrics(results: Mapping[str, Any], prefix: str = "lm_eval") -> dict[str, float]:
    """Metrics for trackers: `lm_eval/<task>/<metric>`, and averages over the tasks that have a metric."""
    named = {f"{prefix}/{task}/{metric}": value for task, metric, value in metric_values(results)}
    return {**named, **{f"{prefix}/averages/{name}": value for name, value in averages(results).items()}}


def averages(results: Mapping[str, Any]) -> dict[str, float]:
    """Means of each metric over tasks: `macro_avg_…` weights tasks equally, `micro_avg_…` by number of documents."""
    counts = {task: sizes.get("effective", 0) for task, sizes in (results.get("n-samples") or {}).items()}
    by_metric: dict[str, list[tuple[float, int]]] = {}
    for task, metric, value in metric_values(results):
        # Groups have no count of their own, and their tasks are in the average already.
        if task in counts and "_stderr" not in metric and math.isfinite(value):
            by_metric.setdefault(metric, []).append((value, counts[task]))
    result = {}
    for metric, values in by_metric.items():
        total = sum(count for _, count in values)
        result[f"macro_avg_{metric}"] = sum(value for value, _ in values) / len(values)
        if total:
            result[f"micro_avg_{metric}"] = sum(value * count for value, count in values) / total
    return result


def results_table(results: Mapping[str, Any]) -> str:
    """The results as text lines: task, metric, value and standard error."""
    values = {(task, metric): value for task, metric, value in metric_values(results)}
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


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A document of a task with the model's answers.

    Attributes:
        doc_id: index of the document.
        doc_hash: of its content: two runs evaluated the same document only if it is equal.
        filter: of the answers; `none` for unfiltered answers.
        target: the correct answer as text; for multiple choice, the index of the correct choice.
        arguments: arguments of the requests, as pairs of context and continuation, or context and generation keys.
        answers: pairs of log-probability and whether it is greedy, or texts.
        metrics: name → number, or pair of a log-probability and a weight.
    """

    doc_id: int
    doc_hash: str
    filter: str
    target: str
    arguments: tuple[tuple[Any, ...], ...]
    answers: tuple[Any, ...]
    metrics: Mapping[str, Any]

    @property
    def is_right(self) -> bool | None:
        """Whether the answer is correct; None if the task has no such metric."""
        for name in ("acc", "exact_match", "acc_norm"):
            value = self.metrics.get(name)
            if isinstance(value, (int, float)):
                return bool(value)
        return None

    @property
    def probabilities(self) -> tuple[float, ...]:
        """The probability of each choice among all choices; empty if there are no choices."""
        values = [answer[0] for answer in self.answers if isinstance(answer, (list, tuple))]
        if len(values) < 2:
            return ()
        # Softmax over the choices, shifted by the largest value against underflow.
        top = max(values)
        exponentials = [math.exp(value - top) for value in values]
        return tuple(x / sum(exponentials) for x in exponentials)


def parse_samples(lines: Sequence[Mapping[str, Any]]) -> tuple[Sample, ...]:
    """lm_eval's samples, from memory or from the lines of its files."""
    return tuple(_sample(line) for line in lines)


def _sample(line: Mapping[str, Any]) -> Sample:
    arguments = line["arguments"]
    # Files name the arguments (`gen_args_0: {arg_0: …}`); samples in memory list them.
    if isinstance(arguments, Mapping):
        arguments = [list(item.values()) for item in arguments.values()]
    return Sample(
        doc_id=int(line["doc_id"]),
        doc_hash=str(line["doc_hash"]),
        filter=str(line["filter"]),
        target=str(line["target"]),
        arguments=tuple(tuple(item) for item in arguments),
        answers=tuple(_answer(item[0] if isinstance(item, (list, tuple)) else item) for item in line["resps"]),
        metrics={name: _number(line[name]) for name in line["metrics"] if name in line},
    )


def _number(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return tuple(_number(item) for item in value)
    return float(value) if isinstance(value, (int, float)) else value


def _answer(value: object) -> object:
    """An answer; files contain numbers and flags as text."""
    if isinstance(value, (list, tuple)):
        return (float(value[0]), str(value[1]) == "True")
    return value


def read_run(path: str) -> tuple[dict[str, Any], dict[str, tuple[Sample, ...]]]:
    """The results of a run and its samples, which are files in the same folder.

    Args:
        path: path of a `results_<date>.json`.

    Raises:
        HarnessError: the file is not a run's results, or there are no samples.
    """
    try:
        with open_read(path) as file:
            results = json.loads(file.read())
        tasks = list(results["results"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HarnessError(f"against: {path}: not a run's results ({type(error).__name__}: {error})") from error
    name = base_name(path)
    date = name.removeprefix("results_").removesuffix(".json")
    folder = path.removesuffix(name) or "."
    samples = dict(_read_samples(folder, tasks, date))
    if not samples:
        raise HarnessError(
            f"against: {path}: its folder has no samples_<task>_{date}.jsonl, which the comparison needs\n"
            "  → repeat that run with eval_harness.log_samples: true"
        )
    return results, samples


def _read_samples(folder: str, tasks: Sequence[str], date: str) -> Iterator[tuple[str, tuple[Sample, ...]]]:
    for task in tasks:
        path = join(folder, f"samples_{task.replace('/', '__')}_{date}.jsonl")
        # Groups are among the results too, and have no samples.
        if not exists(path):
            continue
        samples, number = [], 0
        try:
            with open_read(path) as file:
                for line in file.read().splitlines():
                    number += 1
                    samples += [_sample(json.loads(line))] if line.strip() else []
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise HarnessError(
                f"against: {path}, line {number}: not a sample ({type(error).__name__}: {error})"
            ) from error
        yield task, tuple(samples)
