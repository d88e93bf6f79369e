"""A squarified treemap: rectangles whose areas are proportional to values, as close to squares as a row allows.

The algorithm is that of Bruls, Huizing and van Wijk, "Squarified Treemaps" (2000): values in falling order are put in
a row along the shorter side as long as that makes the worst aspect ratio in the row better, then the rest of the
rectangle is filled in the same way.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rectangle:
    """A rectangle of the chart: `x` grows to the right, `y` down."""

    x: float
    y: float
    width: float
    height: float


def squarify(values: Sequence[float], area: Rectangle) -> list[Rectangle]:
    """One rectangle for each value, in the order of the values, which together fill `area`.

    Args:
        values: not negative; zeros get rectangles without an area.
        area: the rectangle that is filled.
    """
    assert all(value >= 0 for value in values), values
    order = sorted(range(len(values)), key=lambda n: -values[n])
    total = sum(values)
    if total <= 0 or area.width <= 0 or area.height <= 0:
        return [Rectangle(area.x, area.y, 0.0, 0.0) for _ in values]
    # From values to areas, so that the areas of all rows fill the rectangle.
    scale = area.width * area.height / total
    rectangles: dict[int, Rectangle] = {}
    rest, at = area, 0
    while at < len(order):
        # A row lies along the shorter side of the rest, where its rectangles are closest to squares.
        side = min(rest.width, rest.height)
        row = [values[order[at]] * scale]
        while at + len(row) < len(order):
            longer = [*row, values[order[at + len(row)]] * scale]
            if _worst(longer, side) > _worst(row, side):
                break
            row = longer
        placed, rest = _lay(row, rest)
        rectangles.update(zip(order[at : at + len(row)], placed, strict=True))
        at += len(row)
    return [rectangles[n] for n in range(len(values))]


def _worst(row: Sequence[float], side: float) -> float:
    """The worst aspect ratio of a row along `side`."""
    # Areas a of a row along side s: the row is Σa / s deep and a rectangle a · s / Σa long, a ratio of s²a / (Σa)².
    total, least, most = sum(row), min(row), max(row)
    if least <= 0 or side <= 0:
        return float("inf")
    return max(side * side * most / (total * total), total * total / (side * side * least))


def _lay(row: Sequence[float], area: Rectangle) -> tuple[list[Rectangle], Rectangle]:
    """Places a row along the shorter side; returns its rectangles and the rest of the area."""
    total = sum(row)
    upright = area.width >= area.height
    side = area.height if upright else area.width
    # Rounding may make the last row a little deeper than the rest of the area.
    depth = min(total / side if side > 0 else 0.0, area.width if upright else area.height)
    placed, at = [], 0.0
    for value in row:
        length = side * value / total if total > 0 else 0.0
        if upright:
            placed.append(Rectangle(area.x, area.y + at, depth, length))
        else:
            placed.append(Rectangle(area.x + at, area.y, length, depth))
        at += length
    if upright:
        return placed, Rectangle(area.x + depth, area.y, area.width - depth, area.height)
    return placed, Rectangle(area.x, area.y + depth, area.width, area.height - depth)
