"""Divisors, nearest legal sizes and the table of legal tensor-parallel sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from haliax_ext.divisibility import describe_indivisible, divisors, legal_sizes, nearest_divisors, render_verdicts
from haliax_ext.meshspec import MeshSpec

pytestmark = pytest.mark.quick


@given(st.integers(1, 3000))
def test_divisors_equal_trial_division(n):
    assert list(divisors(n)) == [d for d in range(1, n + 1) if n % d == 0]


@given(st.integers(1, 3000), st.integers(2, 300))
def test_nearest_divisors_are_the_neighbours(size, wanted):
    below = [d for d in range(1, wanted) if size % d == 0]
    above = [d for d in range(wanted + 1, size + 1) if size % d == 0]
    assert nearest_divisors(size, wanted) == (*below[-1:], *above[:1])


@pytest.mark.parametrize(
    ("axes", "problem", "suggestion"),
    [
        (
            ["model"],
            "axis 'kv_head' has size 12, which mesh axis model 8 does not divide (12 % 8 = 4)",
            "nearest mesh sizes that divide 12: 6, 12; or unmap the axis: {kv_head: null}",
        ),
        (
            ["model", "group"],
            "axis 'kv_head' has size 12, which mesh axes model 8 × group 4 do not divide (12 % 32 = 12)",
            "nearest mesh sizes that divide 12: 12; or unmap the axis: {kv_head: null}",
        ),
    ],
)
def test_the_way_out_is_named(axes, problem, suggestion):
    mesh = MeshSpec.of(model=8, group=4)
    assert describe_indivisible("kv_head", 12, axes, mesh) == (problem, suggestion)


def test_the_table_of_a_model_with_12_heads():
    axes = [("heads", 12), ("mlp", 4096), ("vocab", 32768)]
    table = render_verdicts(legal_sizes(axes, [1, 2, 4, 8, 24]))
    assert table == (
        "model\n"
        "    1  OK\n"
        "    2  OK\n"
        "    4  OK\n"
        "    8  NO (heads 12 % 8 = 4)\n"
        "   24  NO (heads 12 % 24 = 12; mlp 4096 % 24 = 16; vocab 32768 % 24 = 8)"
    )


def test_verdicts_are_values():
    two, five = legal_sizes([("mlp", 12)], [2, 5])
    assert two.ok
    assert str(two) == "2 OK"
    assert five.blockers == (("mlp", 12, 2),)
    assert str(five) == "5 NO (mlp 12 % 5 = 2)"
