"""Durations as text, as earlier generations wrote them: `2h32m`, `3 days, 4:13:02`, `4:13`.

Documents are read by `levanter.config.durations`, which takes the first of these forms.
"""

import re
from datetime import timedelta

from levanter.config.durations import format_duration

_UNITS = {"w": 604800, "d": 86400, "h": 3600, "m": 60, "s": 1}
_PART = re.compile(r"(?P<count>\d+(?:\.\d+)?)\s*(?P<unit>w|d|h|m|s)[a-z]*,?\s*", re.IGNORECASE)
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
        rest = rest[part.end() :]
    return timedelta(seconds=seconds)


def encode_timedelta(value: timedelta) -> str:
    """A duration as text; `parse_timedelta` undoes it where it is not negative."""
    if value == timedelta(seconds=int(value.total_seconds())):
        return format_duration(value)
    return f"{value.total_seconds():.6f}s"
