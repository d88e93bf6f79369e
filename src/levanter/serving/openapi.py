"""`/openapi.json`: the interface as a document, made of the classes that requests are decoded by and answers look like.

Every status that a path may answer with is in it. A path that the server does not have is answered by 404, and a method
that a path does not have by 405, both with an `Error`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from levanter.base.bounded_json import Json
from levanter.inference.prompts import CONSTRAINT_FIELDS, RESPONSE_FORMAT
from levanter.inference.requests import MAX_BIASES, MAX_STOP_IDS, MAX_STOPS, SamplingParams
from levanter.serving import metrics, response_schema
from levanter.serving.json_schema import add_schemas, field_descriptions, object_schema, property_schemas, type_schema
from levanter.serving.request_schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, TokensBody
from levanter.serving.responses import SSE_MEDIA_TYPE

_MAX_ITEMS: Mapping[str, int] = {"stop": MAX_STOPS, "stop_token_ids": MAX_STOP_IDS, "logit_bias": MAX_BIASES}
_NOT_IN_CHAT = frozenset({"echo", "logprobs"})


def _sampling_schemas(without: frozenset[str]) -> dict[str, Json]:
    """The fields of `SamplingParams`, as a JSON object has them."""
    found = property_schemas(SamplingParams, without=without)
    bias: Json = {"type": "number", "minimum": -100, "maximum": 100}
    written: dict[str, dict[str, Json]] = {
        "stop": {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": _MAX_ITEMS["stop"]},
                {"type": "null"},
            ]
        },
        "stop_token_ids": {
            "anyOf": [
                {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": _MAX_ITEMS["stop_token_ids"]},
                {"type": "null"},
            ]
        },
        "logit_bias": {
            "anyOf": [
                {"type": "object", "additionalProperties": bias, "maxProperties": _MAX_ITEMS["logit_bias"]},
                {"type": "null"},
            ]
        },
    }
    said = field_descriptions(SamplingParams)
    for name, schema in written.items():
        found[name] = {**schema, "description": said[name]}
    return found


def _constraint_schemas() -> dict[str, Json]:
    """The fields that say what a text conforms to."""
    found: dict[str, Json] = {}
    for name in CONSTRAINT_FIELDS:
        kind = "boolean" if name == "json_object" else "string" if name in ("regex", "grammar") else "object"
        found[name] = {"anyOf": [{"type": kind}, {"type": "null"}], "description": "What the text conforms to."}
    found[RESPONSE_FORMAT] = {
        "anyOf": [
            _strict({"type": {"enum": ["text", "json_object"]}}, "type"),
            _strict({"type": {"const": "json_schema"}, "json_schema": _NAMED_SCHEMA}, "type", "json_schema"),
            {"type": "null"},
        ],
        "description": "What the text conforms to, as OpenAI's clients say it.",
    }
    return found


def _strict(properties: Mapping[str, Json], *required: str) -> dict[str, Json]:
    """The schema of an object that has these fields and no others."""
    names: list[Json] = [*required]
    return {"type": "object", "properties": dict(properties), "required": names, "additionalProperties": False}


_NAMED_SCHEMA = _strict(
    {
        "name": {"type": ["string", "null"]},
        "description": {"type": ["string", "null"]},
        "schema": {"type": "object"},
        "strict": {"type": ["boolean", "null"]},
    },
    "schema",
)


@cache
def schemas() -> dict[str, Json]:
    """The schemas of all bodies and answers, by name."""
    found: dict[str, Json] = {}
    for asked in _POST_ROUTES:
        beside: dict[str, Json] = {}
        if asked.body in (CompletionBody, ChatBody):
            without = _NOT_IN_CHAT if asked.body is ChatBody else frozenset[str]()
            beside = _sampling_schemas(without) | _constraint_schemas()
        found[asked.body.__name__] = object_schema(asked.body, beside=beside)
        add_schemas(asked.body, found)
        add_schemas(asked.answer, found)
    for read in _GET_ROUTES:
        if isinstance(read.answer, type):
            add_schemas(read.answer, found)
    add_schemas(response_schema.Error, found)
    return found


@dataclass(frozen=True, kw_only=True)
class _PostRoute:
    """A path that is sent an object."""

    path: str
    body: type
    answer: type
    summary: str
    streams: bool = False


@dataclass(frozen=True, kw_only=True)
class _GetRoute:
    """A path that is only read. `answer` is an object's class, or the media type of what is none."""

    path: str
    answer: type | str
    summary: str
    unwell: bool = False
    """Whether it answers 503 with an object of the same kind."""


_POST_ROUTES = (
    _PostRoute(
        path="/v1/completions",
        body=CompletionBody,
        answer=response_schema.CompletionResponse,
        summary="Texts that are gone on with.",
        streams=True,
    ),
    _PostRoute(
        path="/v1/chat/completions",
        body=ChatBody,
        answer=response_schema.ChatResponse,
        summary="The next message of a conversation.",
        streams=True,
    ),
    _PostRoute(
        path="/v1/tokens", body=TokensBody, answer=response_schema.Conversations, summary="The tokens of conversations."
    ),
    _PostRoute(
        path="/tokenize",
        body=TokenizeBody,
        answer=response_schema.Tokenized,
        summary="The tokens of a text or of a conversation.",
    ),
    _PostRoute(
        path="/detokenize", body=DetokenizeBody, answer=response_schema.Detokenized, summary="The text of tokens."
    ),
)
_GET_ROUTES = (
    _GetRoute(path="/", answer="text/html; charset=utf-8", summary="A page to talk to the model with."),
    _GetRoute(
        path="/v1/models", answer=response_schema.ModelCards, summary="The model that is served, by all its names."
    ),
    _GetRoute(path="/v1/models/{name}", answer=response_schema.ModelCard, summary="The model, by one of its names."),
    _GetRoute(
        path="/tokenizer_info",
        answer=response_schema.TokenizerInfo,
        summary="What clients that make tokens themselves want to know.",
    ),
    _GetRoute(path="/health", answer=response_schema.Health, summary="Whether the engine runs.", unwell=True),
    _GetRoute(path="/ready", answer=response_schema.Readiness, summary="Whether requests are taken.", unwell=True),
    _GetRoute(path="/status", answer=response_schema.ServerStatus, summary="What the server is doing."),
    _GetRoute(path="/plan", answer=response_schema.PlanReport, summary="The plan that the server follows."),
    _GetRoute(path="/metrics", answer=metrics.CONTENT_TYPE, summary="What was counted, for Prometheus."),
    _GetRoute(path="/openapi.json", answer="application/json", summary="This document."),
)
_MIDDLEWARE_STATUSES = ("400", "401", "403", "408", "413", "429", "503")
"""What any request may be answered with: it is no HTTP, carries no key, comes from a page of another site, does not
arrive, is too large, comes too often, or there is no room."""
_MODEL_STATUSES = (*_MIDDLEWARE_STATUSES, "404", "500")
"""What else a request to the model may be: for another model, or one whose answer could not be finished."""


_EVENT: dict[str, Json] = {
    "type": "object",
    "description": "one of the events",
    "properties": {
        "event": {"type": "string"},
        "data": {"type": "string", "description": "a chunk as JSON, an error as JSON, or `[DONE]`"},
    },
    "required": ["data"],
}
"""An event of a stream, as readers of streams give it."""


def document(version: str) -> dict[str, Json]:
    """The interface as OpenAPI 3.1 has it.

    Args:
        version: of the program.
    """
    paths: dict[str, Json] = {}
    for asked in _POST_ROUTES:
        fine: dict[str, Json] = {"application/json": {"schema": type_schema(asked.answer)}}
        if asked.streams:
            said = "with `stream: true`: events, each a chunk of the answer as JSON, and `[DONE]` at the end"
            # Before 3.2 OpenAPI does not say whether the schema of a stream is that of all of it or of each event.
            fine[SSE_MEDIA_TYPE] = {"schema": {"anyOf": [{"type": "string", "description": said}, _EVENT]}}
        paths[asked.path] = {
            "post": {
                "summary": asked.summary,
                "requestBody": {"required": True, "content": {"application/json": {"schema": type_schema(asked.body)}}},
                "responses": {
                    "200": {"description": "the answer", "content": fine},
                    **_error_responses(_MODEL_STATUSES),
                },
            }
        }
    for read in _GET_ROUTES:
        paths[read.path] = {"get": _get_operation(read)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Levanter", "version": version},
        "paths": paths,
        "components": {"schemas": schemas()},
    }


def _get_operation(read: _GetRoute) -> dict[str, Json]:
    """What is said of a path that is only read."""
    content: Json = {}
    if isinstance(read.answer, type):
        content = {"application/json": {"schema": type_schema(read.answer)}}
    elif isinstance(read.answer, str):
        kind = "object" if read.answer == "application/json" else "string"
        content = {read.answer: {"schema": {"type": kind}}}
    responses = {"200": {"description": "the answer", "content": content}, **_error_responses(_MIDDLEWARE_STATUSES)}
    found: dict[str, Json] = {"summary": read.summary, "responses": responses}
    if read.unwell and isinstance(read.answer, type):
        several: Json = {"anyOf": [type_schema(read.answer), type_schema(response_schema.Error)]}
        responses["503"] = {"description": "not now", "content": {"application/json": {"schema": several}}}
    if "{name}" in read.path:
        named: Json = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        found["parameters"] = [named]
        responses |= _error_responses(("404",))
    return found


def _error_responses(codes: Sequence[str]) -> dict[str, Json]:
    """What is answered where something is wrong."""
    found: dict[str, Json] = {}
    for code in codes:
        said: dict[str, Json] = {
            "description": _STATUS_DESCRIPTIONS[code],
            "content": {"application/json": {"schema": type_schema(response_schema.Error)}},
        }
        if code == "429":
            about = "Seconds after which to ask again."
            said["headers"] = {"Retry-After": {"description": about, "schema": {"type": "string"}, "required": True}}
        found[code] = said
    return found


_STATUS_DESCRIPTIONS: Mapping[str, str] = {
    "400": "the request cannot be used; the message says all that is wrong with it",
    "401": "no key, or a wrong one",
    "403": "from a page of another site",
    "404": "another model",
    "408": "the request did not arrive in time",
    "413": "the request is too large",
    "429": "too much waits, or too many requests from one address",
    "500": "the answer could not be finished",
    "503": "the server is ending, or has no room to read the request",
}
