"""The HTML page of a needle evaluation: for each task a table of depth by length, and the values that were not found.

Texts are data in the page, which its script inserts as text.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from levanter.eval.needles.results import Answered
from levanter.eval.needles.tasks import TASKS
from levanter.html.page import result_page

_PAGE = Path(__file__).with_name("page.html")
SHOWN = 60
"""Maximum number of listed values that were not found."""


def needle_page(summary: Mapping[str, Any], answered: Answered, *, title: str, facts: Mapping[str, str]) -> str:
    """The page.

    Args:
        summary: see `summarize_needles`.
        answered: prompts and answers.
        title: heading of the page.
        facts: facts of the run, by name.
    """
    data = {
        "lengths": [int(value) for value in summary["overall"]],
        "overall": [_finite(value) for value in summary["overall"].values()],
        "tasks": [
            {"name": name, "summary": TASKS[name].summary, "lengths": rows} for name, rows in summary["tasks"].items()
        ],
        "missed": _missed(answered),
    }
    return result_page(_PAGE, data, title=title, facts=facts)


def _missed(answered: Answered) -> list[dict[str, Any]]:
    rows = []
    for prompt, answer in answered:
        for n, hit in enumerate(answer.hits(prompt)):
            if hit:
                continue
            logprobs = [score for score, owner in zip(answer.logprobs, prompt.owners, strict=True) if owner == n]
            ranks = [score for score, owner in zip(answer.ranks, prompt.owners, strict=True) if owner == n]
            # JSON has no NaN: a value that overflowed has no probability.
            probability = math.exp(sum(logprobs)) if all(map(math.isfinite, logprobs)) else None
            rows.append(
                {
                    "task": prompt.task,
                    "length": prompt.length,
                    "depth": prompt.depths[n],
                    "value": prompt.values[n],
                    "chance": probability,
                    "right": sum(rank == 0 for rank in ranks),
                    "tokens": len(ranks),
                }
            )
    # A model that finds nothing would otherwise make a page of every prompt.
    return rows[:SHOWN]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
