"""A page of needles: for each task a table of depth by length, in color, and the values that were not found.

It is one self-contained file. What stands in it is data, which its script shows, so no text is taken for HTML.
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
"""Values that were not found, at most."""


def needle_page(summary: Mapping[str, Any], answered: Answered, *, title: str, facts: Mapping[str, str]) -> str:
    """The page.

    Args:
        summary: see `summary_of`.
        answered: the questions.
        title: above it.
        facts: of the run.
    """
    data = {
        "lengths": [int(each) for each in summary["overall"]],
        "overall": [_finite(each) for each in summary["overall"].values()],
        "tasks": [
            {"name": name, "summary": TASKS[name].summary, "lengths": rows} for name, rows in summary["tasks"].items()
        ],
        "missed": _missed(answered),
    }
    return result_page(_PAGE, data, title=title, facts=facts)


def _missed(answered: Answered) -> list[dict[str, Any]]:
    rows = []
    for asked, found in answered:
        for n, hit in enumerate(found.hits(asked)):
            if hit:
                continue
            mine = [each for each, owner in zip(found.logprobs, asked.owners, strict=True) if owner == n]
            ranks = [each for each, owner in zip(found.ranks, asked.owners, strict=True) if owner == n]
            chance = math.exp(sum(mine)) if all(map(math.isfinite, mine)) else None
            rows.append(
                {
                    "task": asked.task,
                    "length": asked.length,
                    "depth": asked.depths[n],
                    "value": asked.values[n],
                    "chance": chance,
                    "right": sum(rank == 0 for rank in ranks),
                    "tokens": len(ranks),
                }
            )
    return rows[:SHOWN]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
