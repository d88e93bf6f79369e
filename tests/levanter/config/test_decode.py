"""Decoding: every type a configuration may hold, and the full text of every error."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import draccus
import pytest

from levanter.config import ConfigError, dump, parse_text

pytestmark = pytest.mark.quick


class Color(enum.Enum):
    RED = "r"
    BLUE = "b"


@dataclass(frozen=True)
class Ref:
    """A text value: `name@revision`."""

    name: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> "Ref":
        name, at, revision = text.partition("@")
        if at and not revision:
            raise ValueError(f"{text!r} has no revision after @")
        return cls(name, revision or None)

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"


@dataclass(frozen=True, kw_only=True)
class Model(draccus.ChoiceRegistry):
    pass


@Model.register_subclass("tiny")
@dataclass(frozen=True, kw_only=True)
class Tiny(Model):
    heads: int = 2
    name: str | None = None


@Model.register_subclass("huge")
@dataclass(frozen=True, kw_only=True)
class Huge(Model):
    heads: int
    layers: int

    def __post_init__(self) -> None:
        if self.heads % 2:
            raise ValueError(f"heads must be even, got {self.heads}\n(two halves)")


@dataclass(frozen=True, kw_only=True)
class Schedule(draccus.ChoiceRegistry):
    @classmethod
    def default_choice_name(cls) -> str | None:
        return "cosine"


@Schedule.register_subclass("cosine")
@dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    exponent: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Inner:
    """Inner things.

    Attributes:
        rate: how fast.
    """

    rate: float = 0.5
    every: timedelta = timedelta(minutes=15)
    sizes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Everything:
    flag: bool = False
    count: int = 1
    rate: float = 1.0
    name: str = "x"
    maybe: int | None = None
    path: Path = Path("a/b")
    every: timedelta | None = None
    color: Color = Color.RED
    mode: Literal["auto", "never", 3, True] = "auto"
    policy: bool | str = True
    skip: bool | int | Inner = False
    axes: dict[str, str | list[str] | None] = field(default_factory=dict)
    by_number: Mapping[int, float] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    pair: tuple[int, str] = (1, "a")
    numbers: tuple[float, ...] = ()
    words: Sequence[str] = ()
    known: frozenset[str] = frozenset()
    weights: dict[str, float] | list[tuple[int, dict[str, float]]] | None = None
    inner: Inner = field(default_factory=Inner)
    inners: list[Inner] = field(default_factory=list)
    model: Model = field(default_factory=Tiny)
    models: dict[str, Model] = field(default_factory=dict)
    only_tiny: Tiny = field(default_factory=Tiny)
    schedule: str | Schedule = "linear"
    ref: Ref | None = None
    anything: Any = None


def read(text: str) -> Everything:
    return parse_text(Everything, text, source="run.yaml")


def errors(text: str, cls: type = Everything) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_text(cls, text, source="run.yaml")
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("flag: true", "flag", True),
        ("flag: yes", "flag", True),
        ("flag: Off", "flag", False),
        ("count: 1_000", "count", 1000),
        ("count: 1e6", "count", 1_000_000),
        ("count: '7'", "count", 7),
        ("rate: 1E-3", "rate", 1e-3),
        ("rate: 3", "rate", 3.0),
        ("rate: .inf", "rate", float("inf")),
        ("name: 1234", "name", "1234"),
        ("name: 1e-3", "name", "1e-3"),
        ("name: no", "name", "no"),
        ("name: ''", "name", ""),
        ("maybe: null", "maybe", None),
        ("maybe: 4", "maybe", 4),
        ("path: /tmp/x", "path", Path("/tmp/x")),
        ("every: 1h30m", "every", timedelta(minutes=90)),
        ("every: 2.5s", "every", timedelta(seconds=2.5)),
        ("color: BLUE", "color", Color.BLUE),
        ("color: b", "color", Color.BLUE),
        ("mode: never", "mode", "never"),
        ("mode: 3", "mode", 3),
        ("mode: true", "mode", True),
        ("policy: nested", "policy", "nested"),
        ("policy: on", "policy", "on"),
        ("policy: false", "policy", False),
        ("skip: 5", "skip", 5),
        ("skip: true", "skip", True),
        ("skip: {rate: 2}", "skip", Inner(rate=2.0)),
        ("axes: {a: x, b: [x, y], c: null}", "axes", {"a": "x", "b": ["x", "y"], "c": None}),
        ("by_number: {1: 2, 3: 0.5}", "by_number", {1: 2.0, 3: 0.5}),
        ("names: [a, 5]", "names", ["a", "5"]),
        ("pair: [4, b]", "pair", (4, "b")),
        ("numbers: [1, 2.5]", "numbers", (1.0, 2.5)),
        ("words: [a]", "words", ("a",)),
        ("known: [a, b]", "known", frozenset({"a", "b"})),
        ("weights: {a: 1}", "weights", {"a": 1.0}),
        ("weights: [[0, {a: 1}], [10, {a: 0.5}]]", "weights", [(0, {"a": 1.0}), (10, {"a": 0.5})]),
        ("inners: [{rate: 1}, {}]", "inners", [Inner(rate=1.0), Inner()]),
        ("model: {type: huge, heads: 2, layers: 3}", "model", Huge(heads=2, layers=3)),
        ("models: {a: {type: tiny}}", "models", {"a": Tiny()}),
        ("only_tiny: {type: tiny, heads: 4}", "only_tiny", Tiny(heads=4)),
        ("only_tiny: {heads: 4}", "only_tiny", Tiny(heads=4)),
        ("schedule: constant", "schedule", "constant"),
        ("schedule: {exponent: 2}", "schedule", Cosine(exponent=2.0)),
        ("ref: org/name@main", "ref", Ref("org/name", "main")),
        ("ref: {name: org/name}", "ref", Ref("org/name")),
        ("anything: {a: [1, x, 1e-3]}", "anything", {"a": [1, "x", 1e-3]}),
    ],
)
def test_values(text: str, key: str, value: object):
    found = getattr(read(text), key)
    assert found == value
    assert type(found) is type(value)
    assert read(dump(read(text))) == read(text)


def test_draccus_decodes_the_dump_of_a_registry_config_alike():
    @dataclass(frozen=True, kw_only=True)
    class Small:
        count: int = 1
        maybe: float | None = None
        names: list[str] = field(default_factory=list)
        axes: dict[str, int] = field(default_factory=dict)
        mode: Literal["a", "b"] = "a"
        model: Model = field(default_factory=Tiny)
        path: Path = Path("x")

    text = "count: 3\nmaybe: 0.25\nnames: [a, b]\naxes: {m: 2}\nmode: b\n"
    text += "model: {type: huge, heads: 4, layers: 1}\npath: p/q\n"
    ours = parse_text(Small, text)
    assert draccus.loads(Small, text) == ours
    assert draccus.loads(Small, dump(ours)) == ours


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("flag: 5", "run.yaml:1: flag: expected true or false, got 5 (an integer)"),
        ("flag: 'yes'", 'run.yaml:1: flag: expected true or false, got "yes"'),
        ("\ncount: 1.5", "run.yaml:2: count: expected an integer, got 1.5 (a number)"),
        ("count: true", "run.yaml:1: count: expected an integer, got true (true or false)"),
        ("count: null", "run.yaml:1: count: expected an integer, got null"),
        ("count: [1]", "run.yaml:1: count: expected an integer, got a list"),
        ("rate: fast", 'run.yaml:1: rate: expected a number, got "fast"'),
        ("name: true", "run.yaml:1: name: expected text, got true (true or false); quote it if you mean text"),
        ("name: {a: 1}", "run.yaml:1: name: expected text, got a mapping"),
        (
            "path: gs://bucket/logs",
            'run.yaml:1: path: expected a path, got "gs://bucket/logs"; a path of this machine, not a URL',
        ),
        ("maybe: x", 'run.yaml:1: maybe: expected an integer or null, got "x"'),
        ("every: 10x", 'run.yaml:1: every: expected a duration such as 15m or null, got "10x"'),
        ("every: 15", "run.yaml:1: every: expected a duration such as 15m or null, got 15 (an integer)"),
        ("color: RAD", 'run.yaml:1: color: expected one of RED, BLUE, got "RAD"; did you mean `RED`?'),
        ("mode: nevr", 'run.yaml:1: mode: expected one of auto, never, 3, True, got "nevr"; did you mean `never`?'),
        ("axes: [a]", "run.yaml:1: axes: expected a mapping, got a list"),
        ("axes: {a: {b: c}}", "run.yaml:1: axes.a: expected text, a list of text or null, got a mapping"),
        ("axes: {a: [x, {}]}", "run.yaml:1: axes.a.1: expected text, got a mapping"),
        ("by_number: {one: 1}", 'run.yaml:1: by_number.one: expected an integer, got "one"'),
        ("names: a", 'run.yaml:1: names: expected a list of text, got "a"'),
        ("pair: [1, a, b]", "run.yaml:1: pair: expected 2 items (an integer, text), got 3"),
        ("pair: [x, a]", 'run.yaml:1: pair.0: expected an integer, got "x"'),
        ("weights: {a: x}", 'run.yaml:1: weights.a: expected a number, got "x"'),
        ("inner: 5", "run.yaml:1: inner: expected a mapping, got 5 (an integer)"),
        ("inner:\nflag: true", "run.yaml:1: inner: expected a mapping, got null; write {} for the defaults"),
        ("skip: {rat: 1}", "run.yaml:1: skip.rat: unknown key; did you mean `rate`?"),
        ("model: {heads: 4}", "run.yaml:1: model: needs `type:` with one of huge, tiny"),
        ("model: {type: tny}", "run.yaml:1: model.type: unknown type `tny`; did you mean `tiny`? (known: huge, tiny)"),
        ("model: {type: }", "run.yaml:1: model.type: expected one of huge, tiny, got null"),
        ("model: tiny", 'run.yaml:1: model: expected a mapping with `type:`, got "tiny"; write {type: tiny}'),
        ("only_tiny: {type: huge}", 'run.yaml:1: only_tiny.type: expected `tiny` here, got "huge"'),
        (
            "schedule: {type: cosin}",
            "run.yaml:1: schedule.type: unknown type `cosin`; did you mean `cosine`? (known: cosine)",
        ),
        (
            "model: {type: tiny, layers: 3}",
            "run.yaml:1: model.layers: unknown key; it is a key of type: huge",
        ),
        ("ref: x@", 'run.yaml:1: ref: expected text or a mapping or null, got "x@"'),
        (
            "model:\n  type: huge\n  heads: 3\n  layers: 1",
            "run.yaml:2: model: heads must be even, got 3\n    (two halves)",
        ),
    ],
)
def test_one_error(text: str, message: str):
    assert errors(text) == [message]


def test_required_keys_are_named_with_what_they_want():
    assert errors("model:\n  type: huge\n") == [
        "run.yaml:2: model.heads: required key is missing (an integer)",
        "run.yaml:2: model.layers: required key is missing (an integer)",
    ]


def test_unknown_keys_suggest_the_nearest_key_the_right_place_or_all_keys():
    text = "conut: 1\ninner:\n  sizs: {}\n  rate: 1\n  qqq: 2\nsizes: {a: 1}\n"
    assert errors(text) == [
        "run.yaml:1: conut: unknown key; did you mean `count`?",
        "run.yaml:3: inner.sizs: unknown key; did you mean `sizes`?",
        "run.yaml:5: inner.qqq: unknown key; valid keys here are rate, every, sizes",
        "run.yaml:6: sizes: unknown key; it belongs at `skip.sizes` or `inner.sizes`",
    ]


def test_all_problems_come_in_one_error():
    text = "count: x\ncount: 2\nmodel: {type: hug}\ninners:\n  - {rate: fast}\n  - {rte: 1}\nnope_nope: 1\n"
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert str(caught.value).splitlines()[:7] == [
        "6 problems in the configuration:",
        "[1] run.yaml:2: key `count` occurs twice, first at line 1",
        '[2] run.yaml:1: count: expected an integer, got "x"',
        "[3] run.yaml:3: model.type: unknown type `hug`; did you mean `huge`? (known: huge, tiny)",
        '[4] run.yaml:5: inners.0.rate: expected a number, got "fast"',
        "[5] run.yaml:6: inners.1.rte: unknown key; did you mean `rate`?",
        "[6] run.yaml:7: nope_nope: unknown key; valid keys here are " + ", ".join(Everything.__dataclass_fields__),
    ]


def test_a_config_error_is_a_value_error():
    assert issubclass(ConfigError, ValueError)


def test_other_exceptions_of_a_class_are_bugs_and_pass_through():
    @dataclass(frozen=True, kw_only=True)
    class Broken:
        x: int = 1

        def __post_init__(self) -> None:
            raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        parse_text(Broken, "x: 2")
