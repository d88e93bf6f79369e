"""`json_schema`: whether the answer is JSON that a schema describes.

JSON is read strictly: one value, no key twice, no NaN. Of schemas, the keywords are supported that constrain a value by
itself; others are refused when the run is described, because a keyword that is ignored rewards what it forbids.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from levanter.base.bounded_json import Json, parse_json
from levanter.base.input_limits import OutOfBoundsError
from levanter.rewards.choice import Judge, Reward, RewardConfig, RewardInput

ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$schema", "$id", "$comment"})
_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "null": lambda x: x is None,
    "boolean": lambda x: isinstance(x, bool),
    "number": lambda x: isinstance(x, int | float) and not isinstance(x, bool),
    # 1.0 is an integer in JSON Schema.
    "integer": lambda x: isinstance(x, int | float) and not isinstance(x, bool) and x == x // 1,
    "string": lambda x: isinstance(x, str),
    "array": lambda x: isinstance(x, list),
    "object": lambda x: isinstance(x, dict),
}


def _same(a: Json, b: Json) -> bool:
    """Equality of JSON: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return a == b


def _bound(kind: str, compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any, Any], bool]:
    """A keyword about values of one type; values of other types satisfy it."""
    return lambda value, limit, _: not _TYPES[kind](value) or compare(value, limit)


def _properties(value: Json, schemas: Mapping[str, Json], _: object) -> bool:
    return not isinstance(value, dict) or all(matches(value[key], schemas[key]) for key in schemas if key in value)


def _additional(value: Json, schema: Json, parent: Mapping[str, Mapping[str, Json]]) -> bool:
    if not isinstance(value, dict):
        return True
    others = value.keys() - parent.get("properties", {}).keys()
    return all(matches(value[key], schema) for key in others)


# Every keyword constrains values of its type and is satisfied by all others: {"minimum": 1} describes texts too.
_KEYWORDS: Mapping[str, Callable[[Any, Any, Any], bool]] = {
    "type": lambda value, types, _: any(_TYPES[t](value) for t in ([types] if isinstance(types, str) else types)),
    "enum": lambda value, values, _: any(_same(value, other) for other in values),
    "const": lambda value, other, _: _same(value, other),
    "properties": _properties,
    "additionalProperties": _additional,
    "required": _bound("object", lambda value, keys: all(key in value for key in keys)),
    "items": _bound("array", lambda value, schema: all(matches(item, schema) for item in value)),
    "minItems": _bound("array", lambda value, least: len(value) >= least),
    "maxItems": _bound("array", lambda value, most: len(value) <= most),
    "minLength": _bound("string", lambda value, least: len(value) >= least),
    "maxLength": _bound("string", lambda value, most: len(value) <= most),
    "minimum": _bound("number", lambda value, least: value >= least),
    "maximum": _bound("number", lambda value, most: value <= most),
    "exclusiveMinimum": _bound("number", lambda value, below: value > below),
    "exclusiveMaximum": _bound("number", lambda value, above: value < above),
    "anyOf": lambda value, schemas, _: any(matches(value, schema) for schema in schemas),
    "allOf": lambda value, schemas, _: all(matches(value, schema) for schema in schemas),
    "oneOf": lambda value, schemas, _: sum(matches(value, schema) for schema in schemas) == 1,
    "not": lambda value, schema, _: not matches(value, schema),
}
_SHAPES: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("enum", "required", "anyOf", "allOf", "oneOf"), list),
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength"), int),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), (int, float)),
    "properties": dict,
    "type": (str, list),
}


def matches(value: Json, schema: Json) -> bool:
    """Whether a schema without problems describes a value."""
    if isinstance(schema, bool):
        return schema
    assert isinstance(schema, dict), schema
    return all(_KEYWORDS[key](value, schema[key], schema) for key in schema if key not in ANNOTATIONS)


def schema_problems(schema: object, path: str = "schema") -> list[str]:
    """What is not supported in a schema, by path."""
    if isinstance(schema, bool):
        return []
    if not isinstance(schema, dict):
        return [f"{path}: {str(schema)[:60]!r}, expected a JSON schema: keys and values"]
    problems = []
    for key, value in schema.items():
        where = f"{path}.{key}"
        # They say something to the reader, and constrain nothing.
        if key in ANNOTATIONS:
            continue
        if key not in _KEYWORDS:
            problems.append(f"{where}: not supported; supported are {', '.join(sorted(_KEYWORDS))}")
        # true is an int for Python, and no number for JSON.
        elif key in _SHAPES and (not isinstance(value, _SHAPES[key]) or isinstance(value, bool)):
            problems.append(f"{where}: {str(value)[:60]!r} is of the wrong type")
        elif key == "type":
            names = [value] if isinstance(value, str) else value
            problems += [f"{where}: {n!r}, expected one of {', '.join(_TYPES)}" for n in names if n not in _TYPES]
        elif key in ("anyOf", "allOf", "oneOf"):
            problems += [problem for n, part in enumerate(value) for problem in schema_problems(part, f"{where}[{n}]")]
        elif key == "properties":
            problems += [problem for k, part in value.items() for problem in schema_problems(part, f"{where}.{k}")]
        elif key in ("items", "additionalProperties", "not"):
            problems += schema_problems(value, where)
    return problems


@RewardConfig.register_subclass("json_schema")
@dataclass(frozen=True, kw_only=True)
class JsonSchemaRewardConfig(RewardConfig):
    """1 if the answer is JSON that the schema describes, else 0.

    Attributes:
        schema: a JSON schema; any JSON object by default.
    """

    schema: dict[str, Any] = field(default_factory=lambda: {"type": "object"})

    def problems(self) -> Sequence[str]:
        """See `RewardConfig.problems`."""
        return schema_problems(self.schema)

    def open(self) -> Reward:
        """See `RewardConfig.open`."""
        return Judge(self._value)

    def _value(self, sample: RewardInput) -> float:
        try:
            value = parse_json(sample.answer, object_pairs_hook=_object)
        except (json.JSONDecodeError, OutOfBoundsError, _NotStrictError):
            return 0.0
        return float(_is_finite(value) and matches(value, self.schema))


class _NotStrictError(ValueError):
    """An object with a key twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise _NotStrictError
    return dict(pairs)


def _is_finite(value: Json) -> bool:
    """Whether no number is NaN or infinite, which Python reads and JSON does not have."""
    if isinstance(value, float):
        # NaN − NaN and ∞ − ∞ are NaN, which equals nothing.
        return value - value == 0
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(map(_is_finite, inner))
