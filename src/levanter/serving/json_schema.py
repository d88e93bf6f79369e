"""JSON schemas of types: of the dataclasses that requests are decoded by, and of the dictionaries that answers are.

Descriptions are the docstrings' own; bounds are the ranges in annotations.
"""

import dataclasses
import inspect
import re
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from levanter.base.bounded_json import Json
from levanter.config.validators import Range

_ENTRY = re.compile(r"^    ([a-z_]+(?:, [a-z_]+)*): (.*)$")
_MAPPING = get_origin(Mapping[str, object])
_SCALARS: Mapping[object, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}


def field_descriptions(cls: type) -> Mapping[str, str]:
    """What the docstring of a class says of its fields."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in inspect.cleandoc(cls.__doc__ or "").splitlines():
        if (match := _ENTRY.match(line)) is not None:
            names = match[1].split(", ")
            found |= dict.fromkeys(names, match[2])
        elif names and line.startswith("        "):
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
        else:
            names = []
    return found


def type_schema(hint: object) -> dict[str, Json]:
    """The JSON schema of a type; classes by reference."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is NotRequired:
        return type_schema(args[0])
    if origin is Annotated:
        return {**type_schema(args[0]), **_range_bounds(args[1:])}
    if origin in (Union, types.UnionType):
        several: list[Json] = [{"type": "null"} if one is type(None) else type_schema(one) for one in args]
        return {"anyOf": several}
    if origin is Literal:
        return {"enum": list(args)}
    if origin is tuple:
        return {"type": "array", "items": type_schema(args[0])}
    if origin is _MAPPING:
        return {"type": "object", "additionalProperties": type_schema(args[1])}
    if isinstance(hint, type) and _has_fields(hint):
        return {"$ref": f"#/components/schemas/{hint.__name__}"}
    if hint is None or hint is type(None):
        return {"type": "null"}
    return {"type": _SCALARS[hint]} if hint in _SCALARS else {}


def object_schema(cls: type, *, beside: Mapping[str, Json] | None = None) -> dict[str, Json]:
    """The schema of a class's objects: all of its fields and no others.

    Args:
        cls: the class.
        beside: further properties.
    """
    required: list[Json] = [*sorted(_required_fields(cls))]
    return {
        "type": "object",
        "description": inspect.cleandoc(cls.__doc__ or "").split("\n", 1)[0],
        "properties": {**(beside or {}), **property_schemas(cls)},
        "required": required,
        "additionalProperties": False,
    }


def property_schemas(cls: type, *, without: frozenset[str] = frozenset()) -> dict[str, Json]:
    """The properties of a class's objects; what has a default may be null.

    Args:
        cls: the class.
        without: fields that are left out.
    """
    hints, said = get_type_hints(cls, include_extras=True), field_descriptions(cls)
    found: dict[str, Json] = {}
    for name in _field_names(cls):
        if name in without:
            continue
        own = type_schema(hints[name])
        if (
            dataclasses.is_dataclass(cls)
            and name not in _required_fields(cls)
            and {"type": "null"} not in _alternatives(own)
        ):
            own = {"anyOf": [own, {"type": "null"}]}
        found[name] = {**own, "description": said.get(name, "")}
    return found


def add_schemas(cls: type, found: dict[str, Json]) -> None:
    """Adds the schema of a class, and of those that its fields are made of, by their names.

    Args:
        cls: the class.
        found: schemas so far; what is there stays.
    """
    found.setdefault(cls.__name__, object_schema(cls))
    for hint in get_type_hints(cls).values():
        for part in _field_classes(hint):
            if part.__name__ not in found:
                add_schemas(part, found)


def _field_classes(hint: object) -> Iterator[type]:
    if isinstance(hint, type) and _has_fields(hint):
        yield hint
    for one in get_args(hint):
        yield from _field_classes(one)


def _has_fields(cls: type) -> bool:
    return dataclasses.is_dataclass(cls) or is_typeddict(cls)


def _field_names(cls: type) -> tuple[str, ...]:
    return (
        tuple(each.name for each in dataclasses.fields(cls))
        if dataclasses.is_dataclass(cls)
        else (*get_type_hints(cls),)
    )


def _required_fields(cls: type) -> frozenset[str]:
    if not dataclasses.is_dataclass(cls):
        return frozenset(getattr(cls, "__required_keys__"))  # noqa: B009 - a type checker knows no such attribute
    missing = dataclasses.MISSING
    fields = dataclasses.fields(cls)
    return frozenset(each.name for each in fields if each.default is missing and each.default_factory is missing)


def _alternatives(schema: dict[str, Json]) -> list[Json]:
    several = schema.get("anyOf")
    return several if isinstance(several, list) else []


def _range_bounds(extras: tuple[object, ...]) -> dict[str, Json]:
    for each in extras:
        if isinstance(each, Range):
            low = min((each.low, *each.also))
            return {"exclusiveMinimum" if each.above else "minimum": low, "maximum": each.high}
    return {}
