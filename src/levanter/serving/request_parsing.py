"""Request bodies: from JSON bytes to dataclasses, sampling parameters and engine requests.

`decode` reads a JSON object as a frozen dataclass and refuses unknown fields and values of another type. The
dataclasses of `request_schema` are the protocol: their annotations drive the decoder and generate `/openapi.json`.
Annotations consist of `str`, `int`, `float`, `bool`, `None`, `object` (any value), `Literal`, `tuple[T, ...]`,
`Mapping[str, T]`, other such dataclasses, and unions of these.

`levanter.config.decode` reads YAML by the same kind of annotations and is not used here, for three reasons. In YAML and
on the command line text becomes a number if the annotation asks for one; in JSON `"1"` is not 1. Its nodes carry
file positions, and a prompt of a million token ids would become a million nodes. Its keys are paths of a document
(`messages.0.content`), clients expect OpenAI's (`messages[0].content`).
"""

import dataclasses
import secrets
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from starlette.requests import ClientDisconnect, Request

from levanter.base.bounded_json import NotAnObjectError, json_kind, parse_json_object
from levanter.base.input_limits import MIB, OutOfBoundsError, shown_bytes
from levanter.config.errors import did_you_mean, unknown_names
from levanter.inference.prompts import PromptReader, PromptRequest, parse_constraint
from levanter.inference.requests import (
    PARAMETERS,
    ConstraintSpec,
    ParamsError,
    PromptTooLongError,
    SamplingParams,
    parse_params,
)
from levanter.io.json_shape import SMALL_BYTES, JsonLimits, json_shape
from levanter.serving.engine_thread import Submission
from levanter.serving.errors import ApiError, invalid_request
from levanter.serving.request_schema import CONSTRAINT_NAMES, NEUTRAL_VALUES, StreamOptions

D = TypeVar("D")
MAX_PROBLEMS = 20
"""Problems of one request that its error lists."""


class ProtocolError(ValueError):
    """An invalid request body; the message lists its problems.

    Attributes:
        problems: all of them, each beginning with the path of a field.
    """

    def __init__(self, problems: list[str]):
        # The attempts of a union may report the same problem; it is listed once.
        self.problems = tuple(dict.fromkeys(problems))
        shown = self.problems[:MAX_PROBLEMS]
        more = len(self.problems) - len(shown)
        super().__init__("\n".join((*shown, *((f"and {more} more",) if more else ()))))


def parse_object(body: bytes, limits: JsonLimits | None = None) -> dict[str, object]:
    """The JSON object of a body.

    Args:
        body: the body.
        limits: the largest object that is read; None for any.

    Raises:
        OutOfBoundsError: it exceeds `limits`.
        ProtocolError: the body is not UTF-8, not JSON or not an object, is nested too deep, has a field twice, or a
            string with half of a surrogate pair.
    """
    problems: list[str] = []
    is_measured = limits is not None and len(body) > SMALL_BYTES
    if limits is not None and is_measured:
        # Counted first: Python's reader lets no other thread run until it is done.
        excess = limits.exceeded_by(json_shape(body, limits))
        if excess is not None:
            raise OutOfBoundsError(excess)
    try:
        value = parse_json_object(body, problems, is_measured=is_measured)
    except NotAnObjectError as error:
        raise ProtocolError([f"the body: {error}"]) from None
    if problems:
        raise ProtocolError(problems)
    return value


def field_names(cls: type) -> frozenset[str]:
    """The fields of a dataclass."""
    return frozenset(field.name for field in dataclasses.fields(cls))


def decode(cls: type[D], value: Mapping[str, object], *, where: str = "", ignore: frozenset[str] = frozenset()) -> D:
    """An object as a dataclass; `null` stands for a field's default.

    Args:
        cls: the dataclass.
        value: the object.
        where: the path of the object, for messages.
        ignore: names of further fields that are not decoded.

    Raises:
        ProtocolError: lists every field that is unknown, missing or of another type.
    """
    problems: list[str] = []
    instance = _decode_object(cls, value, where, problems, ignore)
    if problems:
        raise ProtocolError(problems)
    return instance  # pyright: ignore[reportReturnType]


def _decode_object(
    cls: type, value: Mapping[str, object], where: str, problems: list[str], ignore: frozenset[str] = frozenset()
) -> object:
    hints, arguments = _hints(cls), {}
    prefix = f"{where}." if where else ""
    known = field_names(cls)
    # A replayed message has null for every field of its client's class, including those that we do not know.
    unknown = {name for name in value.keys() - known - ignore if not where or value[name] is not None}
    replaced: Mapping[str, str] = getattr(cls, "replaced", {})
    problems.extend(f"{prefix}{name}: not a field; {replaced[name]}" for name in sorted(unknown & replaced.keys()))
    if misspelt := unknown - replaced.keys():
        problems.extend(f"{prefix}{line}" for line in unknown_names(misspelt, known | ignore, "not a field"))
    before = len(problems)
    for field in dataclasses.fields(cls):
        # Clients send null for fields that they do not set.
        if value.get(field.name) is not None:
            arguments[field.name] = _decode_value(
                hints[field.name], value[field.name], f"{prefix}{field.name}", problems
            )
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append(f"{prefix}{field.name}: missing")
    if len(problems) > before:
        return None
    try:
        return cls(**arguments)
    except ProtocolError as error:
        problems += [f"{prefix}{problem}" for problem in error.problems]
        return None


def _decode_value(hint: object, value: object, where: str, problems: list[str]) -> object:
    """A value of a type; its problems are added to `problems`."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _decode_union(args, value, where, problems)
    if hint is object:
        return value
    if origin is Literal:
        # `True == 1` in Python: a flag must not pass for a number of the literal.
        if value not in args or isinstance(value, bool):
            problems.append(f"{where}: expected {_describe_type(hint)}, got {_format_value(value)}")
        return value
    if origin is tuple and isinstance(value, list):
        # Prompts may have a million ids: a list of scalars of the right type is checked in one pass.
        if args[0] in (int, str) and all(type(item) is args[0] for item in value):
            return tuple(value)
        return _decode_items(args[0], value, where, problems)
    if origin is _MAPPING:
        if isinstance(value, dict):
            return {key: _decode_value(args[1], item, f"{where}.{key}", problems) for key, item in value.items()}
    elif dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _decode_object(hint, value, where, problems)  # pyright: ignore[reportArgumentType]
    elif _is_scalar(hint, value):
        return _number(hint, value) if isinstance(value, (int, float)) else value
    problems.append(f"{where}: expected {_describe_type(hint)}, got {_format_value(value)}")
    return None


def _decode_items(hint: object, values: Sequence[object], where: str, problems: list[str]) -> tuple[object, ...]:
    """The items of a list; decoding stops where more of them are wrong than an error lists."""
    items, most = [], len(problems) + MAX_PROBLEMS
    for n, item in enumerate(values):
        items.append(_decode_value(hint, item, f"{where}[{n}]", problems))
        if len(problems) > most:
            break
    return tuple(items)


_MAPPING = get_origin(Mapping[str, object])


def _is_scalar(hint: object, value: object) -> bool:
    if hint is int:
        # JSON does not distinguish 1 from 1.0; NaN is the only number that differs from itself.
        whole = isinstance(value, float) and value == value and abs(value) < 2**53 and value == int(value)
        return whole or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
    # `bool` is a subclass of `int`, which is why numbers exclude it above.
    return hint in (str, bool) and isinstance(value, hint)


def _number(hint: object, value: int | float) -> int | float | bool:
    return value if isinstance(value, bool) else float(value) if hint is float else int(value)


def _decode_union(args: tuple[Any, ...], value: object, where: str, problems: list[str]) -> object:
    """A value of the first type that fits; if none does, the problems of the one that comes closest.

    Closest is the type with the fewest problems inside the value; a type that already refuses the value itself is not.
    """
    closest: list[str] | None = None
    for hint in args:
        if hint is type(None):
            continue
        attempt: list[str] = []
        decoded = _decode_value(hint, value, where, attempt)
        if not attempt:
            return decoded
        # A problem at the path of the value itself says that the type does not fit at all.
        inner = not attempt[0].startswith(f"{where}: ")
        if inner and (closest is None or len(attempt) < len(closest)):
            closest = attempt
    if closest is not None:
        # A list of a million wrong items has as many problems.
        problems.extend(closest[:MAX_PROBLEMS])
        return None
    expected = " or ".join(_describe_type(hint) for hint in args if hint is not type(None))
    problems.append(f"{where}: expected {expected}, got {_format_value(value)}")
    return None


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _describe_type(hint: object) -> str:
    """A type in words."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe_type(member) for member in args if member is not type(None))
    if origin is Literal:
        return f"{'one of ' if len(args) > 1 else ''}{', '.join(repr(member) for member in args)}"
    if origin is tuple:
        return f"a list ({_describe_type(args[0])} each)"
    if origin is _MAPPING or dataclasses.is_dataclass(hint):
        return "an object"
    words = {str: "a string", int: "a whole number", float: "a number", bool: "true or false", object: "a value"}
    return words[hint]


def _format_value(value: object) -> str:
    """A value in a message; only the kind of a list or an object."""
    if isinstance(value, (list, dict)):
        return json_kind(value)
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


BODY_BYTES = 32 * MIB
"""Size limit of a request body."""


async def read_body(request: Request) -> bytes:
    """The body of a request.

    Raises:
        ApiError: it is larger than `BODY_BYTES` (413), or its client disconnected.
    """
    # A declared length is refused before anything is read. It may be missing, or wrong, so bytes are counted as well.
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > BODY_BYTES:
        raise _too_large()
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > BODY_BYTES:
                raise _too_large()
            chunks.append(chunk)
    except ClientDisconnect:
        raise invalid_request("the client disconnected before its request was read") from None
    return b"".join(chunks)


def _too_large() -> ApiError:
    message = f"the body has more than {shown_bytes(BODY_BYTES)}, the limit for a request"
    return ApiError(413, message, reason="too_large")


MAX_PROMPTS = 1024
"""Prompts of one request."""
MAX_CHOICES = 1024
"""Choices of one request, over all of its prompts."""
MAX_VALUES = 100_000
"""Values of a body that are not numbers, and names."""


def json_limits(reader: PromptReader) -> JsonLimits:
    """The largest body: its numbers are the ids of prompts, and its longest string is a prompt.

    Args:
        reader: knows the context and the vocabulary.
    """
    return JsonLimits(
        numbers=MAX_PROMPTS * reader.schedule.context + MAX_VALUES,
        others=MAX_VALUES,
        # JSON may write any character of one byte as `\\u0061`.
        string_bytes=6 * reader.max_text_bytes,
    )


def parse_fields(raw: bytes, reader: PromptReader) -> dict[str, object]:
    """The fields of a body.

    Args:
        raw: the body.
        reader: of the model, whose context bounds the body.

    Raises:
        ApiError: the body is not a JSON object, or consists of more than any request needs.
    """
    try:
        # The longest text depends on the vocabulary, which takes a moment to look through.
        return parse_object(raw, json_limits(reader) if len(raw) > SMALL_BYTES else None)
    except OutOfBoundsError as error:
        raise invalid_request(f"the body: {error}", reason="too_large") from None
    except ProtocolError as error:
        raise invalid_request(str(error)) from None


def streams_usage(options: StreamOptions | None, *, stream: bool) -> bool:
    """Whether a stream reports the number of tokens.

    Raises:
        ApiError: there are options of a stream, and the response is not streamed.
    """
    if options is not None and not stream:
        raise invalid_request("stream_options: only for a stream (stream: true)")
    return options is not None and options.include_usage


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Sampling parameters and constraint of a request.

    Attributes:
        params: the parameters.
        constraint: the constraint of the text, or None.
    """

    params: SamplingParams
    constraint: ConstraintSpec | None


def decode_request(
    cls: type[D],
    fields: Mapping[str, object],
    *,
    defaults: Mapping[str, object],
    renamed: Mapping[str, str] | None = None,
) -> tuple[D, SamplingOptions]:
    """The fields of a request as a body and its sampling options.

    Args:
        cls: the class of the body.
        fields: the fields.
        defaults: default values of sampling parameters.
        renamed: sampling parameters that have another name in this request, by that name.

    Raises:
        ApiError: lists every problem of the fields.
    """
    problems: list[str] = []
    body_names = field_names(cls)
    # Every field belongs to the body, to the constraint, or to the sampling parameters, which refuse unknown names.
    rest = {name: value for name, value in fields.items() if name not in body_names and name not in CONSTRAINT_NAMES}
    for name in sorted(set(rest) & set(NEUTRAL_VALUES)):
        value = rest.pop(name)
        if value is not None and value not in NEUTRAL_VALUES[name]:
            problems.append(f"{name}: not supported")
    # A parameter under another name becomes ours before it is parsed.
    for theirs, ours in (renamed or {}).items():
        if rest.get(theirs) is not None:
            rest[ours] = rest.pop(theirs)
    body = params = None
    try:
        body = decode(cls, {name: value for name, value in fields.items() if name in body_names})
    except ProtocolError as error:
        problems += error.problems
    # Parameters and fields of the body are one level to a client, so a misspelt name may be close to either.
    if unknown := rest.keys() - PARAMETERS:
        problems += unknown_names(unknown, body_names | CONSTRAINT_NAMES | PARAMETERS, "not a field")
        rest = {name: value for name, value in rest.items() if name not in unknown}
    constraint = parse_constraint(fields, problems)
    try:
        # `null` stands for the default, as in the body.
        params = parse_params({**defaults, **{k: v for k, v in rest.items() if v is not None}}, ignore=frozenset())
    except ParamsError as error:
        problems += error.problems
    if problems or body is None or params is None:
        # All groups are parsed before the error is raised, so that a client learns of all problems at once.
        raise invalid_request(str(ProtocolError(problems)))
    return body, SamplingOptions(params=params, constraint=constraint)


def make_submission(prompt: PromptRequest, reader: PromptReader, *, where: str = "") -> Submission:
    """A prompt as a request for the engine.

    Args:
        prompt: the prompt and its parameters.
        reader: tokenizes it.
        where: a prefix of error messages.

    Raises:
        ApiError: the model or the cache cannot serve it.
    """
    try:
        request = reader.request(prompt)
    except ValueError as error:
        too_long = isinstance(error, PromptTooLongError)
        code = "context_length_exceeded" if too_long else None
        # Clients that shorten their prompts, or try another model, recognize OpenAI's words.
        hint = f"; this model's maximum context length is {reader.schedule.context} tokens" if too_long else ""
        reason = "too_long" if too_long else "invalid"
        raise invalid_request(f"{where}{error}{hint}", code=code, reason=reason) from error
    params = request.params
    return Submission(request=request, score=params.echo and params.logprobs is not None)


def random_id(prefix: str) -> str:
    """A unique id of a response."""
    return f"{prefix}-{secrets.token_hex(12)}"


def request_seed(params: SamplingParams) -> int:
    """The seed of a request: the one it names, or a random one."""
    # 63 bits, because a seed is a nonnegative int64. The response contains it, so that any text can be reproduced.
    return secrets.randbits(63) if params.seed is None else params.seed


def check_model_name(name: str | None, names: Sequence[str]) -> None:
    """Compares the model that a request names with the served one.

    Raises:
        ApiError: it is another model (404).
    """
    if name is not None and name not in names:
        raise ApiError(
            404,
            f"model: {name[:200]!r} is not served here{did_you_mean(name[:200], names)}; {names[0]!r} is",
            reason="absent",
            param="model",
            code="model_not_found",
        )
