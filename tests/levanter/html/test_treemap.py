"""Squarified treemaps against what a treemap is: areas in proportion, no gap, no overlap, boxes near squares."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from levanter.html.treemap import Rectangle, squarify

pytestmark = pytest.mark.quick

AREA = Rectangle(10.0, 20.0, 600.0, 400.0)


def overlap(a: Rectangle, b: Rectangle) -> float:
    wide = min(a.x + a.width, b.x + b.width) - max(a.x, b.x)
    high = min(a.y + a.height, b.y + b.height) - max(a.y, b.y)
    return max(0.0, wide) * max(0.0, high)


@given(st.lists(st.integers(min_value=0, max_value=10**12), min_size=1, max_size=25))
@settings(max_examples=60)
def test_areas_are_in_proportion_and_do_not_overlap(values):
    places = squarify(values, AREA)
    total, whole = sum(values), AREA.width * AREA.height
    assert len(places) == len(values)
    for value, place in zip(values, places, strict=True):
        assert place.width * place.height == pytest.approx(whole * value / total if total else 0.0, abs=whole * 1e-9)
        assert AREA.x - 1e-6 <= place.x and place.x + place.width <= AREA.x + AREA.width + 1e-6
        assert AREA.y - 1e-6 <= place.y and place.y + place.height <= AREA.y + AREA.height + 1e-6
    for a, b in itertools.combinations(places, 2):
        assert overlap(a, b) <= whole * 1e-9


def test_the_papers_example():
    """Bruls, Huizing and van Wijk, figure 4: 6, 6, 4, 3, 2, 2, 1 in a box of 6 × 4."""
    places = squarify([6, 6, 4, 3, 2, 2, 1], Rectangle(0, 0, 6, 4))
    assert places[0] == Rectangle(0, 0, 3, 2)
    assert places[1] == Rectangle(0, 2, 3, 2)
    # 4 and 3 share a row along the shorter side of what is left, 3 × 4.
    assert (places[2].x, places[2].y) == (3, 0)
    assert (places[2].width, places[2].height) == (pytest.approx(12 / 7), pytest.approx(7 / 3))
    assert (places[3].width, places[3].height) == (pytest.approx(9 / 7), pytest.approx(7 / 3))
    assert places[4].y == pytest.approx(7 / 3)


def test_boxes_are_nearer_to_squares_than_strips():
    values = [2.0**-n for n in range(12)]

    def worst(places):
        return max(max(p.width / p.height, p.height / p.width) for p in places)

    strips = [Rectangle(0, 0, AREA.width * v / sum(values), AREA.height) for v in values]
    assert worst(squarify(values, AREA)) < 4 < worst(strips)


def test_nothing_to_show():
    assert squarify([], AREA) == []
    assert all(p.width * p.height == 0 for p in squarify([0, 0], AREA))
