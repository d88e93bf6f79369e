"""What was asked of a model and answered, document by document: of this run, or read from the files of another one."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from levanter.eval.harness.encoding import HarnessError
from levanter.io import exists, join, open_read
from levanter.io.paths import base_name

CHOICES = "choices"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A document of a task.

    Attributes:
        doc_id: its number.
        doc_hash: of its contents: two runs asked the same only if it is the same.
        filter: of the answers, `none` for the answers as they are.
        target: what is right, as text; for choices the number of the right one.
        asked: what was put to the model, as pairs of context and answer, or context and keys of generation.
        answers: log-probabilities of the answers with whether each is greedy, or texts.
        metrics: of the document, by name: numbers, or pairs of a log-probability and a weight.
    """

    doc_id: int
    doc_hash: str
    filter: str
    target: str
    asked: tuple[tuple[Any, ...], ...]
    answers: tuple[Any, ...]
    metrics: Mapping[str, Any]

    @property
    def is_right(self) -> bool | None:
        """Whether the model had it right; None where a task does not say."""
        for name in ("acc", "exact_match", "acc_norm"):
            value = self.metrics.get(name)
            if isinstance(value, (int, float)):
                return bool(value)
        return None

    @property
    def probabilities(self) -> tuple[float, ...]:
        """Of several answers how likely each was among them; nothing where there are none to choose from."""
        values = [answer[0] for answer in self.answers if isinstance(answer, (list, tuple))]
        if len(values) < 2:
            return ()
        top = max(values)
        raised = [math.exp(value - top) for value in values]
        return tuple(each / sum(raised) for each in raised)


def samples_of(lines: Sequence[Mapping[str, Any]]) -> tuple[Sample, ...]:
    """lm_eval's samples, as it has them in memory or in a line of its files."""
    return tuple(_sample(line) for line in lines)


def _sample(line: Mapping[str, Any]) -> Sample:
    asked = line["arguments"]
    if isinstance(asked, Mapping):
        asked = [list(each.values()) for each in asked.values()]
    return Sample(
        doc_id=int(line["doc_id"]),
        doc_hash=str(line["doc_hash"]),
        filter=str(line["filter"]),
        target=str(line["target"]),
        asked=tuple(tuple(each) for each in asked),
        answers=tuple(_answer(each[0] if isinstance(each, (list, tuple)) else each) for each in line["resps"]),
        metrics={name: _number(line[name]) for name in line["metrics"] if name in line},
    )


def _number(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return tuple(_number(each) for each in value)
    return float(value) if isinstance(value, (int, float)) else value


def _answer(value: object) -> object:
    """An answer; files have numbers and flags as texts."""
    if isinstance(value, (list, tuple)):
        return (float(value[0]), str(value[1]) == "True")
    return value


def read_run(path: str) -> tuple[dict[str, Any], dict[str, tuple[Sample, ...]]]:
    """The results of a run and its samples, which lie beside them.

    Args:
        path: of a `results_<date>.json`.

    Raises:
        HarnessError: it is none, or its samples were not written.
    """
    try:
        with open_read(path) as file:
            found = json.loads(file.read())
        tasks = list(found["results"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HarnessError(f"against: {path}: not the results of a run ({type(error).__name__}: {error})") from error
    name = base_name(path)
    date = name.removeprefix("results_").removesuffix(".json")
    folder = path.removesuffix(name) or "."
    samples = dict(_read_samples(folder, tasks, date))
    if not samples:
        raise HarnessError(
            f"against: {path}: there are no samples_<task>_{date}.jsonl beside it, by which runs are compared\n"
            "  → run that one again with eval_harness.log_samples: true"
        )
    return found, samples


def _read_samples(folder: str, tasks: Sequence[str], date: str) -> Iterator[tuple[str, tuple[Sample, ...]]]:
    for task in tasks:
        path = join(folder, f"samples_{task.replace('/', '__')}_{date}.jsonl")
        if not exists(path):
            continue
        found, number = [], 0
        try:
            with open_read(path) as file:
                for line in file.read().splitlines():
                    number += 1
                    found += [_sample(json.loads(line))] if line.strip() else []
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise HarnessError(
                f"against: {path}, line {number}: not a sample of a run ({type(error).__name__}: {error})"
            ) from error
        yield task, tuple(found)
