"""What a JSON text consists of, counted in its bytes, against the same counted in its value."""

import json
import random
import re

import pytest

from levanter.base.input_limits import OutOfBoundsError
from levanter.io import json_shape as module
from levanter.io.json_shape import SMALL_BYTES, JsonLimits, JsonShape, json_shape
from levanter.serving.request_parsing import ProtocolError, parse_object

pytestmark = pytest.mark.quick

LIMITS = JsonLimits(numbers=1_000, others=500, string_bytes=100_000)


def counted(value: object, depth: int = 0) -> tuple[int, int, int]:
    """Numbers, other values and names, and depth of a value."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return 0, 1, depth
    if isinstance(value, int | float):
        return 1, 0, depth
    items = list(value.values()) if isinstance(value, dict) else value
    numbers, others, deepest = 0, 1 + (len(value) if isinstance(value, dict) else 0), depth + 1
    for item in items:
        more, different, below = counted(item, depth + 1)
        numbers, others, deepest = numbers + more, others + different, max(deepest, below)
    return numbers, others, deepest


def drawn(rng: random.Random, depth: int = 0) -> object:
    kind = rng.random()
    if depth > 5 or kind < 0.25:
        return rng.choice([1, -3, 1.5e9, 1e-5, True, False, None, 0])
    if kind < 0.5:
        pieces = ["a", "\\", '"', "[", ",", "é", "{", "1", "\n", ":", "true", "\\\\", '\\"']
        return "".join(rng.choice(pieces) for _ in range(rng.randrange(12)))
    if kind < 0.75:
        return [drawn(rng, depth + 1) for _ in range(rng.randrange(5))]
    return {
        "".join(rng.choice('a"\\:1') for _ in range(4)) + str(n): drawn(rng, depth + 1) for n in range(rng.randrange(5))
    }


def expected(value: object, raw: bytes) -> JsonShape:
    string = rb'"(?:[^"\\]|\\.)*"'
    numbers, others, depth = counted(value)
    # Nothing in an empty list stands behind its bracket: the count takes it for a number there.
    empty = len(re.findall(rb"\[\s*\]|\{\s*\}", re.sub(string, b'""', raw)))
    longest = max((len(one) - 2 for one in re.findall(string, raw)), default=0)
    return JsonShape(numbers=numbers + empty, others=others, longest_string=longest, depth=depth)


@pytest.mark.parametrize("window", [1, 2, 3, 7, 64, 1 << 19])
def test_counts_are_those_of_the_value(monkeypatch, window):
    monkeypatch.setattr(module, "WINDOW_BYTES", window)
    for seed in range(60):
        rng = random.Random(f"{window}/{seed}")
        value = drawn(rng)
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1]))
        assert json_shape(text.encode()) == expected(value, text.encode()), text


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"a": [' + b"[]," * 40_000 + b"1]}", "500 strings, lists, objects and literals"),
        (b'{"a": [' + b'"b",' * 40_000 + b"1]}", "500 strings"),
        (b'{"a": [' + b"null," * 40_000 + b"1]}", "500 strings"),
        (b'{"a": [' + b"7," * 60_000 + b"1]}", "1,000 numbers"),
        (b'{"a": "' + b"x" * 200_000 + b'"}', "a string of more than 100,000 bytes"),
        (b'{"a": "' + b'\\"' * 100_000, "a string of more than 100,000 bytes"),
        (b'{"a": ' + b"[" * 70_000, "256 lists and objects inside one another"),
    ],
)
def test_a_large_body_is_refused_before_it_is_read(monkeypatch, body, said):
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("the body was read"))
    with pytest.raises(OutOfBoundsError, match=said):
        parse_object(body, LIMITS)


def test_a_large_body_within_the_limits_is_read_as_a_small_one():
    value = {"ids": list(range(900)), "text": "é,[{" * 20_000, "more": [1.5, -2e3, True, None, {"a": "b"}]}
    raw = json.dumps(value).encode()
    limits = JsonLimits(numbers=1_000, others=500, string_bytes=1_000_000)
    assert len(raw) > SMALL_BYTES and parse_object(raw, limits) == value
    for number in (b"9" * 5_000, b"1." + b"9" * 5_000):
        with pytest.raises(ProtocolError, match="a number is longer than the limit"):
            parse_object(raw[:-1] + b', "x": ' + number + b"}", limits)
