"""JSON schemas of dataclasses (requests) and typed dictionaries (responses).

Descriptions come from docstrings, bounds from the `Range` in annotations.
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
    """The descriptions of fields in the docstring of a class: the entries below `Attributes:`."""
    descriptions: dict[str, str] = {}
    names: list[str] = []
    for line in inspect.cleandoc(cls.__doc__ or "").splitlines():
        if (match := _ENTRY.match(line)) is not None:
            names = match[1].split(", ")
            descriptions |= dict.fromkeys(names, match[2])
        # A description continues on lines that are indented further.
        elif names and line.startswith("        "):
            descriptions |= {name: f"{descriptions[name]} {line.strip()}" for name in names}
        else:
            names = []
    return descriptions


def type_schema(hint: object) -> dict[str, Json]:
    """The JSON schema of a type; a class becomes a reference."""
    origin, args = get_origin(hint), get_args(hint)
    # Whether a field is required is not part of its type; `_required_fields` knows.
    if origin is NotRequired:
        return type_schema(args[0])
    if origin is Annotated:
        return {**type_schema(args[0]), **_range_bounds(args[1:])}
    if origin in (Union, types.UnionType):
        members: list[Json] = [{"type": "null"} if one is type(None) else type_schema(one) for one in args]
        return {"anyOf": members}
    if origin is Literal:
        return {"enum": list(args)}
    if origin is tuple:
        return {"type": "array", "items": type_schema(args[0])}
    if origin is _MAPPING:
        return {"type": "object", "additionalProperties": type_schema(args[1])}
    if isinstance(hint, type) and _has_fields(hint):
        # A reference: classes are listed once under `components`, and may refer to each other.
        return {"$ref": f"#/components/schemas/{hint.__name__}"}
    if hint is None or hint is type(None):
        return {"type": "null"}
    # `object` and other types have no restriction.
    return {"type": _SCALARS[hint]} if hint in _SCALARS else {}


def object_schema(cls: type, *, more: Mapping[str, Json] | None = None) -> dict[str, Json]:
    """The schema of a class: all of its fields and no others.

    Args:
        cls: the class.
        more: further properties.
    """
    required: list[Json] = [*sorted(_required_fields(cls))]
    return {
        "type": "object",
        "description": inspect.cleandoc(cls.__doc__ or "").split("\n", 1)[0],
        "properties": {**(more or {}), **property_schemas(cls)},
        "required": required,
        "additionalProperties": False,
    }


def property_schemas(cls: type, *, without: frozenset[str] = frozenset()) -> dict[str, Json]:
    """The schemas of the fields of a class; a field with a default may be null.

    Args:
        cls: the class.
        without: fields that are omitted.
    """
    # `include_extras` keeps `Annotated`, whose `Range` becomes bounds.
    hints, descriptions = get_type_hints(cls, include_extras=True), field_descriptions(cls)
    properties: dict[str, Json] = {}
    for name in _field_names(cls):
        if name in without:
            continue
        # `decode` takes null for any field that has a default.
        schema = type_schema(hints[name])
        if (
            dataclasses.is_dataclass(cls)
            and name not in _required_fields(cls)
            and {"type": "null"} not in _alternatives(schema)
        ):
            schema = {"anyOf": [schema, {"type": "null"}]}
        properties[name] = {**schema, "description": descriptions.get(name, "")}
    return properties


def add_schemas(cls: type, components: dict[str, Json]) -> None:
    """Adds the schemas of a class and of the classes in its fields, by name.

    Args:
        cls: the class.
        components: schemas so far; existing ones are kept.
    """
    # Set before the fields are followed, so that a class that refers to itself ends the recursion.
    components.setdefault(cls.__name__, object_schema(cls))
    for hint in get_type_hints(cls).values():
        for field_class in _field_classes(hint):
            if field_class.__name__ not in components:
                add_schemas(field_class, components)


def _field_classes(hint: object) -> Iterator[type]:
    if isinstance(hint, type) and _has_fields(hint):
        yield hint
    for argument in get_args(hint):
        yield from _field_classes(argument)


def _has_fields(cls: type) -> bool:
    return dataclasses.is_dataclass(cls) or is_typeddict(cls)


def _field_names(cls: type) -> tuple[str, ...]:
    return (
        tuple(field.name for field in dataclasses.fields(cls))
        if dataclasses.is_dataclass(cls)
        else (*get_type_hints(cls),)
    )


def _required_fields(cls: type) -> frozenset[str]:
    if not dataclasses.is_dataclass(cls):
        return frozenset(getattr(cls, "__required_keys__"))  # noqa: B009 - a type checker knows no such attribute
    missing = dataclasses.MISSING
    fields = dataclasses.fields(cls)
    return frozenset(field.name for field in fields if field.default is missing and field.default_factory is missing)


def _alternatives(schema: dict[str, Json]) -> list[Json]:
    members = schema.get("anyOf")
    return members if isinstance(members, list) else []


def _range_bounds(extras: tuple[object, ...]) -> dict[str, Json]:
    for extra in extras:
        if isinstance(extra, Range):
            # Single values outside of the range (-1 for all) widen the bound: JSON schema has no simple form for them.
            low = min((extra.low, *extra.also))
            return {"exclusiveMinimum" if extra.above else "minimum": low, "maximum": extra.high}
    return {}
