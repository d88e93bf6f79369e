"""Durations as text: `15m`, `1h30m`, `2.5s`."""

import re
from datetime import timedelta

_UNITS = {
    "w": timedelta(weeks=1),
    "d": timedelta(days=1),
    "h": timedelta(hours=1),
    "m": timedelta(minutes=1),
    "s": timedelta(seconds=1),
    "ms": timedelta(milliseconds=1),
    "us": timedelta(microseconds=1),
}
_PART = re.compile(r"\s*(\d+(?:\.\d*)?)\s*(us|ms|[wdhms])")


def parse_duration(text: str) -> timedelta:
    """Reads `15m`, `1h30m`, `-2.5s`; units are w, d, h, m, s, ms, us.

    >>> parse_duration("1h30m").total_seconds(), parse_duration("-2.5s").total_seconds()
    (5400.0, -2.5)

    Raises:
        ValueError: the text is not of that form; a number needs its unit.
    """
    # The sign applies to the whole duration: `-1h30m` is minus ninety minutes.
    body = text.strip()
    sign = -1 if body.startswith("-") else 1
    body = body.removeprefix("-")
    total, at = timedelta(), 0
    while at < len(body):
        part = _PART.match(body, at)
        if part is None:
            raise ValueError(f"{text!r} is not a duration such as 15m, 1h30m or 2.5s")
        # Integers are multiplied exactly; a float product of large counts would round to microseconds.
        total += float(part[1]) * _UNITS[part[2]] if "." in part[1] else int(part[1]) * _UNITS[part[2]]
        at = part.end()
    if not body:
        raise ValueError("expected a duration such as 15m, got nothing")
    return sign * total


def format_duration(value: timedelta) -> str:
    """The shortest exact text of a duration: `15m`, `1h30m`, `0s`; the inverse of `parse_duration`.

    >>> format_duration(timedelta(seconds=5400)), format_duration(timedelta())
    ('1h30m', '0s')
    """
    if not value:
        return "0s"
    # divmod of a negative timedelta rounds towards minus infinity; the sign is therefore split off first.
    sign, rest = ("-", -value) if value < timedelta() else ("", value)
    units = []
    for name in ("d", "h", "m", "s", "ms", "us"):
        count, rest = divmod(rest, _UNITS[name])
        if count:
            units.append(f"{count}{name}")
    return sign + "".join(units)
