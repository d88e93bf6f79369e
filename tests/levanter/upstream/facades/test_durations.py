"""Durations: seconds counted by hand."""

from datetime import timedelta

import pytest

from levanter.upstream.facades.durations import encode_timedelta, parse_timedelta

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1d", 86400),
        ("+ 32 m 1 s", 1921),
        ("2h32m", 9120),
        ("1w 3d 2h 32m", 873120),
        ("4:13", 253),
        (":13", 13),
        ("4:13:02.266", 15182.266),
        ("2:04:13:02", 187982),
        ("2 days,  4:13:02", 187982),
        ("5 hrs, 34 minutes, 56 seconds", 20096),
    ],
)
def test_a_text_is_so_many_seconds(text: str, seconds: float):
    found = parse_timedelta(text)
    assert found.total_seconds() == seconds and parse_timedelta(encode_timedelta(found)) == found


@pytest.mark.parametrize("text", ["", "soon", "3 fortnights", "4:", "1:2:3:4:5"])
def test_a_text_that_is_none(text: str):
    with pytest.raises(ValueError, match="duration"):
        parse_timedelta(text)


def test_fractions_are_written():
    assert parse_timedelta(encode_timedelta(timedelta(seconds=200_000.5))).total_seconds() == 200_000.5
