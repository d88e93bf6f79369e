"""Charts without scripts: axes for inline SVG, and stacked bars of plain boxes.

Colors are variables of the palette, so that they follow the reader's light or dark mode. Every bar and line has a
`title`, which browsers show on hover and screen readers read, and every chart is accompanied by a table of its numbers.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from levanter.html.format import superscript
from levanter.html.markup import Content, Html, escaped, tag


@dataclass(frozen=True, kw_only=True)
class Axes:
    """The plot area of an SVG chart, in the units of its `viewBox`; y grows downwards.

    Attributes:
        width: width of the chart.
        height: height of the chart.
        left_margin: space for the labels of the y axis.
        right_margin: space right of the plot area.
        top_margin: space above the plot area.
        bottom_margin: space for the labels and the name of the x axis.
    """

    width: float = 640
    height: float = 300
    left_margin: float = 58
    right_margin: float = 14
    top_margin: float = 16
    bottom_margin: float = 44

    @property
    def inner_width(self) -> float:
        """The width of the plot area."""
        return self.width - self.left_margin - self.right_margin

    @property
    def inner_height(self) -> float:
        """The height of the plot area."""
        return self.height - self.top_margin - self.bottom_margin

    @property
    def baseline(self) -> float:
        """The y coordinate of the x axis."""
        return self.top_margin + self.inner_height

    def rule(self, y: float, label: str) -> str:
        """A horizontal grid line with a label on its left.

        Args:
            y: its coordinate.
            label: markup.
        """
        return (
            f'<line class="rule" x1="{self.left_margin:g}" x2="{self.width - self.right_margin:g}" '
            f'y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{self.left_margin - 7:g}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
        )

    def tick(self, x: float, label: str) -> str:
        """A label below the x axis.

        Args:
            x: its coordinate.
            label: markup.
        """
        return f'<text x="{x:.1f}" y="{self.baseline + 17:g}" text-anchor="middle">{label}</text>'

    def bar(self, x: float, width: float, y: float, *, css_class: str, title: str) -> str:
        """A bar from the x axis up to `y`.

        Args:
            x: coordinate of its left edge.
            width: width of the bar.
            y: coordinate of its top edge.
            css_class: class of its color.
            title: shown on hover; plain text.
        """
        return (
            f'<rect class="{css_class}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{self.baseline - y:.1f}"><title>{escaped(title)}</title></rect>'
        )

    def svg(self, elements: Iterable[str], *, title: str, x_name: str, y_name: str) -> Html:
        """The chart.

        Args:
            elements: SVG elements in the plot area.
            title: read by screen readers.
            x_name: name of the x axis.
            y_name: name of the y axis.
        """
        return Html(
            f'<svg class="chart" viewBox="0 0 {self.width:g} {self.height:g}" role="img" '
            f'aria-label="{escaped(title)}">'
            + "".join(elements)
            + f'<line class="axis" x1="{self.left_margin:g}" x2="{self.width - self.right_margin:g}" '
            f'y1="{self.baseline:g}" y2="{self.baseline:g}"/>'
            f'<text class="name" x="{self.left_margin + self.inner_width / 2:.0f}" y="{self.height - 6:g}" '
            f'text-anchor="middle">{x_name}</text>'
            f'<text class="name" transform="rotate(-90)" x="{-(self.top_margin + self.inner_height / 2):.0f}" y="13" '
            f'text-anchor="middle">{y_name}</text></svg>'
        )


def power_of_ten(exponent: int) -> str:
    """The label of a tick on a logarithmic axis: `1`, `10³`."""
    return "1" if exponent == 0 else f"10{superscript(exponent)}"


def round_step(high: float) -> float:
    """The distance of grid lines between 0 and `high`: 1, 2, 2.5 or 5 times a power of ten, for at most five lines."""
    if high <= 0:
        return 0.25
    # The largest power of ten with at least four lines; the multiples below leave five at most.
    power = 10.0 ** math.floor(math.log10(high / 4))
    return next(power * m for m in (1, 2, 2.5, 5, 10) if power * m * 8 >= high and power * m * 5 >= high)


def separate_labels(positions: Sequence[float], gap: float, lowest: float) -> list[float]:
    """Positions of labels that are at least `gap` apart and not below `lowest`, close to the given ones.

    Args:
        positions: the wanted y coordinates.
        gap: the height of a label.
        lowest: the largest y coordinate.
    """
    separated = [float(y) for y in positions]
    # Labels keep their vertical order, and the result the order of the arguments.
    order = sorted(range(len(separated)), key=separated.__getitem__)
    # First push labels down until none overlaps, then push up those that have passed the lower limit.
    for before, after in pairwise(order):
        separated[after] = max(separated[after], separated[before] + gap)
    # From the lowest label upwards: each pushes the one above by no more than needed.
    limit = lowest
    for index in reversed(order):
        separated[index] = min(separated[index], limit)
        limit = separated[index] - gap
    return separated


@dataclass(frozen=True, kw_only=True)
class BarPiece:
    """A piece of a stacked bar.

    Attributes:
        css_class: its color.
        share: share of the bar's full width.
        title: shown on hover.
    """

    css_class: str
    share: float
    title: str


def css_percent(share: float) -> str:
    """A share as a CSS length."""
    return f"{100 * share:.3f}%"


def stacked_bar(pieces: Iterable[BarPiece], *, label: str, thin: bool = False, marker: float | None = None) -> Html:
    """A horizontal bar of boxes sized in percentages: it prints, and works at every width of the window.

    Args:
        pieces: the pieces from left to right.
        label: read by screen readers.
        thin: whether it is as high as a line of text.
        marker: where to draw a vertical line, as a share of the full width.
    """
    boxes: list[Content] = [
        tag("span", class_=f"piece {piece.css_class}", style=f"width:{css_percent(piece.share)}", title=piece.title)
        for piece in pieces
    ]
    if marker is not None:
        boxes.append(tag("span", class_="limit", style=f"left:{css_percent(marker)}"))
    name, css_class = ("span", "stack thin") if thin else ("div", "stack")
    return tag(name, boxes, class_=css_class, role="img", aria_label=label)
