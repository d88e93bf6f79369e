"""What came of the questions: which values were found, by task, length and depth.

A value is found where each of its tokens is the likeliest one, given the text and what stands before it in the answer:
a model that writes greedily, and has written the answer so far, writes it. So values behind the first one are judged
with the right ones before them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from levanter.eval.needles.prompts import AskedNeedle
from levanter.eval.needles.tasks import TASKS


@dataclass(frozen=True, kw_only=True)
class NeedleAnswer:
    """What a model made of a question.

    Attributes:
        logprobs: of each token that counts.
        ranks: of each: how many tokens were likelier.
    """

    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]

    def hits(self, asked: AskedNeedle) -> list[bool]:
        """Of each value, whether it was found."""
        hit = np.ones(len(asked.values), bool)
        np.logical_and.at(hit, asked.owners, np.asarray(self.ranks) == 0)
        return hit.tolist()

    @property
    def is_finite(self) -> bool:
        """Whether every log-probability is."""
        return bool(np.isfinite(self.logprobs).all())


Answered = Sequence[tuple[AskedNeedle, NeedleAnswer]]


def summary_of(answered: Answered, *, depths: int) -> dict[str, Any]:
    """The numbers: by task and length, by depth, over all tasks.

    Args:
        answered: all questions.
        depths: how many there are in a table.
    """
    tasks: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(asked.task for asked, _ in answered):
        lengths = {}
        for length in sorted({asked.length for asked, _ in answered}):
            mine = [(asked, found) for asked, found in answered if (asked.task, asked.length) == (name, length)]
            if mine:
                lengths[str(length)] = _of_length(mine, depths if TASKS[name].has_depth else None)
        tasks[name] = lengths
    every = sorted({asked.length for asked, _ in answered})
    overall = {str(n): _mean([rows[str(n)]["score"] for rows in tasks.values() if str(n) in rows]) for n in every}
    return {"tasks": tasks, "overall": overall, "questions": len(answered)}


def _of_length(mine: Answered, depths: int | None) -> dict[str, Any]:
    hits = [found.hits(asked) for asked, found in mine]
    nats = [-sum(found.logprobs) / len(found.logprobs) for _, found in mine]
    row: dict[str, Any] = {
        "samples": len(mine),
        "score": _mean([_mean(each) for each in hits]),
        "all_found": _mean([all(each) for each in hits]),
        "nats_per_token": _mean(nats),
        "tokens": _mean([len(asked.tokens) + 1 for asked, _ in mine]),
    }
    if depths is not None:
        cells: list[dict[str, Any]] = [{"depth": _share(n, depths), "found": 0, "asked": 0} for n in range(depths)]
        for (asked, _), hit in zip(mine, hits, strict=True):
            for depth, each in zip(asked.depths, hit, strict=True):
                if depth is not None:
                    cell = cells[round(depth * (depths - 1))]
                    cell["asked"] += 1
                    cell["found"] += int(each)
        row["depths"] = cells
    return row


def _share(n: int, depths: int) -> float:
    return n / (depths - 1) if depths > 1 else 0.5


def _mean(values: Sequence[float]) -> float:
    return float(np.mean([float(each) for each in values])) if len(values) else float("nan")


def sample_lines(answered: Answered) -> list[dict[str, Any]]:
    """Each question with what came of it, without its text."""
    return [
        {
            "task": asked.task,
            "length": asked.length,
            "number": asked.number,
            "tokens": len(asked.tokens) + 1,
            "values": list(asked.values),
            "depths": list(asked.depths),
            "found": found.hits(asked),
            "logprobs": [round(each, 6) for each in found.logprobs],
            "ranks": list(found.ranks),
            "owners": asked.owners.tolist(),
        }
        for asked, found in answered
    ]


def tracked(summary: Mapping[str, Any]) -> dict[str, float]:
    """The numbers for trackers."""
    found = {f"needles/overall/{length}": value for length, value in summary["overall"].items()}
    for name, rows in summary["tasks"].items():
        found |= {f"needles/{name}/{length}": row["score"] for length, row in rows.items()}
    return found


def table_of(summary: Mapping[str, Any]) -> str:
    """Tasks by length, then for tasks with a depth what was found at each, as lines."""
    lengths = list(summary["overall"])
    rows = [("values found", *(f"{int(each):,}" for each in lengths))]
    for name, mine in summary["tasks"].items():
        rows.append((name, *(_percent(mine[each]["score"]) if each in mine else "" for each in lengths)))
        for n, cell in enumerate(next(iter(mine.values())).get("depths", [])):
            cells = [mine[each]["depths"][n] if each in mine else None for each in lengths]
            shown = ["" if c is None or not c["asked"] else f"{c['found']}/{c['asked']}" for c in cells]
            if any(shown):
                rows.append((f"  depth {cell['depth']:.0%}", *shown))
    if len(summary["tasks"]) > 1:
        rows.append(("all tasks", *(_percent(summary["overall"][each]) for each in lengths)))
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(each.rjust(width) for each, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    )


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"
