"""What a request asks its text to conform to, in the words of several interfaces, as one `ConstraintSpec`.

`json_object`, `json_schema`, `regex` and `grammar` are ours; `response_format` is OpenAI's. All are checked for what
they are made of here; whether a schema or a grammar means anything, says whoever follows it (`inference.constraint`).
"""

import json
from collections.abc import Mapping

from levanter.config.errors import did_you_mean
from levanter.inference.requests import ConstraintKind, ConstraintSpec

KINDS: tuple[ConstraintKind, ...] = ("json_object", "json_schema", "regex", "grammar")
RESPONSE_FORMAT = "response_format"
FIELDS = (*KINDS, RESPONSE_FORMAT)
"""The fields of a request that this is about."""
_TYPES = ("text", "json_object", "json_schema")


def constraint_of(value: Mapping[str, object], problems: list[str]) -> ConstraintSpec | None:
    """What the fields of a request ask for; None for nothing.

    Args:
        value: the request's fields.
        problems: what is wrong with them is added here.
    """
    given: list[str] = [kind for kind in FIELDS if value.get(kind) not in (None, False)]
    if len(given) > 1:
        problems.append(f"{' and '.join(given)}: a text can conform to one of them")
    if len(given) != 1:
        return None
    if given[0] == RESPONSE_FORMAT:
        return _response_format(value[RESPONSE_FORMAT], problems)
    kind: ConstraintKind = next(each for each in KINDS if each == given[0])
    wanted = value[kind]
    if kind == "json_object":
        if wanted is not True:
            problems.append("json_object: expected true or false")
        return ConstraintSpec(kind="json_object")
    if kind == "json_schema":
        return _schema(wanted, "json_schema", problems)
    if not isinstance(wanted, str) or not wanted:
        problems.append(f"{kind}: expected a string that is not empty")
        return None
    return ConstraintSpec(kind=kind, text=wanted)


def _response_format(wanted: object, problems: list[str]) -> ConstraintSpec | None:
    """OpenAI's `{"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}`, or one of the simpler types."""
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if not isinstance(wanted, dict) or kind not in _TYPES:
        problems.append(f"response_format: expected an object with `type`, one of {', '.join(_TYPES)}")
        return None
    beside = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    for name in sorted(set(wanted) - beside):
        problems.append(f"response_format.{name}: not known{did_you_mean(name, sorted(beside))}")
    if kind == "text":
        return None
    if kind == "json_object":
        return ConstraintSpec(kind="json_object")
    inner = wanted.get("json_schema")
    if not isinstance(inner, dict):
        problems.append("response_format.json_schema: expected an object with `schema`")
        return None
    for name in sorted(set(inner) - _OF_SCHEMA):
        problems.append(f"response_format.json_schema.{name}: not known{did_you_mean(name, sorted(_OF_SCHEMA))}")
    for name, kind in _BESIDE_SCHEMA.items():
        if not isinstance(inner.get(name), kind | None):
            said = "a string" if kind is str else "true or false"
            problems.append(f"response_format.json_schema.{name}: expected {said}")
    return _schema(inner.get("schema"), "response_format.json_schema.schema", problems)


_BESIDE_SCHEMA: Mapping[str, type] = {"name": str, "description": str, "strict": bool}
"""What OpenAI's `json_schema` has beside the schema. Every schema is followed to the letter, so `strict` says nothing
new."""
_OF_SCHEMA = frozenset({"schema", *_BESIDE_SCHEMA})


def _schema(wanted: object, where: str, problems: list[str]) -> ConstraintSpec | None:
    if not isinstance(wanted, dict):
        problems.append(f"{where}: expected an object")
        return None
    try:
        return ConstraintSpec(kind="json_schema", text=json.dumps(wanted, allow_nan=False))
    except ValueError:
        problems.append(f"{where}: NaN and infinity are no JSON")
        return None
