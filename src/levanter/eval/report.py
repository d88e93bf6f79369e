"""The result of an evaluation as a text table and as JSON."""

import io
import json
import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from levanter.eval.perplexity import Average, EvalResult, Score
from levanter.io.atomic import atomic_write
from levanter.tracker.base import as_json


def result_table(result: EvalResult) -> Table:
    """A table with a row per set, and averages over each tag with several sets and over all sets."""
    table = Table()
    table.add_column("set", overflow="fold")
    has_accuracy = any(one.score.accuracy is not None for one in result.sets)
    for name in ("tokens", "bytes", "loss", "perplexity", "bits/byte", *(["accuracy"] if has_accuracy else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for one in result.sets:
        table.add_row(Text(one.name), *_cells(one.score), *_accuracy(one.score))
    # A tag of one set has the same numbers as the set.
    tags = {tag: average for tag, average in result.tags.items() if len(average.sets) > 1}
    if tags:
        table.add_section()
    for tag, average in tags.items():
        table.add_row(
            Text(f"tag {tag}, micro of {len(average.sets)}"), *_cells(average.micro), *_accuracy(average.micro)
        )
        table.add_row(Text(f"tag {tag}, macro"), *_macro_cells(average))
    if len(result.sets) > 1:
        table.add_section()
        table.add_row("all, micro", *_cells(result.overall.micro), *_accuracy(result.overall.micro))
        table.add_row("all, macro", *_macro_cells(result.overall))
    return table


def format_result(result: EvalResult, facts: Mapping[str, str] | None = None, *, width: int = 110) -> str:
    """The result as plain text.

    Args:
        result: the result, shown as a table.
        facts: further lines below the table: model source, load time, tokens per second, …
        width: columns of the terminal.
    """
    out = io.StringIO()
    # A fixed width and no colors: the text goes to logs and files too, and must not depend on the terminal.
    Console(file=out, width=width, color_system=None).print(result_table(result))
    text = "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())
    for one in result.sets:
        if one.text_loss is not None:
            text += f"\nno bits/byte for {one.name}: {one.text_loss}"
    if facts:
        longest = max(map(len, facts))
        text += "".join(f"\n{name:<{longest}}  {value}" for name, value in facts.items())
    if result.not_finite:
        text += (
            f"\nwarning: the loss of {', '.join(result.not_finite)} is not finite: a token had probability 0, or the "
            "model overflowed (try a wider compute dtype)"
        )
    return text


def result_json(result: EvalResult, facts: Mapping[str, Any] | None = None) -> str:
    """The result and facts as strict JSON; numbers that are not finite are strings."""
    # JSON has no NaN and no infinity.
    return json.dumps(as_json({**result.to_json(), "run": facts or {}}), indent=2) + "\n"


def write_result(path: str, result: EvalResult, facts: Mapping[str, Any] | None = None) -> None:
    """Writes `result_json` to a local or remote file, atomically."""
    with atomic_write(path) as file:
        file.write(result_json(result, facts).encode())


def _cells(score: Score) -> list[str]:
    return [
        f"{score.tokens:,}",
        "–" if score.bytes is None else f"{score.bytes:,}",
        _number(score.loss, 4),
        _number(score.perplexity, 3),
        _number(score.bits_per_byte, 4),
    ]


def _accuracy(score: Score) -> list[str]:
    return [] if score.accuracy is None else [f"{score.accuracy:.2%}"]


def _macro_cells(average: Average) -> list[str]:
    return [
        "",
        "",
        _number(average.macro_loss, 4),
        _number(average.macro_perplexity, 3),
        _number(average.macro_bits_per_byte, 4),
    ]


def _number(value: float | None, digits: int) -> str:
    if value is None or math.isnan(value):
        return "–"
    return f"{value:.{digits}f}" if abs(value) < 1e6 else f"{value:.{digits}g}"
