"""Parses and writes durations in the forms of earlier generations: `2h32m`, `3 days, 4:13:02`, `4:13`.

For documents, `levanter.config.durations` accepts the first of these forms.
"""

import re
from datetime import timedelta

from levanter.config.durations import format_duration

_UNITS = {"w": 604800, "d": 86400, "h": 3600, "m": 60, "s": 1}
_PART = re.compile(r"(?P<count>\d+(?:\.\d+)?)\s*(?P<unit>w|d|h|m|s)[a-z]*,?\s*", re.IGNORECASE)
# Lazy optional groups: two parts are m:s, three h:m:s, four d:h:m:s.
_CLOCK = re.compile(r"(?:(?P<d>\d+):)??(?:(?P<h>\d+):)??(?P<m>\d*):(?P<s>\d{1,2}(?:\.\d+)?)")


def parse_timedelta(text: str) -> timedelta:
    """Reads counts with units (`1w 3d 2h`, `5 hours, 34 minutes`), a clock (`4:13:02`, `:13`), or both.

    Raises:
        ValueError: the text is not of that form.
    """
    rest, seconds = text.strip().removeprefix("+").strip(), 0.0
    if not rest:
        raise ValueError("expected a duration such as 2h32m, got nothing")
    while rest:
        if (clock := _CLOCK.fullmatch(rest)) is not None:
            seconds += sum(float(value) * _UNITS[unit] for unit, value in clock.groupdict().items() if value)
            break
        part = _PART.match(rest)
        if part is None:
            raise ValueError(f"expected a duration such as 2h32m, 3 days or 4:13:02, got {text!r}")
        seconds += float(part["count"]) * _UNITS[part["unit"].lower()]
        # The longest prefix that is a count with a unit is consumed; a clock can only come last.
        rest = rest[part.end() :]
    return timedelta(seconds=seconds)


def encode_timedelta(value: timedelta) -> str:
    """Formats a duration; `parse_timedelta` is the inverse for durations that are not negative."""
    if value == timedelta(seconds=int(value.total_seconds())):
        return format_duration(value)
    # `format_duration` has whole seconds only.
    return f"{value.total_seconds():.6f}s"
