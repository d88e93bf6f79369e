"""The numbers of the tables of published speeds, `tests/golden/published_tables.json`: tests and documents share them.

Tests compare the numbers with what the stored sums of the benchmarks give. The tables of docs/performance.md are
rendered from them: `assert_table` compares a table with its lines, or writes it if `UPDATE_GOLDEN` is set.
"""

import json
from collections.abc import Sequence
from typing import Any

from helpers.golden import GOLDEN, updating

PAGE = GOLDEN.parents[1] / "docs" / "performance.md"
TABLES: dict[str, Any] = json.loads((GOLDEN / "published_tables.json").read_text(encoding="utf-8"))


def assert_table(mark: str, lines: Sequence[str]) -> None:
    """The table of the page between the comments `mark` and `/mark` has these lines."""
    text = PAGE.read_text(encoding="utf-8")
    before, opening, rest = text.partition(f"<!-- {mark} -->\n")
    shown, closing, after = rest.partition(f"<!-- /{mark} -->")
    assert opening and closing, f"{PAGE}: no table between <!-- {mark} --> and <!-- /{mark} -->"
    if updating():
        table = "\n".join([*lines, ""])
        PAGE.write_text(f"{before}{opening}{table}{closing}{after}", encoding="utf-8")
        return
    assert shown.splitlines() == list(lines), f"{PAGE}: another table between the comments `{mark}`; `make golden`"


def llama_2_lines(cells: dict[str, Any]) -> list[str]:
    """The table of Llama 2 on v5e: a row for each model, dtype and length, a column for each number of slots.

    Args:
        cells: name of a load → milliseconds per token and tokens/s/chip, or text.
    """
    slots = (1, 8, 32, 64)
    lines = [
        "| | positions | " + " | ".join(f"{n} slot{'s' if n > 1 else ''}" for n in slots) + " |",
        "|---" * (len(slots) + 2) + "|",
    ]
    for model, kind, pod in (
        (model, kind, pod)
        for model, pod in (("7b", "v5e-1"), ("13b", "v5e-4"), ("70b", "v5e-16"))
        for kind in ("bf16", "int8")
    ):
        label = f"{model.upper()}, {kind}{' weights' if kind == 'int8' else ''}, {pod}"
        for positions in (256, 2048):
            loads = (cells[f"llama2_{model}_{pod}_{kind}_{positions}_{n}"] for n in slots)
            shown = (cell if isinstance(cell, str) else f"{cell[0]:.1f}, {cell[1]:,}" for cell in loads)
            lines.append(f"| {f'{label} ' if positions == 256 else ''}| {positions:,} | " + " | ".join(shown) + " |")
    return lines
