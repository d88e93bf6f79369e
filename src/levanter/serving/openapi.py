"""`/openapi.json`: the interface as an OpenAPI document, generated from the request and response classes.

It lists every status of every path. An unknown path is answered with 404, and a method that a path does not have with
405, both with an `Error`.
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
    """The schemas of the fields of `SamplingParams`."""
    fields = property_schemas(SamplingParams, without=without)
    bias: Json = {"type": "number", "minimum": -100, "maximum": 100}
    # In JSON these fields have other forms than in `SamplingParams`.
    json_forms: dict[str, dict[str, Json]] = {
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
    descriptions = field_descriptions(SamplingParams)
    # The descriptions stay those of the dataclass.
    for name, schema in json_forms.items():
        fields[name] = {**schema, "description": descriptions[name]}
    return fields


def _constraint_schemas() -> dict[str, Json]:
    """The schemas of the fields that constrain a text."""
    fields: dict[str, Json] = {}
    for name in CONSTRAINT_FIELDS:
        # The last one is OpenAI's form, whose schema is replaced below.
        kind = "boolean" if name == "json_object" else "string" if name in ("regex", "grammar") else "object"
        fields[name] = {"anyOf": [{"type": kind}, {"type": "null"}], "description": "A constraint of the text."}
    fields[RESPONSE_FORMAT] = {
        "anyOf": [
            _strict({"type": {"enum": ["text", "json_object"]}}, "type"),
            _strict({"type": {"const": "json_schema"}, "json_schema": _NAMED_SCHEMA}, "type", "json_schema"),
            {"type": "null"},
        ],
        "description": "A constraint of the text, in OpenAI's form.",
    }
    return fields


def _strict(properties: Mapping[str, Json], *required: str) -> dict[str, Json]:
    """The schema of an object with these fields and no others."""
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
    """The schemas of all request and response bodies, by name."""
    components: dict[str, Json] = {}
    for post in _POST_ROUTES:
        # Sampling parameters and constraints are accepted next to the fields of these bodies.
        more: dict[str, Json] = {}
        # A mixture at one level, as OpenAI has it; the dataclasses keep the three groups apart.
        if post.body in (CompletionBody, ChatBody):
            # `logprobs` of a chat completion is a flag of `ChatBody`, and `echo` is refused.
            without = _NOT_IN_CHAT if post.body is ChatBody else frozenset[str]()
            more = _sampling_schemas(without) | _constraint_schemas()
        components[post.body.__name__] = object_schema(post.body, more=more)
        add_schemas(post.body, components)
        add_schemas(post.answer, components)
    for get in _GET_ROUTES:
        if isinstance(get.answer, type):
            add_schemas(get.answer, components)
    add_schemas(response_schema.Error, components)
    return components


@dataclass(frozen=True, kw_only=True)
class _PostRoute:
    """A path of POST requests with a JSON body."""

    path: str
    body: type
    answer: type
    summary: str
    streams: bool = False


@dataclass(frozen=True, kw_only=True)
class _GetRoute:
    """A path of GET requests. `answer` is the class of the response, or its media type if it is not JSON."""

    path: str
    answer: type | str
    summary: str
    may_fail: bool = False
    """Whether it may also answer 503 with a body of the same class."""


_POST_ROUTES = (
    _PostRoute(
        path="/v1/completions",
        body=CompletionBody,
        answer=response_schema.CompletionResponse,
        summary="Completes prompts.",
        streams=True,
    ),
    _PostRoute(
        path="/v1/chat/completions",
        body=ChatBody,
        answer=response_schema.ChatResponse,
        summary="Generates the next message of a conversation.",
        streams=True,
    ),
    _PostRoute(
        path="/v1/tokens", body=TokensBody, answer=response_schema.Conversations, summary="Tokenizes conversations."
    ),
    _PostRoute(
        path="/tokenize",
        body=TokenizeBody,
        answer=response_schema.Tokenized,
        summary="Tokenizes a text or a conversation.",
    ),
    _PostRoute(path="/detokenize", body=DetokenizeBody, answer=response_schema.Detokenized, summary="Decodes tokens."),
)
_GET_ROUTES = (
    _GetRoute(path="/", answer="text/html; charset=utf-8", summary="The web page: a chat with the model."),
    _GetRoute(path="/v1/models", answer=response_schema.ModelCards, summary="The served model, by all its names."),
    _GetRoute(
        path="/v1/models/{name}", answer=response_schema.ModelCard, summary="The served model, by one of its names."
    ),
    _GetRoute(
        path="/tokenizer_info",
        answer=response_schema.TokenizerInfo,
        summary="Properties of the tokenizer.",
    ),
    _GetRoute(path="/health", answer=response_schema.Health, summary="Whether the engine runs.", may_fail=True),
    _GetRoute(path="/ready", answer=response_schema.Readiness, summary="Whether requests are admitted.", may_fail=True),
    _GetRoute(path="/status", answer=response_schema.ServerStatus, summary="The state and the load of the server."),
    _GetRoute(path="/plan", answer=response_schema.PlanReport, summary="The plan of the run."),
    _GetRoute(path="/metrics", answer=metrics.CONTENT_TYPE, summary="Metrics for Prometheus."),
    _GetRoute(path="/openapi.json", answer="application/json", summary="This document."),
)
_MIDDLEWARE_STATUSES = ("400", "401", "403", "408", "413", "429", "503")
"""Errors of the middleware, which any path may answer with."""
_MODEL_STATUSES = (*_MIDDLEWARE_STATUSES, "404", "500")
"""Errors of paths that use the model: also an unknown model, and a response that could not be finished."""


_EVENT: dict[str, Json] = {
    "type": "object",
    "description": "an event",
    "properties": {
        "event": {"type": "string"},
        "data": {"type": "string", "description": "a chunk as JSON, an error as JSON, or `[DONE]`"},
    },
    "required": ["data"],
}
"""An event of a stream, as parsers of streams represent it."""


def document(version: str) -> dict[str, Json]:
    """The OpenAPI 3.1 document.

    Args:
        version: version of the program.
    """
    paths: dict[str, Json] = {}
    for post in _POST_ROUTES:
        content: dict[str, Json] = {"application/json": {"schema": type_schema(post.answer)}}
        if post.streams:
            about = "with `stream: true`: events, each a chunk of the response as JSON, and `[DONE]` at the end"
            # Before 3.2 OpenAPI does not say whether the schema of a stream is that of the whole or of each event.
            content[SSE_MEDIA_TYPE] = {"schema": {"anyOf": [{"type": "string", "description": about}, _EVENT]}}
        body: dict[str, Json] = {"application/json": {"schema": type_schema(post.body)}}
        paths[post.path] = {
            "post": {
                "summary": post.summary,
                "requestBody": {"required": True, "content": body},
                "responses": {
                    "200": {"description": "the response", "content": content},
                    **_error_responses(_MODEL_STATUSES),
                },
            }
        }
    for get in _GET_ROUTES:
        paths[get.path] = {"get": _get_operation(get)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Levanter", "version": version},
        "paths": paths,
        "components": {"schemas": schemas()},
    }


def _get_operation(route: _GetRoute) -> dict[str, Json]:
    """The operation of a path of GET requests."""
    content: Json = {}
    if isinstance(route.answer, type):
        content = {"application/json": {"schema": type_schema(route.answer)}}
    elif isinstance(route.answer, str):
        kind = "object" if route.answer == "application/json" else "string"
        content = {route.answer: {"schema": {"type": kind}}}
    responses = {"200": {"description": "the response", "content": content}, **_error_responses(_MIDDLEWARE_STATUSES)}
    operation: dict[str, Json] = {"summary": route.summary, "responses": responses}
    if route.may_fail and isinstance(route.answer, type):
        # The middleware and the route itself may both answer 503.
        several: Json = {"anyOf": [type_schema(route.answer), type_schema(response_schema.Error)]}
        responses["503"] = {"description": "unavailable", "content": {"application/json": {"schema": several}}}
    # The only parameter of a path.
    if "{name}" in route.path:
        parameter: Json = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        operation["parameters"] = [parameter]
        responses |= _error_responses(("404",))
    return operation


def _error_responses(codes: Sequence[str]) -> dict[str, Json]:
    """The responses with these statuses."""
    responses: dict[str, Json] = {}
    for code in codes:
        response: dict[str, Json] = {
            "description": _STATUS_DESCRIPTIONS[code],
            "content": {"application/json": {"schema": type_schema(response_schema.Error)}},
        }
        if code == "429":
            about = "Seconds after which to try again."
            response["headers"] = {
                "Retry-After": {"description": about, "schema": {"type": "string"}, "required": True}
            }
        responses[code] = response
    return responses


_STATUS_DESCRIPTIONS: Mapping[str, str] = {
    "400": "the request is invalid; the message lists its problems",
    "401": "no key, or a wrong one",
    "403": "a request from a page of another site",
    "404": "unknown model",
    "408": "the request did not arrive in time",
    "413": "the request is too large",
    "429": "the queue is full, or too many requests from one address",
    "500": "the response could not be finished",
    "503": "the server is shutting down, or too many bodies are being read",
}
