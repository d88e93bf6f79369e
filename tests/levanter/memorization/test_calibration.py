"""Calibration: thresholds against counting, intervals against a loop and against known truths."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from levanter.memorization.calibration import block_bootstrap, block_length, calibrate

LOGS = st.lists(st.floats(-30, 0) | st.just(-math.inf), min_size=1, max_size=40)


@settings(deadline=None)
@given(LOGS, st.sampled_from([0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.99]))
def test_threshold_is_the_smallest_that_keeps_the_rate(values, rate):
    found = calibrate([values], false_positive_rate=rate, resamples=2)
    assert found.reached == sum(v >= found.log_threshold for v in values) / len(values)
    assert found.reached <= rate + 1e-12
    # One float lower, one more value is reached, and that is too many.
    if found.log_threshold > -1e308:
        lower = np.nextafter(found.log_threshold, -np.inf)
        assert sum(v >= lower for v in values) / len(values) > rate


def test_ties_do_not_slip_over_the_rate():
    found = calibrate([np.zeros(10), np.full(90, -5.0)], false_positive_rate=0.05)
    assert found.log_threshold > 0 and found.reached == 0.0 and found.windows == 100


def test_nothing_but_zeros_leaves_every_probability_to_count():
    found = calibrate([np.full(50, -np.inf)], false_positive_rate=0.01)
    assert found.threshold == 0.0 and -1e308 > found.log_threshold > -np.inf


def loop_bootstrap(values, *, block, resamples, confidence, seed):
    """The circular block bootstrap as the paper describes it, one resample after the other."""
    length, blocks = len(values), math.ceil(len(values) / block)
    means = []
    for starts in np.random.default_rng(seed).integers(0, length, size=(resamples, blocks)):
        resample = [values[(start + step) % length] for start in starts for step in range(block)]
        means.append(sum(resample[:length]) / length)
    return np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.integers(1, 30), st.integers(0, 5))
def test_bootstrap_equals_a_loop(values, block, seed):
    options = {"block": min(block, len(values)), "resamples": 20, "confidence": 0.9, "seed": seed}
    found = block_bootstrap(values, **options)
    np.testing.assert_allclose([found.low, found.high], loop_bootstrap(values, **options), atol=1e-12)


def passages(random, length, rate, run):
    """0/1 in runs: a two-state chain whose covered share is `rate` and whose runs are `run` long on average."""
    leave, enter = 1 / run, rate / (1 - rate) / run
    state, values = random.random() < rate, np.empty(length)
    draws = random.random(length)
    for n in range(length):
        state = draws[n] >= leave if state else draws[n] < enter
        values[n] = state
    return values


def test_interval_holds_the_truth_where_neighbours_depend():
    random = np.random.default_rng(3)
    inside, naive = 0, 0
    trials, length, rate = 60, 4000, 0.3
    for n in range(trials):
        values = passages(random, length, rate, run=20)
        found = block_bootstrap(values, block=200, resamples=300, seed=n)
        inside += found.low <= rate <= found.high
        alone = block_bootstrap(values, block=1, resamples=300, seed=n)
        naive += alone.low <= rate <= alone.high
    assert inside >= 0.83 * trials
    assert naive <= 0.6 * trials


def test_same_seed_same_interval():
    values = np.random.default_rng(0).random(500)
    one, two = (block_bootstrap(values, block=20) for _ in range(2))
    assert one == two
    assert calibrate([-values], block=20) == calibrate([-values], block=20)


def test_a_mean_stays_within_its_values():
    assert block_bootstrap(np.ones(1001), block=17).low == 1.0
    assert block_bootstrap(np.zeros(1001), block=17).high == 0.0


def test_block_lengths():
    assert block_length(400, 1_000_000) == 3200
    assert block_length(1, 1_000_000) == 1000
    assert block_length(400, 1000) == 250
    assert block_length(400, 1) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: block_bootstrap([], block=1), "empty"),
        (lambda: block_bootstrap([1.0], block=2), "within 1 … 1"),
        (lambda: block_bootstrap([1.0], block=1, resamples=0), "resamples"),
        (lambda: block_bootstrap([1.0], block=1, confidence=95), "confidence"),
        (lambda: calibrate([]), "no control windows"),
        (lambda: calibrate([[-1.0]], false_positive_rate=1.0), r"\[0, 1\)"),
    ],
)
def test_wrong_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
