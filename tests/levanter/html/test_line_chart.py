"""Line charts: where points are drawn, gaps, labels; sparklines."""

import re

import numpy as np
import pytest

from levanter.html.charts import Axes
from levanter.html.line_chart import BLOCKS, Line, line_chart, sparkline


def chart(*curves, axes=None, dots=False):
    lines = [Line(name=f"curve <{n}>", css_class=f"c{n}", points=points, dots=dots) for n, points in enumerate(curves)]
    return line_chart(lines, title="A & B", x_name="steps", y_name="<nats>", axes=axes)


def coordinates(svg):
    return [
        [tuple(map(float, point.split(","))) for point in points.split()]
        for points in re.findall(r'points="([^"]*)"', svg)
    ]


def test_points_are_drawn_in_proportion():
    axes = Axes(width=1000, height=500, left_margin=100, right_margin=100, top_margin=50, bottom_margin=50)
    (line,) = coordinates(chart([(0, 10.0), (50, 20.0), (100, 30.0)], axes=axes))
    assert [x for x, _ in line] == [100, 500, 900]
    top, middle, bottom = (y for _, y in reversed(line))
    assert 50 < top < middle < bottom <= 450 and middle - top == pytest.approx(bottom - middle, abs=0.11)


@pytest.mark.parametrize("seed", range(30))
def test_everything_lies_in_the_plot_area(seed):
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.integers(-8, 12)
    offset = scale * rng.choice([0, 1, -1]) * 10.0 ** rng.integers(-3, 9)
    values = (offset + scale * rng.normal(size=50)).tolist()
    axes = Axes(height=220)
    svg = chart([(n + 1, y) for n, y in enumerate(values)])
    for x, y in coordinates(svg)[0]:
        assert axes.left_margin <= x <= axes.width - axes.right_margin and axes.top_margin <= y <= axes.baseline
    labels = re.findall(r'text-anchor="end">([^<]*)<', svg)
    # A grid line for each label, none twice.
    assert 2 <= len(labels) <= 9 and len(set(labels)) == len(labels), labels


def test_a_value_that_is_missing_is_a_gap():
    svg = chart([(1, 1.0), (2, 2.0), (3, None), (4, 1.0), (5, None), (6, 3.0), (7, 2.0)])
    assert [len(part) for part in coordinates(svg)] == [2, 2]
    # A point between two gaps is no line, and is still drawn.
    assert svg.count("<circle") == 1


def test_constants_and_single_points():
    assert len(coordinates(chart([(1, 0.0), (2, 0.0)]))[0]) == 2
    assert "<circle" in chart([(0, 7.0)])
    assert chart([(1, 1.0), (2, 2.0)], dots=True).count("<circle") == 2


def test_names_are_escaped():
    svg = chart([(1, 1.0), (2, 2.0)])
    assert "curve &lt;0&gt;" in svg and "&lt;nats&gt;" in svg and 'aria-label="A &amp; B"' in svg


@pytest.mark.parametrize(("values", "width", "expected"), [
    ([], 10, ""), ([5.0], 10, "▁"), ([1.0, 1.0], 10, "▁▁"), (list(range(8)), 8, BLOCKS), ([0.0, 1.0] * 50, 2, "▁▁"),
    ([9.0, 9.0, 1.0, 1.0], 2, "█▁"),
])  # fmt: skip
def test_sparkline(values, width, expected):
    assert sparkline(values, width) == expected


def test_a_sparkline_is_no_wider_than_asked():
    assert len(sparkline(list(range(12345)))) == 40
