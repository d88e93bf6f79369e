"""Mixtures against brute force: count draw by draw."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from levanter.data.mixture import PERIOD, plan_mixture, round_weights

NAMES = ("a", "b", "c", "d")


def counted(mixture, stop):
    """Sets and turns of all draws, the turns counted one by one."""
    sets, turns = mixture.at(np.arange(stop))
    seen = [0] * len(mixture.names)
    expected = []
    for one in sets:
        expected.append(seen[one])
        seen[one] += 1
    return sets, turns, np.array(expected), seen


weights = st.lists(st.floats(0.5, 10), min_size=4, max_size=4).map(lambda w: dict(zip(NAMES, w, strict=True)))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 300), weights), min_size=1, max_size=3), st.integers(8, 40), st.integers(0, 9))
def test_turns_are_counted_from_the_beginning(stages, block, seed):
    starts = np.cumsum([0] + [length for length, _ in stages[:-1]])
    plan = [(int(start), w) for start, (_, w) in zip(starts, stages, strict=True)]
    mixture = plan_mixture(plan, NAMES, block=block, seed=seed)
    sets, turns, expected, seen = counted(mixture, 700)
    assert (turns == expected).all()
    assert (mixture.turns_before(700) == seen).all()
    # Any draws, in any order, without those before them; from another, equal mixture.
    again = plan_mixture(plan, NAMES, block=block, seed=seed)
    some = np.array([699, 3, 411, 3, 250])
    found = again.at(some)
    assert (found[0] == sets[some]).all() and (found[1] == turns[some]).all()


def test_shares_are_exact_over_a_period_and_close_in_every_block():
    given = {"a": 0.6, "b": 0.3, "c": 0.0999, "d": 0.0001}
    mixture = plan_mixture([(0, given)], NAMES, block=64, seed=1)
    sets, _ = mixture.at(np.arange(2 * PERIOD * 64))
    total = np.array([given[name] for name in NAMES]) * PERIOD * 64
    for period in sets.reshape(2, -1):
        assert np.abs(np.bincount(period, minlength=4) - total).max() < 1
    by_block = np.stack([np.bincount(each, minlength=4) for each in sets.reshape(-1, 64)])
    exact = total / PERIOD
    assert (by_block >= np.floor(exact)).all() and (by_block <= np.ceil(exact)).all()
    # What is left over of a share is spread over the period: no stretch strays by more than chance allows.
    stray = np.abs(np.cumsum(by_block - exact, axis=0))
    assert stray.max() < 5 * np.sqrt(PERIOD) / 2


def test_order_within_blocks_is_random():
    """Runs of one set are as long as those of independent draws: a statistical test with a fixed seed."""
    mixture = plan_mixture([(0, {"a": 0.5, "b": 0.5})], ("a", "b"), block=2048, seed=7)
    sets, _ = mixture.at(np.arange(2048 * 50))
    changes = np.count_nonzero(np.diff(sets))
    expected, deviation = len(sets) / 2, np.sqrt(len(sets)) / 2
    assert abs(changes - expected) < 5 * deviation
    for place in (0, 1000, 2047):
        share = sets.reshape(50, 2048)[:, place].mean()
        assert abs(share - 0.5) < 5 * 0.5 / np.sqrt(50)
    other, _ = plan_mixture([(0, {"a": 0.5, "b": 0.5})], ("a", "b"), block=2048, seed=8).at(np.arange(2048))
    assert (other != sets[:2048]).any()


def test_stages_change_weights_at_their_draw():
    mixture = plan_mixture([(0, {"a": 1.0}), (100, {"b": 1.0}), (130, {"a": 1, "b": 3})], ("a", "b"), block=16, seed=0)
    sets, turns, expected, _ = counted(mixture, 130 + 16 * 1024)
    assert (sets[:100] == 0).all() and (sets[100:130] == 1).all()
    assert sets[130:].mean() == 0.75
    assert (turns == expected).all()


@settings(max_examples=30, deadline=None)
@given(weights, st.lists(st.integers(1, 20), min_size=4, max_size=4), st.booleans())
def test_the_end_is_where_counting_finds_it(given_weights, sizes, staged):
    stages = [(0, given_weights)] if not staged else [(0, {"a": 1.0, "b": 2.0}), (37, given_weights)]
    mixture = plan_mixture(stages, NAMES, block=16, seed=3)
    # The smallest share is 0.5 of 30.5: its twentieth row comes within 1,220 draws and the rounding of two blocks.
    sets, _ = mixture.at(np.arange(1400))
    ends = [int(np.flatnonzero(sets == i)[size - 1]) + 1 for i, size in enumerate(sizes)]
    assert mixture.end(sizes, "restart") is None
    assert mixture.end(sizes, "first_exhausted") == min(ends)
    assert mixture.end(sizes, "all_exhausted") == max(ends)


def test_a_set_that_is_left_out_later_may_never_end():
    mixture = plan_mixture([(0, {"a": 1.0}), (10, {"b": 1.0})], ("a", "b"), block=4, seed=0)
    assert mixture.end([20, 5], "all_exhausted") is None
    assert mixture.end([20, 5], "first_exhausted") == 15
    assert mixture.end([10, 5], "all_exhausted") == 15


def test_far_draws_are_as_quick_as_near_ones():
    mixture = plan_mixture([(0, {"a": 0.7, "b": 0.3})], ("a", "b"), block=2048, seed=0)
    far = 10**13 + np.arange(1000)
    sets, turns = mixture.at(far)
    assert abs(turns[sets == 0].mean() / 10**13 - 0.7) < 1e-6
    assert (mixture.turns_before(int(far[0])) == [turns[sets == i].min() for i in range(2)]).all()


def test_weights_that_cannot_be_used():
    with pytest.raises(ValueError, match="no weight is positive"):
        round_weights({"a": 0.0}, ("a",), block=8, where="data.train_weights")
    with pytest.raises(ValueError, match="finite"):
        round_weights({"a": float("nan")}, ("a",), block=8, where="data.train_weights")
    with pytest.raises(ValueError, match=r"weight of b is less than 1 row in 8,192 \(mixture_block_size 8 × 1024"):
        round_weights({"a": 1.0, "b": 1e-6}, ("a", "b"), block=8, where="data.train_weights")
    with pytest.raises(ValueError, match="mixture_block_size"):
        plan_mixture([(0, {"a": 1.0})], ("a",), block=0, seed=0)
