"""The canonical dump: stable text, and it reads back to an equal configuration."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import draccus
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from levanter.config import dump, parse_text
from levanter.config.durations import format_duration, parse_duration


class Shade(enum.Enum):
    DARK = 1
    LIGHT = 2


@dataclass(frozen=True, kw_only=True)
class Shape(draccus.ChoiceRegistry):
    pass


@Shape.register_subclass("round")
@dataclass(frozen=True, kw_only=True)
class Round(Shape):
    radius: float = 1.0


@Shape.register_subclass("square")
@dataclass(frozen=True, kw_only=True)
class Square(Shape):
    side: float = 1.0
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Sample:
    shape: Shape = field(default_factory=Round)
    text: str = ""
    note: str | None = None
    number: float = 0.0
    count: int = 0
    either: bool | int | str = False
    pause: timedelta = timedelta(0)
    shade: Shade = Shade.DARK
    mode: Literal["on", "off", "no"] = "on"
    path: Path = Path("x")
    names: list[str] = field(default_factory=list)
    stages: tuple[tuple[int, float], ...] = ()
    mapping: Mapping[str, str | list[str] | None] = field(default_factory=dict)
    by_number: dict[int, str] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)
    free: Any = None


texts = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=10) | st.sampled_from(
    [
        "on",
        "null",
        "1e-3",
        "0x1f",
        "~",
        "1:30",
        "2024-01-01",
        "a: b",
        "[x",
        "- y",
        "#z",
        "  pad ",
        "!t",
        "<<",
        "=",
        "\x85",
    ]
)
numbers = st.floats(allow_nan=False)
shapes = st.builds(Round, radius=numbers) | st.builds(Square, side=numbers, label=texts)
samples = st.builds(
    Sample,
    shape=shapes,
    text=texts,
    note=st.none() | texts,
    number=numbers,
    count=st.integers(),
    either=st.booleans() | st.integers() | texts,
    pause=st.timedeltas(),
    shade=st.sampled_from(Shade),
    mode=st.sampled_from(["on", "off", "no"]),
    path=st.from_regex(r"[a-z]{1,5}(/[a-z0-9]{1,5}){0,2}", fullmatch=True).map(Path),
    names=st.lists(texts, max_size=3),
    stages=st.lists(st.tuples(st.integers(), numbers), max_size=3).map(tuple),
    mapping=st.dictionaries(texts, st.none() | texts | st.lists(texts, max_size=2), max_size=3),
    by_number=st.dictionaries(st.integers(), texts, max_size=3),
    shapes=st.dictionaries(texts, shapes, max_size=2),
    free=st.none() | st.lists(texts | st.integers() | numbers, max_size=3),
)


@given(samples)
def test_a_dump_reads_back_to_an_equal_configuration(sample: Sample):
    text = dump(sample)
    assert parse_text(Sample, text) == sample
    assert dump(parse_text(Sample, text)) == text


def test_the_text_itself():
    sample = Sample(
        shape=Square(side=1e-5, label="on"),
        pause=timedelta(hours=1, seconds=2),
        mapping={"embed": ["a", "b"], "x": None},
    )
    assert dump(sample) == (
        "shape:\n  type: square\n  side: 1.0e-05\n  label: 'on'\n"
        "text: ''\nnote: null\nnumber: 0.0\ncount: 0\neither: false\npause: 1h2s\nshade: DARK\nmode: 'on'\npath: x\n"
        "names: []\nstages: []\nmapping:\n  embed:\n    - a\n    - b\n  x: null\n"
        "by_number: {}\nshapes: {}\nfree: null\n"
    )


@given(samples)
def test_pyyaml_alone_reads_the_same_texts(sample: Sample):
    found = yaml.safe_load(dump(sample))
    assert found["text"] == sample.text
    assert found["mode"] == sample.mode
    assert found["names"] == sample.names
    assert found["count"] == sample.count


def test_what_no_yaml_reads_back_is_our_own_bug():
    with pytest.raises(TypeError, match="a configuration cannot hold <object object"):
        dump(Sample(free=object()))


@given(st.timedeltas())
def test_durations_round_trip(value: timedelta):
    assert parse_duration(format_duration(value)) == value


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5m", 300), ("1h30m", 5400), ("2.5s", 2.5), ("1d", 86400), ("250ms", 0.25), ("-1m", -60), ("1h 5m", 3900)],
)
def test_durations(text: str, seconds: float):
    assert parse_duration(text).total_seconds() == seconds


@pytest.mark.parametrize("text", ["", "5", "5 x", "m", "5m3", "1.2.3s"])
def test_what_is_no_duration(text: str):
    with pytest.raises(ValueError, match="a duration such as"):
        parse_duration(text)
