"""Shuffles are bijections, and look like shuffles."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from levanter.data.shuffle import Affine, Blocks, Feistel, Identity, ShuffledWindows, subkey

sizes = st.integers(1, 700)
keys = st.integers(0, 2**64 - 1)


@settings(deadline=None, max_examples=60)
@given(sizes, keys, st.integers(1, 40), st.integers(1, 9), st.sampled_from(["feistel", "linear"]))
def test_every_shuffle_is_a_bijection(size, key, block, window, kind):
    for shuffle in (
        Identity(size),
        Feistel(size, key),
        Affine(size, key),
        ShuffledWindows(size, key, block, kind),
        Blocks(size, key, block, window, kind),
    ):
        found = shuffle(np.arange(size))
        assert sorted(found.tolist()) == list(range(size)), shuffle
        # Any place on its own gives the same as all together.
        some = np.arange(size)[:: max(size // 7, 1)][::-1]
        assert (shuffle(some) == found[some]).all()


@settings(deadline=None, max_examples=60)
@given(sizes, keys, st.integers(1, 40), st.integers(1, 9))
def test_blocks_keep_windows_of_blocks_together(size, key, block, window):
    """By brute force: cut the order into windows of whole blocks; each must hold exactly the things of its blocks."""
    order = Blocks(size, key, block, window)(np.arange(size))
    blocks = -(-size // block)
    place, seen = 0, []
    while place < size:
        # ShuffledWindows end where a multiple of `window` blocks is complete.
        taken = min(window, blocks - len(seen))
        for stop in range(place + 1, size + 1):
            inside = sorted(set((order[place:stop] // block).tolist()))
            whole = [b for b in inside if sum(order[place:stop] // block == b) == min(block, size - b * block)]
            if len(whole) == taken == len(inside):
                break
        else:
            raise AssertionError("no window of whole blocks")
        seen += inside
        place = stop
    assert sorted(seen) == list(range(blocks))


def test_windows_stay_in_place():
    order = ShuffledWindows(1000, 3, 128)(np.arange(1000))
    assert (order // 128 == np.arange(1000) // 128).all()
    assert (order != np.arange(1000)).mean() > 0.9


@pytest.mark.parametrize("size", [1000, 4096, 4097])
def test_feistel_is_a_good_shuffle(size):
    """What a uniform permutation does on average, within five standard deviations of it."""
    trials = 200
    orders = np.stack([Feistel(size, key)(np.arange(size)) for key in range(trials)])
    assert len({tuple(order) for order in orders.tolist()}) == trials
    # Fixed points: one on average, variance one.
    fixed = (orders == np.arange(size)).sum(axis=1).mean()
    assert abs(fixed - 1) < 5 / np.sqrt(trials)
    # Neighbours: the difference of two neighbours is ±1 with probability 2/size each.
    neighbours = (np.abs(np.diff(orders, axis=1)) == 1).sum(axis=1).mean()
    assert abs(neighbours - 2 * (size - 1) / size) < 5 * np.sqrt(2 / trials)
    # Where a thing lands is uniform: chi-squared over 16 bins, for the first and for a middle place.
    for place in (0, size // 2):
        counts = np.bincount(orders[:, place] * 16 // size, minlength=16)
        statistic = ((counts - trials / 16) ** 2 / (trials / 16)).sum()
        assert statistic < 15 + 5 * np.sqrt(30)
    # Rank correlation with the place: zero, with standard deviation 1/sqrt(size − 1).
    correlation = [np.corrcoef(order, np.arange(size))[0, 1] for order in orders]
    assert abs(np.mean(correlation)) < 5 / np.sqrt((size - 1) * trials)
    assert np.std(correlation) == pytest.approx(1 / np.sqrt(size - 1), rel=0.3)


def test_large_sizes_need_no_memory():
    size = 10**12 + 7
    places = np.array([0, 1, size // 2, size - 1])
    found = Feistel(size, 5)(places)
    assert ((found >= 0) & (found < size)).all() and len(set(found.tolist())) == 4
    with pytest.raises(ValueError, match="use feistel"):
        Affine(size, 5)


def test_linear_is_what_it_says():
    order = Affine(1009, 7)(np.arange(1009))
    assert len(set((np.diff(order) % 1009).tolist())) == 1


def test_keys_differ_by_every_word():
    found = {subkey(0), subkey(1), subkey(0, "a"), subkey(0, "ab"), subkey(0, "a", "b"), subkey(0, 1), subkey(0, "1")}
    assert len(found) == 7
    # Orders must not change between versions: a run that resumes would read other rows.
    assert subkey(0, "epoch", 3) == 0x23FC6ECBDA1B06B2
    assert Feistel(10, 1)(np.arange(10)).tolist() == [1, 0, 7, 8, 3, 6, 4, 9, 5, 2]
