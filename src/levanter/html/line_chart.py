"""Line charts without scripts, and the sparkline of the same numbers in a terminal."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from levanter.html.charts import Axes, round_step
from levanter.html.format import integer_text
from levanter.html.markup import Html, escaped

BLOCKS = "▁▂▃▄▅▆▇█"
_MOST_TICKS = 6
_UNITS = ("", "K", "M", "G", "T")


@dataclass(frozen=True, kw_only=True)
class Line:
    """A curve.

    Attributes:
        name: shown on hover.
        css_class: class of its color.
        points: (x, y) in the order of x; a y of None is a gap.
        dots: whether each point is marked, for curves of few points.
    """

    name: str
    css_class: str
    points: Sequence[tuple[float, float | None]]
    dots: bool = False


def line_chart(lines: Sequence[Line], *, title: str, x_name: str, y_name: str, axes: Axes | None = None) -> Html:
    """Curves over a common x axis, which begins at 0.

    Args:
        lines: at least one of them with a point.
        title: read by screen readers.
        x_name: name of the x axis.
        y_name: name of the y axis.
        axes: the plot area.
    """
    axes = Axes(height=220) if axes is None else axes
    points = [(x, y) for line in lines for x, y in line.points if y is not None]
    # All curves share both axes.
    right = max(x for x, _ in points) or 1.0
    low, high = _range([y for _, y in points])

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            axes.left_margin + axes.inner_width * x / right,
            axes.baseline - axes.inner_height * (y - low) / (high - low),
        )

    step = round_step(high - low)
    elements = [axes.rule(place(0, y)[1], _label(y, step)) for y in _grid(low, high, step)]
    elements += [axes.tick(place(x, low)[0], integer_text(x)) for x in _ticks(right)]
    for line in lines:
        elements += _curve(line, place)
    return axes.svg(elements, title=title, x_name=escaped(x_name), y_name=escaped(y_name))


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Numbers as a row of block characters: the lowest is `▁`, the highest `█`; one character a group of values.

    >>> sparkline([4.0, 3.0, 2.0, 1.0])
    '█▆▃▁'
    """
    if not values:
        return ""
    count = min(width, len(values))
    # Groups differ by one value at most, and none is empty.
    groups = [values[len(values) * n // count : len(values) * (n + 1) // count] for n in range(count)]
    means = [math.fsum(group) / len(group) for group in groups]
    low, high = min(means), max(means)
    if high == low:
        return BLOCKS[0] * count
    return "".join(BLOCKS[min(7, int(8 * (mean - low) / (high - low)))] for mean in means)


def _curve(line: Line, place: Callable[[float, float], tuple[float, float]]) -> Iterator[str]:
    name = f"<title>{escaped(line.name)}</title>"
    run: list[str] = []
    # One more point without a value ends the last part.
    for x, y in [*line.points, (0.0, None)]:
        if y is not None:
            run.append("{:.1f},{:.1f}".format(*place(x, y)))
            continue
        # A line of one point would be invisible.
        if len(run) > 1:
            yield f'<polyline class="line {line.css_class}" points="{" ".join(run)}">{name}</polyline>'
        marked = run if line.dots or len(run) == 1 else []
        for point in marked:
            x_text, y_text = point.split(",")
            yield f'<circle class="dot {line.css_class}" cx="{x_text}" cy="{y_text}" r="3">{name}</circle>'
        run = []


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high == low:
        # A constant is drawn in the middle.
        margin = abs(high) / 10 or 1.0
        return low - margin, high + margin
    # A curve that stays far above 0 would be flat if its axis began there.
    return (0.0 if 0 <= low < (high - low) / 2 else low - (high - low) / 20), high + (high - low) / 20


def _grid(low: float, high: float, step: float) -> Iterator[float]:
    n = math.ceil(low / step)
    while n * step <= high:
        yield n * step
        n += 1


def _ticks(right: float) -> Iterator[float]:
    step = max(1.0, round_step(right))
    n = 0
    while n * step <= right and n <= _MOST_TICKS:
        yield n * step
        n += 1


def _label(value: float, step: float) -> str:
    """A value with as many digits as distinguish it from its neighbours on the grid."""
    # A step is 1, 2, 2.5 or 5 times a power of ten: 2.5 needs one digit more.
    power = math.floor(math.log10(step) + 1e-9)
    last = power - (round(step / 10.0**power, 3) % 1 > 0)
    if abs(value) < step / 2:
        return "0"
    size = math.floor(math.log10(abs(value)) + 1e-9)
    # Short, because labels share the margin with the name of the axis.
    if 4 <= size < 15 and size - last < 4:
        unit = size // 3
        return f"{value / 1000**unit:.{max(0, 3 * unit - last)}f}{_UNITS[unit]}"
    if -4 <= size < 6 and size - last < 6:
        return f"{value:,.{max(0, -last)}f}"
    return f"{value:.{max(0, size - last)}e}"
