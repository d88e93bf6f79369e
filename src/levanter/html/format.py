"""Number and text formats, the same in the terminal and on a page: durations, shares, counts, probabilities."""

import math
import re
import unicodedata

from haliax_ext.errors import gib as gib

_SECONDS = ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
# Bidirectional controls reorder the text behind them: a path could be displayed as another one.
_BIDI_CONTROLS = "\u202a-\u202e\u2066-\u2069"
# Control characters (Cc) except tab and line feed, and surrogates, which UTF-8 cannot encode.
_CONTROLS = re.compile(f"[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\ud800-\\udfff{_BIDI_CONTROLS}]")


def visible(text: object) -> str:
    """The text with control characters, surrogates and bidirectional controls spelled out as escapes."""
    return _CONTROLS.sub(_escape_code, str(text))


def _escape_code(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def three_digits(value: float) -> str:
    """Three significant digits without an exponent: `0.0123`, `1.23`, `12.3`, `1,230`."""
    # Bounds are those of rounding: 99.95 becomes `100`, and must not be written as `100.0`.
    size = abs(value)
    if size >= 99.95:
        return f"{round(value, 2 - math.floor(math.log10(size))):,.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    if size >= 0.9995 or size == 0:
        return f"{value:.2f}" if size else "0"
    return f"{value:.3g}"


def seconds_text(value: float) -> str:
    """A duration in the unit that suits it: `1.23 s`, `45.6 ms`, `2.00 h`."""
    return span_text(value, value)


def span_text(low: float, high: float) -> str:
    """Two durations in one unit: `1.20–1.45 s`; one number where both read the same."""
    # Units above a second begin at two of them: `90.0 s` is easier to compare than `1.50 min`.
    size, unit = next(((size, unit) for size, unit in _SECONDS if high >= size * (2 if size > 1 else 1)), (1e-6, "µs"))
    if high == 0:
        size, unit = 1.0, "s"
    return f"{between(low / size, high / size)} {unit}"


def between(low: float, high: float) -> str:
    """`1.20–1.45`, or one number where both read the same."""
    first, last = three_digits(low), three_digits(high)
    return last if first == last else f"{first}–{last}"


def percent(share: float) -> str:
    """A share with one decimal: `45.6 %`; one that would round to zero is `< 0.1 %`."""
    return "< 0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


def percent_between(low: float, high: float) -> str:
    """`38.1–45.6 %`."""
    first, last = f"{100 * low:.1f}", f"{100 * high:.1f}"
    return f"{last} %" if first == last else f"{first}–{last} %"


def count_text(value: int, one: str, many: str | None = None) -> str:
    """`1 host`, `32 hosts`, `108,000 tokens`."""
    return f"{value:,} {one if value == 1 else many or one + 's'}"


def columns(text: str) -> int:
    """The columns of a terminal that a text occupies: two for wide characters, none for combining ones."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(bool(unicodedata.combining(c)) for c in text)


def integer_text(number: float) -> str:
    """A whole number with separators: `21,620`."""
    return f"{number:,.0f}"


def exact_percent(share: float) -> str:
    """A share with at least two significant digits: `96.27 %`, `0.0013 %`; below 10⁻⁶ % as a power of ten."""
    # 1 − ⌊log₁₀⌋ decimals give two significant digits.
    value = share * 100
    if 0 < value < 1e-6:
        return probability_text(math.log(share))
    decimals = 2 if value >= 0.1 or value == 0 else min(8, 1 - math.floor(math.log10(value)))
    return f"{value:.{decimals}f} %"


def probability_text(log_p: float) -> str:
    """The probability whose natural logarithm is `log_p`: `83.2 %`, `0.15 %`, `3.1 × 10⁻⁷`, `0`."""
    if log_p == -math.inf:
        return "0"
    if log_p > 0:
        return "above 1"
    if log_p >= math.log(1e-4):
        return f"{math.exp(log_p) * 100:.3g} %"
    # Computed from the logarithm: exp(log_p) is zero where a long suffix has a p_z below the smallest float.
    exponent = math.floor(log_p / math.log(10))
    mantissa = math.exp(log_p - exponent * math.log(10))
    # Rounding to one decimal may carry: 9.96 is written as 1.0 of the next power.
    if round(mantissa, 1) >= 10:
        mantissa, exponent = 1.0, exponent + 1
    return f"{mantissa:.1f} × 10{superscript(exponent)}"


def sample_count_text(log_n: float) -> str:
    """The number of samples whose natural logarithm is `log_n`: `3`, `12,345`, `1.2 × 10¹²`; `never` for infinity."""
    if log_n == math.inf:
        return "never"
    if log_n < math.log(1e7):
        # Rounded up, but not for the last bits of exp(log(n)).
        return integer_text(max(1, math.ceil(math.exp(log_n) * (1 - 1e-12))))
    exponent = math.floor(log_n / math.log(10))
    return f"{math.exp(log_n - exponent * math.log(10)):.1f} × 10{superscript(exponent)}"


def superscript(exponent: int) -> str:
    """An exponent in superscript digits."""
    return str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
