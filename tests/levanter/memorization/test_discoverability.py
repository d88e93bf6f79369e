"""Discoverability against arithmetic with 60 digits, and against the definition itself."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from levanter.memorization.discoverability import (
    DEFAULT_N,
    DEFAULT_P,
    expected_rate,
    extraction_curve,
    log_required_n,
    log_threshold,
    max_extraction_rate,
    required_n,
    survival,
    threshold,
)

LOG_PZ = st.floats(min_value=-5000, max_value=-1e-9)
P = st.floats(min_value=1e-6, max_value=1 - 1e-9)


def exact_quotient(log_pz: float, p: float):
    """log(1 − p) / log(1 − p_z), with enough digits for 1 − e^-5000."""
    with mpmath.workdps(2300):
        return mpmath.log(1 - mpmath.mpf(p)) / mpmath.log(1 - mpmath.exp(mpmath.mpf(log_pz)))


@settings(deadline=None)
@given(log_pz=LOG_PZ, p=P)
def test_required_n_equals_exact_arithmetic(log_pz, p):
    exact = exact_quotient(log_pz, p)
    with mpmath.workdps(30):
        assert float(log_required_n(log_pz, p)) == pytest.approx(float(mpmath.log(exact)), abs=1e-12, rel=1e-13)
    found = float(required_n(log_pz, p))
    if exact > 1e305:
        assert found > 1e304 or found == math.inf
        return
    rounded_up = max(1, int(mpmath.ceil(exact)))
    if abs(exact - mpmath.nint(exact)) < 1e-11 * exact:
        assert found == pytest.approx(float(exact), abs=1.0, rel=1e-13)
    else:
        assert found == pytest.approx(float(rounded_up), rel=1e-13)
        if rounded_up < 2**40:
            assert found == rounded_up


@settings(deadline=None)
@given(n=st.integers(min_value=1, max_value=10**15), p=P)
def test_threshold_equals_exact_arithmetic(n, p):
    with mpmath.workdps(60):
        exact = 1 - (1 - mpmath.mpf(p)) ** (mpmath.mpf(1) / n)
        log_exact = float(mpmath.log(exact))
    assert float(threshold(n, p)) == pytest.approx(float(exact), rel=1e-13)
    assert float(log_threshold(math.log(n), p)) == pytest.approx(log_exact, abs=1e-13, rel=1e-14)


def test_threshold_beyond_floats():
    # n = e^2000: log τ = log(−log(1 − p)) − 2000 to the last bit.
    assert float(log_threshold(2000.0, 0.5)) == pytest.approx(math.log(math.log(2)) - 2000, rel=1e-15)


@settings(deadline=None)
@given(st.floats(min_value=-30, max_value=-1e-3), st.sampled_from(DEFAULT_P))
def test_the_two_questions_are_inverse(log_pz, p):
    n = float(required_n(log_pz, p))
    # n samples are enough and n − 1 are not, by the definition 1 − (1 − p_z)^n ≥ p.
    with mpmath.workdps(50):
        pz = mpmath.exp(mpmath.mpf(log_pz))
        assert 1 - (1 - pz) ** int(n) >= p * (1 - mpmath.mpf("1e-13"))
        if n > 1:
            assert 1 - (1 - pz) ** (int(n) - 1) < p * (1 + mpmath.mpf("1e-13"))
    assert extraction_curve([log_pz], [n], [p]).rate[0, 0] == 1.0
    if 1 < n < 1e12:
        assert extraction_curve([log_pz], [n - 1], [p]).rate[0, 0] == 0.0


@pytest.mark.parametrize(
    ("pz", "p", "n"), [(0.5, 0.5, 1), (0.5, 0.75, 2), (0.5, 0.875, 3), (0.1, 0.19, 2), (0.9, 0.999, 3)]
)
def test_round_numbers_are_not_rounded_up_further(pz, p, n):
    assert float(required_n(math.log(pz), p)) == n


def test_both_ends_are_kept():
    log_pz = np.array([0.0, -np.inf, -1.0])
    assert required_n(log_pz, 0.5).tolist()[:2] == [1.0, math.inf]
    assert log_required_n(log_pz, 0.5).tolist()[:2] == [-math.inf, math.inf]
    curve = extraction_curve(log_pz)
    assert curve.windows == 3
    assert (curve.rate[:, 0] >= 1 / 3).all() and (curve.rate[:, -1] == 2 / 3).all()


def test_surface_equals_upstreams_power_matrix_where_that_is_exact():
    log_pz = np.log(np.random.default_rng(0).beta(0.3, 2.0, 400))
    log_pz[:3] = [0.0, -np.inf, math.log(0.5)]
    n = np.array([2.0**e for e in range(20)])
    pz = np.exp(log_pz)[:, None]
    expected = np.array([[np.mean(1 - (1 - pz[:, 0]) ** k >= p) for k in n] for p in DEFAULT_P])
    np.testing.assert_array_equal(extraction_curve(log_pz, n).rate, expected)


def test_surface_of_tiny_probabilities_is_not_empty():
    # Upstream's 1 − (1 − p_z)^n is 0 for each of these.
    curve = extraction_curve(np.array([-40.0, -45.0, -800.0]), DEFAULT_N, [0.5])
    assert curve.rate[0, -1] == pytest.approx(2 / 3)
    assert curve.rate.shape == (1, 70) and (np.diff(curve.rate) >= 0).all()


@settings(deadline=None)
@given(st.lists(st.floats(min_value=-50, max_value=0) | st.just(-math.inf), min_size=1, max_size=30), st.floats(-60, 0))
def test_survival_counts(values, at):
    assert survival(np.sort(values), at) == sum(v >= at - 1e-13 for v in values) / len(values)


def test_limits_and_means():
    log_pz = np.array([0.0, -np.inf, -800.0, math.log(0.25)])
    assert max_extraction_rate(log_pz, top_k=40) == 0.75
    assert max_extraction_rate(log_pz, top_k=None) is None
    assert expected_rate(log_pz) == pytest.approx(1.25 / 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: required_n([0.1], 0.5), "log p_z must be at most 0"),
        (lambda: required_n([math.nan], 0.5), "log p_z must be at most 0"),
        (lambda: required_n([-1.0], 1.0), "p must be strictly between 0 and 1"),
        (lambda: threshold(0.5, 0.5), "n must be at least 1"),
        (lambda: log_threshold(-1.0, 0.5), "n must be at least 1"),
        (lambda: extraction_curve([-1.0], [0.0]), "n must be at least 1"),
        (lambda: extraction_curve([]), "no windows"),
        (lambda: expected_rate([]), "no windows"),
        (lambda: max_extraction_rate([], top_k=1), "no windows"),
    ],
)
def test_wrong_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
