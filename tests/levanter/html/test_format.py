"""Number formats: probabilities from logarithms, shares, counts."""

import math

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from levanter.html.format import exact_percent, integer_text, probability_text, sample_count_text

pytestmark = pytest.mark.quick


@settings(deadline=None)
@given(st.floats(-2000, 0))
def test_probability_text_reads_back_as_the_probability(log_p):
    text = probability_text(log_p)
    if text.endswith("%"):
        assert float(text[:-2]) / 100 == pytest.approx(math.exp(log_p), rel=6e-3)
    else:
        mantissa, power = text.split(" × 10")
        exponent = int(power.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")))
        exact = mpmath.log(mpmath.mpf(mantissa)) + exponent * mpmath.log(10)
        assert float(exact) == pytest.approx(log_p, abs=0.06)


def test_formats_of_edge_values():
    assert [probability_text(x) for x in (-math.inf, 5e-324, 0.0)] == ["0", "above 1", "100 %"]
    assert [exact_percent(x) for x in (0.9627, 0.0, 1.3e-5, 1.0)] == ["96.27 %", "0.00 %", "0.0013 %", "100.00 %"]
    assert [sample_count_text(x) for x in (-math.inf, math.log(12345), math.inf)] == ["1", "12,345", "never"]
    assert sample_count_text(math.log(2.5e30)) == "2.5 × 10³⁰" and integer_text(21620) == "21,620"
