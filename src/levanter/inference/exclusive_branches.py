"""`oneOf` of a JSON schema as `anyOf`, where no value conforms to two of its branches.

A text is followed through `anyOf` token by token; that exactly one branch conforms is known only at the end of a text.
Where the branches exclude each other both mean the same: they have no type in common, or no constant, or no number, or
a required property whose constants differ, which is how pydantic writes discriminated unions.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import TypeAlias
from urllib.parse import unquote

_Constants: TypeAlias = frozenset[tuple[str, object]]
_TYPES = frozenset({"null", "boolean", "object", "array", "number", "string"})
_DATA = frozenset({"const", "enum", "default", "examples"})
"""Keys whose values are data, in which `oneOf` means nothing."""
MAX_BRANCHES = 100
"""Branches of one `oneOf` that are compared, each with each."""
_REFERENCES = 8
ADVICE = (
    "oneOf: a value may conform to several of its branches, which a text cannot be followed through; write anyOf, or "
    "give each branch a required property with a constant of its own"
)


def coerce_exclusive_branches(text: str) -> str:
    """A JSON schema with every `oneOf` whose branches exclude each other written as `anyOf`."""
    # A reference may lead through a list of branches, which must stay where it is then.
    if '"oneOf"' not in text or "/oneOf/" in text:
        return text
    schema = json.loads(text)
    # Below another `$id`, references are relative to that, so that none of them is followed then.
    has_resources = isinstance(schema, dict) and text.count('"$id"') > ("$id" in schema)
    return json.dumps(_rewritten(schema, None if has_resources else schema))


def _rewritten(part: object, root: object) -> object:
    if isinstance(part, list):
        return [_rewritten(item, root) for item in part]
    if not isinstance(part, dict):
        return part
    rewritten = {key: value if key in _DATA else _rewritten(value, root) for key, value in part.items()}
    branches = part.get("oneOf")
    # A property may have this name, and then its value is a schema and not a list of them.
    if not isinstance(branches, list) or not _are_exclusive(branches, root):
        return rewritten
    any_of = {"anyOf": rewritten.pop("oneOf")}
    # The keys of a schema all apply, and it has one `anyOf`.
    all_of = rewritten.get("allOf")
    both = [*(all_of if isinstance(all_of, list) else ()), any_of]
    return {**rewritten, **any_of} if "anyOf" not in part else {**rewritten, "allOf": both}


@dataclass(frozen=True, kw_only=True)
class _Values:
    """What is known of the values that conform to a schema: they are all within these bounds.

    Attributes:
        types: their types; whole numbers are numbers.
        constants: the scalars among which they are; None for any.
        low, high: the bounds of a number, both included.
        tags: constants of required properties, which apply to objects.
    """

    types: frozenset[str] = _TYPES
    constants: _Constants | None = None
    low: float = -math.inf
    high: float = math.inf
    tags: Mapping[str, _Constants] = field(default_factory=dict[str, _Constants])

    def excludes(self, other: "_Values") -> bool:
        """Whether no value is within the bounds of both."""
        if self.constants is not None and other.constants is not None:
            return not self.constants & other.constants
        common = self.types & other.types
        if "number" in common and (self.low > other.high or other.low > self.high):
            common = common - {"number"}
        if any(not self.tags[name] & other.tags[name] for name in self.tags if name in other.tags):
            common = common - {"object"}
        return not common

    def within(self, other: "_Values") -> "_Values":
        """The bounds of both."""
        constants = other.constants if self.constants is None else self.constants
        if self.constants is not None and other.constants is not None:
            constants = self.constants & other.constants
        tags = {**self.tags, **other.tags}
        for name in self.tags:
            tags[name] = self.tags[name] & other.tags.get(name, self.tags[name])
        return _Values(
            types=self.types & other.types,
            constants=constants,
            low=max(self.low, other.low),
            high=min(self.high, other.high),
            tags=tags,
        )


def _are_exclusive(branches: list[object], root: object) -> bool:
    if len(branches) > MAX_BRANCHES:
        return False
    values = [_values(branch, root, _REFERENCES) for branch in branches]
    return all(one.excludes(other) for one, other in combinations(values, 2))


def _values(schema: object, root: object, references: int) -> _Values:
    """Bounds of the values that conform to a schema; no bounds for what is not understood."""
    if not isinstance(schema, dict):
        return _Values()
    bounds = _Values(low=_limit(schema, "minimum", -math.inf), high=_limit(schema, "maximum", math.inf))
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds):
        # An unknown type is an error that is reported where the schema is compiled.
        types = frozenset("number" if kind == "integer" else kind for kind in kinds)
        bounds = bounds.within(_Values(types=types))
    stated = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(stated, list) and (constants := _scalars(stated)) is not None:
        bounds = bounds.within(_Values(constants=constants, types=frozenset(kind for kind, _ in constants)))
    properties, required = schema.get("properties"), schema.get("required")
    if references and isinstance(properties, dict) and isinstance(required, list):
        tags = {
            name: constants
            for name in required
            if isinstance(name, str) and name in properties
            if (constants := _values(properties[name], root, references - 1).constants) is not None
        }
        bounds = bounds.within(_Values(tags=tags))
    schemas = schema.get("allOf")
    if references and isinstance(schemas, list):
        for member in schemas:
            bounds = bounds.within(_values(member, root, references - 1))
    if references and isinstance(reference := schema.get("$ref"), str):
        bounds = bounds.within(_values(_referred(root, reference), root, references - 1))
    return bounds


def _limit(schema: Mapping[str, object], key: str, default: float) -> float:
    value = schema.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default


def _scalars(values: list[object]) -> _Constants | None:
    """Constants with their types, so that 1 is 1.0 and not true; None if one of them is a list or an object."""
    kinds = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string"}
    if any(type(value) not in kinds for value in values):
        return None
    return frozenset((kinds[type(value)], value) for value in values)


def _referred(root: object, reference: str) -> object:
    """The schema that a reference within its document points to; None for another reference, or for none."""
    if not reference.startswith("#"):
        return None
    part = root
    for name in reference[1:].split("/")[1:]:
        # RFC 6901 in a fragment: percent signs first, then the escapes of the pointer.
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if not isinstance(part, dict) or name not in part:
            return None
        part = part[name]
    return part if reference.startswith("#/") or reference == "#" else None
