"""`/openapi.json`: the interface as a document, made of the dataclasses that requests are decoded by.

Descriptions are the docstrings' own; bounds of sampling parameters are the ranges in their annotations.
"""

import dataclasses
import inspect
import re
import types
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

from levanter.config.ranges import Range
from levanter.inference import formats
from levanter.inference.params import MOST_BIASES, MOST_STOP_IDS, MOST_STOPS, SamplingParams
from levanter.io.values import Json
from levanter.serving.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, TokensBody

_ENTRY = re.compile(r"^    ([a-z_]+(?:, [a-z_]+)*): (.*)$")
_MAPPING = get_origin(Mapping[str, object])
_SCALARS: Mapping[object, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
_MOST: Mapping[str, int] = {"stop": MOST_STOPS, "stop_token_ids": MOST_STOP_IDS, "logit_bias": MOST_BIASES}
_NOT_OF_A_CONVERSATION = frozenset({"echo", "logprobs"})


def described(cls: type) -> Mapping[str, str]:
    """What the docstring of a dataclass says of its fields."""
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


def schema_of(hint: object) -> dict[str, Json]:
    """The JSON schema of a type; dataclasses by reference."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return {**schema_of(args[0]), **_bounds(args[1:])}
    if origin in (Union, types.UnionType):
        several: list[Json] = [{"type": "null"} if one is type(None) else schema_of(one) for one in args]
        return {"anyOf": several}
    if origin is Literal:
        return {"enum": list(args)}
    if origin is tuple:
        return {"type": "array", "items": schema_of(args[0])}
    if origin is _MAPPING:
        return {"type": "object", "additionalProperties": schema_of(args[1])}
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return {"$ref": f"#/components/schemas/{hint.__name__}"}
    return {"type": _SCALARS[hint]} if hint in _SCALARS else {}


def _bounds(extras: tuple[object, ...]) -> dict[str, Json]:
    for each in extras:
        if isinstance(each, Range):
            low = min((each.low, *each.also))
            return {"exclusiveMinimum" if each.above else "minimum": low, "maximum": each.high}
    return {}


def _fields(cls: type, *, without: frozenset[str] = frozenset()) -> dict[str, Json]:
    """The properties of a dataclass; what has a default may be null."""
    hints, said = get_type_hints(cls, include_extras=True), described(cls)
    found: dict[str, Json] = {}
    for each in dataclasses.fields(cls):
        if each.name in without:
            continue
        own = schema_of(hints[each.name])
        if not _is_required(each) and {"type": "null"} not in _several(own):
            own = {"anyOf": [own, {"type": "null"}]}
        found[each.name] = {**own, "description": said.get(each.name, "")}
    return found


def _several(schema: dict[str, Json]) -> list[Json]:
    several = schema.get("anyOf")
    return several if isinstance(several, list) else []


def _is_required(each: "dataclasses.Field[object]") -> bool:
    return each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING


def _object(cls: type, *, beside: Mapping[str, Json] | None = None) -> dict[str, Json]:
    required: list[Json] = [each.name for each in dataclasses.fields(cls) if _is_required(each)]
    return {
        "type": "object",
        "description": inspect.cleandoc(cls.__doc__ or "").split("\n", 1)[0],
        "properties": {**(beside or {}), **_fields(cls)},
        "required": required,
        "additionalProperties": False,
    }


def _sampling(without: frozenset[str]) -> dict[str, Json]:
    """The fields of `SamplingParams`, as a JSON object has them."""
    found = _fields(SamplingParams, without=without)
    bias: Json = {"type": "number", "minimum": -100, "maximum": 100}
    written: dict[str, dict[str, Json]] = {
        "stop": {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": _MOST["stop"]},
                {"type": "null"},
            ]
        },
        "stop_token_ids": {
            "anyOf": [
                {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": _MOST["stop_token_ids"]},
                {"type": "null"},
            ]
        },
        "logit_bias": {
            "anyOf": [
                {"type": "object", "additionalProperties": bias, "maxProperties": _MOST["logit_bias"]},
                {"type": "null"},
            ]
        },
    }
    said = described(SamplingParams)
    for name, schema in written.items():
        found[name] = {**schema, "description": said[name]}
    return found


def _formats() -> dict[str, Json]:
    """The fields that say what a text conforms to."""
    found: dict[str, Json] = {}
    for name in formats.FIELDS:
        kind = "boolean" if name == "json_object" else "string" if name in ("regex", "grammar") else "object"
        found[name] = {"anyOf": [{"type": kind}, {"type": "null"}], "description": "What the text conforms to."}
    return found


def _referenced(cls: type, found: dict[str, Json]) -> None:
    """Adds a dataclass, and those that its fields are made of."""

    def visit(hint: object) -> None:
        if isinstance(hint, type) and dataclasses.is_dataclass(hint) and hint.__name__ not in found:
            found[hint.__name__] = _object(hint)
            _referenced(hint, found)
        for one in get_args(hint):
            visit(one)

    for hint in get_type_hints(cls).values():
        visit(hint)


@cache
def schemas() -> dict[str, Json]:
    """The schemas of all bodies, by name."""
    found: dict[str, Json] = {}
    for cls in (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody, TokensBody):
        beside: dict[str, Json] = {}
        if cls in (CompletionBody, ChatBody):
            without = _NOT_OF_A_CONVERSATION if cls is ChatBody else frozenset[str]()
            beside = _sampling(without) | _formats()
        found[cls.__name__] = _object(cls, beside=beside)
        _referenced(cls, found)
    found["Error"] = {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
                "required": ["message", "type", "param", "code"],
            }
        },
        "required": ["error"],
    }
    return found


_ASKED: Mapping[str, tuple[type, str]] = {
    "/v1/completions": (CompletionBody, "Texts that are gone on with."),
    "/v1/chat/completions": (ChatBody, "The next message of a conversation."),
    "/v1/tokens": (TokensBody, "The tokens of conversations."),
    "/tokenize": (TokenizeBody, "The tokens of a text or of a conversation."),
    "/detokenize": (DetokenizeBody, "The text of tokens."),
}
_READ: Mapping[str, str] = {
    "/v1/models": "The model that is served, by all its names.",
    "/tokenizer_info": "What clients that make tokens themselves want to know.",
    "/health": "Whether the engine runs.",
    "/ready": "Whether requests are taken.",
}


def document(version: str) -> dict[str, Json]:
    """The interface as OpenAPI 3.1 has it.

    Args:
        version: of the program.
    """
    error: Json = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    paths: dict[str, Json] = {}

    def answers(*codes: str) -> dict[str, Json]:
        said = {"description": "what is wrong, and with which field"}
        fine: dict[str, Json] = {"description": "the answer", "content": {"application/json": {"schema": {}}}}
        bad: Json = {**said, **error} if isinstance(error, dict) else said
        return {"200": fine, **dict.fromkeys(codes, bad)}

    for path, (cls, summary) in _ASKED.items():
        body: Json = {"schema": {"$ref": f"#/components/schemas/{cls.__name__}"}}
        codes = ("400", "401", "404", "413", "429", "503")
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": {"application/json": body}},
                "responses": answers(*codes),
            }
        }
    for path, summary in _READ.items():
        paths[path] = {"get": {"summary": summary, "responses": answers("401", "503")}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Levanter", "version": version},
        "paths": paths,
        "components": {"schemas": schemas()},
    }
