"""Numbers and names as people read them, the same in the terminal and on the page. Every number has a unit."""

import math
import unicodedata

from haliax_ext.errors import gib as gib

_SECONDS = ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
# Marks that turn the direction of what follows them: a path could show as another one.
_TURNING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def visible(text: object) -> str:
    """The text with everything that would steer a terminal or a browser spelled out instead."""
    shown = []
    for character in str(text):
        steers = unicodedata.category(character) in ("Cc", "Cs") and character not in "\n\t"
        if steers or character in _TURNING:
            code = ord(character)
            shown.append(f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")
        else:
            shown.append(character)
    return "".join(shown)


def three_digits(value: float) -> str:
    """Three significant digits without an exponent: `0.0123`, `1.23`, `12.3`, `1,230`."""
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
    size, unit = next(((size, unit) for size, unit in _SECONDS if high >= size * (2 if size > 1 else 1)), (1e-6, "µs"))
    if high == 0:
        size, unit = 1.0, "s"
    return f"{between(low / size, high / size)} {unit}"


def between(low: float, high: float) -> str:
    """`1.20–1.45`, or one number where both read the same."""
    first, last = three_digits(low), three_digits(high)
    return last if first == last else f"{first}–{last}"


def percent(share: float) -> str:
    """A share with one decimal: `45.6 %`; a very small one is not shown as none."""
    return "< 0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


def percent_between(low: float, high: float) -> str:
    """`38.1–45.6 %`."""
    first, last = f"{100 * low:.1f}", f"{100 * high:.1f}"
    return f"{last} %" if first == last else f"{first}–{last} %"


def count_text(value: int, one: str, many: str | None = None) -> str:
    """`1 host`, `32 hosts`, `108,000 tokens`."""
    return f"{value:,} {one if value == 1 else many or one + 's'}"


def columns(text: str) -> int:
    """How many columns of a terminal a text takes: wide characters take two, combining ones none."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(bool(unicodedata.combining(c)) for c in text)
