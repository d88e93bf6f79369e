"""Results of needle evaluation: which values were found, by task, length and depth.

A value is found if each of its tokens is the most likely one, given the text and the preceding answer tokens: that is
what greedy decoding writes after a correct beginning. Each value after the first is therefore scored with the correct
values before it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from levanter.eval.needles.prompts import NeedlePrompt
from levanter.eval.needles.tasks import TASKS
from levanter.io import ResumableResults

RESULTS = "results.json"
NeedleIdentity = Mapping[str, Any]
"""Every fact that answers depend on, as JSON values."""


@dataclass(frozen=True, kw_only=True)
class NeedleAnswer:
    """The scores of a prompt's answer.

    Attributes:
        logprobs: log-probability of each scored token.
        ranks: number of tokens that are more likely than the scored token.
    """

    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]

    def hits(self, prompt: NeedlePrompt) -> list[bool]:
        """Whether each value was found."""
        # Unbuffered: a value has several tokens, all of which must have rank 0.
        hit = np.ones(len(prompt.values), bool)
        np.logical_and.at(hit, prompt.owners, np.asarray(self.ranks) == 0)
        return hit.tolist()

    @property
    def is_finite(self) -> bool:
        """Whether all log-probabilities are finite."""
        return bool(np.isfinite(self.logprobs).all())


Answered = Sequence[tuple[NeedlePrompt, NeedleAnswer]]


def summarize_needles(answered: Answered, *, depths: int) -> dict[str, Any]:
    """The metrics: by task and length, by depth, and over all tasks.

    Args:
        answered: all prompts with their answers.
        depths: number of depths in a table.
    """
    tasks: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(prompt.task for prompt, _ in answered):
        lengths = {}
        for length in sorted({prompt.length for prompt, _ in answered}):
            selected = [
                (prompt, answer) for prompt, answer in answered if (prompt.task, prompt.length) == (name, length)
            ]
            if selected:
                lengths[str(length)] = _summarize_length(selected, depths if TASKS[name].has_depth else None)
        tasks[name] = lengths
    all_lengths = sorted({prompt.length for prompt, _ in answered})
    overall = {str(n): _mean([rows[str(n)]["score"] for rows in tasks.values() if str(n) in rows]) for n in all_lengths}
    return {"tasks": tasks, "overall": overall, "questions": len(answered)}


def _summarize_length(answered: Answered, depths: int | None) -> dict[str, Any]:
    hits = [answer.hits(prompt) for prompt, answer in answered]
    nats = [-sum(answer.logprobs) / len(answer.logprobs) for _, answer in answered]
    row: dict[str, Any] = {
        "samples": len(answered),
        # Prompts weigh the same, however many values they hide: RULER's score.
        "score": _mean([_mean(value_hit) for value_hit in hits]),
        "all_found": _mean([all(value_hit) for value_hit in hits]),
        "nats_per_token": _mean(nats),
        # `tokens` of a prompt are inputs, which lack the last token.
        "tokens": _mean([len(prompt.tokens) + 1 for prompt, _ in answered]),
    }
    if depths is not None:
        cells: list[dict[str, Any]] = [
            {"depth": _depth_of_row(n, depths), "found": 0, "asked": 0} for n in range(depths)
        ]
        for (prompt, _), hit in zip(answered, hits, strict=True):
            for depth, value_hit in zip(prompt.depths, hit, strict=True):
                if depth is not None:
                    # Depths of further values are random: they count in the nearest row.
                    cell = cells[round(depth * (depths - 1))]
                    cell["asked"] += 1
                    cell["found"] += int(value_hit)
        row["depths"] = cells
    return row


def _depth_of_row(n: int, depths: int) -> float:
    return n / (depths - 1) if depths > 1 else 0.5


def _mean(values: Sequence[float]) -> float:
    return float(np.mean([float(value) for value in values])) if len(values) else float("nan")


def sample_lines(answered: Answered) -> list[dict[str, Any]]:
    """The answers of each prompt as JSON objects, without the prompt's text."""
    return [
        {
            "task": prompt.task,
            "length": prompt.length,
            "number": prompt.number,
            "tokens": len(prompt.tokens) + 1,
            "values": list(prompt.values),
            "depths": list(prompt.depths),
            "found": answer.hits(prompt),
            "logprobs": [round(logprob, 6) for logprob in answer.logprobs],
            "ranks": list(answer.ranks),
            "owners": prompt.owners.tolist(),
        }
        for prompt, answer in answered
    ]


def tracker_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """The metrics for trackers."""
    metrics = {f"needles/overall/{length}": value for length, value in summary["overall"].items()}
    for name, rows in summary["tasks"].items():
        metrics |= {f"needles/{name}/{length}": row["score"] for length, row in rows.items()}
    return metrics


def needles_table(summary: Mapping[str, Any]) -> str:
    """Tasks by length as text lines; for tasks with a depth, also the values found at each depth."""
    lengths = list(summary["overall"])
    rows = [("values found", *(f"{int(length):,}" for length in lengths))]
    for name, task_rows in summary["tasks"].items():
        rows.append(
            (name, *(_percent(task_rows[length]["score"]) if length in task_rows else "" for length in lengths))
        )
        for n, cell in enumerate(next(iter(task_rows.values())).get("depths", [])):
            cells = [task_rows[length]["depths"][n] if length in task_rows else None for length in lengths]
            counts = ["" if c is None or not c["asked"] else f"{c['found']}/{c['asked']}" for c in cells]
            if any(counts):
                rows.append((f"  depth {cell['depth']:.0%}", *counts))
    if len(summary["tasks"]) > 1:
        rows.append(("all tasks", *(_percent(summary["overall"][length]) for length in lengths)))
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(length.rjust(width) for length, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    )


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


@dataclass(frozen=True, kw_only=True)
class NeedleStore(ResumableResults):
    """The result folder of a run; a part contains the answers of one batch."""

    marker = RESULTS
    digits = 6
    ending = ".json"
    writer = "eval_needles"
    advice = "another output_path, or if_exists: replace"
    key = "output_path: "

    def finished_identity(self, marker: object) -> object:
        """The identity in `results.json`."""
        return marker.get("identity") if isinstance(marker, Mapping) else None

    def write(self, number: int, answers: Sequence[NeedleAnswer]) -> None:
        """Adds the answers of a batch."""
        self.write_rows(number, [{"logprobs": list(a.logprobs), "ranks": list(a.ranks)} for a in answers])

    def read(self) -> dict[int, tuple[NeedleAnswer, ...]]:
        """Batch → answers; damaged parts are omitted, so that their prompts are evaluated again."""
        return self.read_rows(
            lambda rows: tuple(
                NeedleAnswer(logprobs=tuple(row["logprobs"]), ranks=tuple(row["ranks"])) for row in rows
            ),
            consequence="its prompts are evaluated again",
        )
