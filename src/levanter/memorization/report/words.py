"""How numbers are written in a report: p_z as a percentage or a power of ten, counts with separators, escaped text."""

import html
import math

import numpy as np


def escaped(text: object) -> str:
    """Text for HTML content and attributes."""
    return html.escape(str(text), quote=True)


def count(number: float) -> str:
    """A whole number with separators: 21,620."""
    return f"{number:,.0f}"


def share(value: float) -> str:
    """A share in %: 96.27 %, 0.0013 %; below a millionth of a % as a power of ten."""
    percent = value * 100
    if 0 < percent < 1e-6:
        return probability(math.log(value))
    places = 2 if percent >= 0.1 or percent == 0 else min(8, 1 - math.floor(math.log10(percent)))
    return f"{percent:.{places}f} %"


def probability(log_p: float) -> str:
    """A probability given as a natural logarithm: 83.2 %, 0.15 %, 3.1 × 10⁻⁷, 0."""
    if log_p == -math.inf:
        return "0"
    if log_p > 0:
        return "above 1"
    if log_p >= math.log(1e-4):
        return f"{math.exp(log_p) * 100:.3g} %"
    exponent = math.floor(log_p / math.log(10))
    mantissa = math.exp(log_p - exponent * math.log(10))
    if round(mantissa, 1) >= 10:
        mantissa, exponent = 1.0, exponent + 1
    return f"{mantissa:.1f} × 10{superscript(exponent)}"


def samples(log_n: float) -> str:
    """A number of samples given as a natural logarithm: 3, 12,345, 1.2 × 10¹²; never, where there is none."""
    if log_n == math.inf:
        return "never"
    if log_n < math.log(1e7):
        return count(max(1.0, float(np.ceil(math.exp(log_n) * (1 - 1e-12)))))
    exponent = math.floor(log_n / math.log(10))
    return f"{math.exp(log_n - exponent * math.log(10)):.1f} × 10{superscript(exponent)}"


def superscript(exponent: int) -> str:
    """An exponent in superior figures."""
    return str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
