"""`report.html`: the page of a training run: its curves, where its time went, and the facts of the run."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from levanter.html.charts import BarPiece, stacked_bar
from levanter.html.format import count_text, integer_text, percent, seconds_text, three_digits
from levanter.html.line_chart import Line, line_chart
from levanter.html.markup import Html, section, table, tag, tiles
from levanter.html.page import document, style_sheet
from levanter.trainer.goodput import Goodput
from levanter.trainer.history import EvaluationPoint, Point

_STYLE = Path(__file__).with_name("report.css")
_COLORS = 6
"""Classes `k0` to `k5` of the style sheet; further activities have the last one's color."""
_NO_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def report_page(
    time: Goodput,
    points: Sequence[Point],
    evaluations: Sequence[EvaluationPoint],
    *,
    title: str,
    facts: Mapping[str, str],
) -> str:
    """The page.

    Args:
        time: where the run's time went.
        points: of its steps.
        evaluations: between its steps.
        title: heading.
        facts: of the run, by name.
    """
    body = tag(
        "main",
        tag("h1", title),
        tiles(_tiles(time, points, evaluations)),
        _curves(points, evaluations),
        _time(time),
        section("Run", table(("", ""), list(facts.items()))),
    )
    style = style_sheet(_STYLE.read_text(encoding="utf-8"))
    return document(title=title, style=style, body=body, policy=_NO_POLICY)


def _tiles(
    time: Goodput, points: Sequence[Point], evaluations: Sequence[EvaluationPoint]
) -> list[tuple[str, str, str]]:
    entries = []
    if points:
        first, last = points[0], points[-1]
        entries.append(("Steps", integer_text(last.taken), "taken"))
        if last.loss is not None:
            begin = "" if first.loss is None else f"from {first.loss:.4f}, in nats"
            entries.append(("Training loss", f"{last.loss:.4f}", begin))
        else:
            entries.append(("Training loss", "not finite", "at the last step"))
    if evaluations:
        entries.append(("Validation loss", f"{evaluations[-1].loss:.4f}", f"after {evaluations[-1].taken:,} steps"))
    # The median, because steps beside a save or a slow host would pull a mean down.
    rates = [point.tokens_per_second for point in points if point.tokens_per_second is not None]
    if rates:
        entries.append(("Tokens a second", three_digits(sorted(rates)[len(rates) // 2]), "median, without pauses"))
    attempts = count_text(time.attempts, "attempt")
    entries.append(("Goodput", percent(time.share), f"of {seconds_text(time.total)} in steps, {attempts}"))
    return entries


def _curves(points: Sequence[Point], evaluations: Sequence[EvaluationPoint]) -> Html:
    charts = []
    validation = [(point.taken, point.loss) for point in evaluations]
    for heading, y_name, value in _METRICS:
        lines = [Line(name="training", css_class="c0", points=[(point.taken, value(point)) for point in points])]
        if heading == "Loss" and validation:
            lines.append(Line(name="validation", css_class="c1", points=validation, dots=True))
        # A run may have no rate at all: one step, which compiled.
        if not any(y is not None for line in lines for _, y in line.points):
            continue
        chart = line_chart(lines, title=f"{heading} by step", x_name="steps", y_name=y_name)
        legend = tag("p", [_key(line) for line in lines], class_="legend") if len(lines) > 1 else Html("")
        charts.append(tag("figure", tag("h4", heading), chart, legend, class_="card"))
    if not charts:
        return section("Curves", tag("p", "No step was taken.", class_="note"))
    return section("Curves", tag("div", charts, class_="curves"))


def _key(line: Line) -> Html:
    return tag("span", tag("i", "", class_=f"key {line.css_class}"), line.name)


_METRICS: Sequence[tuple[str, str, Callable[[Point], float | None]]] = (
    ("Loss", "nats", lambda point: point.loss),
    ("Learning rate", "", lambda point: point.learning_rate),
    ("Gradient norm", "before clipping", lambda point: point.grad_norm),
    ("Throughput", "tokens a second", lambda point: point.tokens_per_second),
)
"""Heading of a chart, name of its y axis, and its value."""


def _time(time: Goodput) -> Html:
    shares = time.shares
    pieces = [
        BarPiece(css_class=_color(n), share=share, title=f"{name}: {percent(share)}")
        for n, (name, share) in enumerate(shares.items())
    ]
    rows = [
        ([tag("i", "", class_=f"key {_color(n)}"), name], seconds_text(time.seconds[name]), percent(share))
        for n, (name, share) in enumerate(shares.items())
    ]
    note = (
        "Goodput is the share of steps, without those that were taken again after an interruption. “start” is the time "
        "until the run’s data is prepared (imports, the plan), “input” waiting for batches, and “saving” the time that "
        "steps wait for checkpoints and exports."
    )
    return section(
        "Time",
        stacked_bar(pieces, label="Where the time went"),
        table(("activity", "time", "share"), rows, numbers=(1, 2)),
        tag("p", note, class_="note"),
        note=f"{seconds_text(time.total)} since the run first began",
    )


def _color(n: int) -> str:
    return f"k{min(n, _COLORS - 1)}"
