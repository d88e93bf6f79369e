"""Nodes: YAML reading against PyYAML's own loader, marks, merging, duplicate keys, aliases."""

import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from levanter.config.errors import Mark, Problem
from levanter.config.yaml_nodes import MapNode, compose, from_plain, merged, scalar_value, to_plain

HERE = Mark(source="x.yaml", line=1)

plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    # PyYAML leaves the texts None and 0E0 bare. For us a bare None is null, as users of Python mean it, and 1e-4 is a
    # number although YAML 1.1 wants a point in it.
    | st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=12).filter(
        lambda text: text != "None" and not re.fullmatch(r"[-+]?[0-9_]+[eE][-+]?[0-9]+", text)
    ),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF), max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)


def composed(text: str) -> tuple[object, list[str]]:
    problems: list[Problem] = []
    node = compose(text, "x.yaml", problems, lambda *_: None)
    return (None if node is None else to_plain(node)), [str(p) for p in problems]


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), plain_values, max_size=5))
def test_reads_what_pyyaml_writes(value: dict):
    assert composed(yaml.safe_dump(value)) == (value, [])


@given(plain_values.filter(lambda v: isinstance(v, dict)))
def test_plain_values_round_trip_through_nodes(value: dict):
    assert to_plain(from_plain(value, HERE)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E-3", 1e-3),
        ("6.0", 6.0),
        (".5", 0.5),
        ("1_000", 1000),
        ("0x1F", 31),
        ("-1", -1),
        ("on", "on"),
        ("no", "no"),
        ("010", 10.0),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("None", None),
        ("~", None),
        ("", None),
        ("True", True),
        ("infinity", "infinity"),
        ("-.inf", float("-inf")),
        ("1.2.3", "1.2.3"),
    ],
)
def test_plain_scalars(text: str, value: object):
    assert scalar_value(text) == value
    assert type(scalar_value(text)) is type(value)


def test_quoted_scalars_are_text():
    assert composed("a: '1'\nb: \"true\"\nc: |\n  x\nd: !!str 5\n") == (
        {"a": "1", "b": "true", "c": "x\n", "d": "5"},
        [],
    )


def test_duplicate_keys_are_errors_at_every_depth():
    text = "a: 1\nb:\n  c: 1\n  d: {e: 1, e: 2}\n  c: 2\na: 2\n"
    assert composed(text)[1] == [
        "x.yaml:4: key `e` occurs twice, first at line 4",
        "x.yaml:5: key `c` occurs twice, first at line 3",
        "x.yaml:6: key `a` occurs twice, first at line 1",
    ]


def test_anchors_and_merge_keys():
    text = "base: &b {x: 1, y: 2}\nother: &o {y: 3, z: 4}\none:\n  <<: *b\n  y: 5\ntwo:\n  <<: [*b, *o]\n"
    assert composed(text) == (yaml.safe_load(text), [])


def test_an_alias_that_contains_itself():
    assert composed("a: &x [1, *x]\n")[1] == ["x.yaml:1: an alias contains itself"]


def test_what_is_not_yaml_names_its_line():
    value, problems = composed("a: 1\nb: [1, 2\nc: 3\n")
    assert value is None
    assert len(problems) == 1 and re.match(r"x\.yaml:3: not valid YAML: while parsing a flow sequence, ", problems[0])
    assert composed("a: 1\n\tb: 2\n")[1][0].startswith("x.yaml:2: not valid YAML: ")
    assert "another document" in composed("a: 1\n---\nb: 2\n")[1][0]


def test_unknown_tags_and_keys_that_are_no_words():
    assert composed("a: !thing 1\n")[1] == ["x.yaml:1: unknown tag !thing (the only custom tag is !include)"]
    assert composed("a: 1\n? [b, c]\n: 2\n")[1] == ["x.yaml:2: a key must be a scalar, not a list or a mapping"]
    assert composed("a:\n  <<: 5\n")[1] == ["x.yaml:2: `<<` takes a mapping or a list of mappings"]


def merge(base: object, over: object) -> object:
    return to_plain(merged(from_plain(base, HERE), from_plain(over, HERE)))


def test_mappings_merge_and_everything_else_replaces():
    assert merge({"a": {"x": 1, "y": 2}, "l": [1, 2], "s": 1}, {"a": {"y": 3, "z": 4}, "l": [3], "n": None}) == {
        "a": {"x": 1, "y": 3, "z": 4},
        "l": [3],
        "s": 1,
        "n": None,
    }
    assert merge({"a": {"x": 1}}, {"a": None}) == {"a": None}
    assert merge({"a": None}, {"a": {"x": 1}}) == {"a": {"x": 1}}


def test_another_type_replaces_the_whole_choice():
    base = {"model": {"type": "gpt2", "num_heads": 12}}
    assert merge(base, {"model": {"type": "llama", "x": 1}}) == {"model": {"type": "llama", "x": 1}}
    assert merge(base, {"model": {"type": "gpt2", "x": 1}}) == {"model": {"type": "gpt2", "num_heads": 12, "x": 1}}
    assert merge(base, {"model": {"x": 1}}) == {"model": {"type": "gpt2", "num_heads": 12, "x": 1}}


def test_marks_name_the_line_of_each_key():
    node = compose("a:\n  b: 1\n  c:\n    - 5\n", "f.yaml", [], lambda *_: None)
    assert isinstance(node, MapNode)
    entry = node.at(("a", "c"))
    assert entry is not None and str(entry.mark) == "f.yaml:3"
    assert str(entry.node.items[0].mark) == "f.yaml:4"  # type: ignore[union-attr]
    assert node.at(("a", "b", "c")) is None
