"""JSON objects as frozen dataclasses, strictly: a field that is not known, or of another type, is said and not ignored.

The dataclasses are the protocol: requests are decoded by their annotations, and `/openapi.json` is made of the same.
Annotations are made of `str`, `int`, `float`, `bool`, `None`, `object` (any value), `Literal`, `tuple[T, ...]`,
`Mapping[str, T]`, other such dataclasses, and unions of these.

From a body to what is asked of the engine: what completions and conversations have in common.
"""

import dataclasses
import secrets
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from starlette.requests import ClientDisconnect, Request

from levanter.base.bounded_json import NotAnObjectError, kind_of, object_in
from levanter.base.input_limits import HINTS, MIB, shown_bytes
from levanter.config.errors import did_you_mean
from levanter.inference.prompts import PromptReader, PromptRequest, parse_constraint
from levanter.inference.requests import ConstraintSpec, ParamsError, SamplingParams, params_to_json, parse_params
from levanter.serving.engine_thread import Submission
from levanter.serving.errors import ApiError, invalid_request
from levanter.serving.request_schema import CONSTRAINT_NAMES, NEUTRAL_VALUES, StreamOptions

D = TypeVar("D")
MAX_PROBLEMS = 20
"""Problems of one request that are said."""


class ProtocolError(ValueError):
    """A body that is no request; the message lists everything that is wrong with it."""

    def __init__(self, problems: list[str]):
        self.problems = tuple(dict.fromkeys(problems))
        said = self.problems[:MAX_PROBLEMS]
        more = len(self.problems) - len(said)
        super().__init__("\n".join((*said, *((f"and {more} more",) if more else ()))))


def parse_object(body: bytes) -> dict[str, object]:
    """The JSON object that a body is.

    Raises:
        ProtocolError: it is none: not UTF-8, not JSON, another value, nested too deep, a field twice, half a surrogate.
    """
    problems: list[str] = []
    try:
        value = object_in(body, problems)
    except NotAnObjectError as error:
        raise ProtocolError([f"the body: {error}"]) from None
    if problems:
        raise ProtocolError(problems)
    return value


def field_names(cls: type) -> frozenset[str]:
    """The fields of a dataclass."""
    return frozenset(each.name for each in dataclasses.fields(cls))


def decode(cls: type[D], value: Mapping[str, object], *, where: str = "", beside: frozenset[str] = frozenset()) -> D:
    """An object as a dataclass; `null` stands for a field's default.

    Args:
        cls: the dataclass.
        value: the object.
        where: the path of it, for messages.
        beside: names of fields that may be there and are somebody else's.

    Raises:
        ProtocolError: lists every field that is unknown, missing or of another type.
    """
    problems: list[str] = []
    found = _decode_object(cls, value, where, problems, beside)
    if problems:
        raise ProtocolError(problems)
    return found  # pyright: ignore[reportReturnType]


def _decode_object(
    cls: type, value: Mapping[str, object], where: str, problems: list[str], beside: frozenset[str] = frozenset()
) -> object:
    hints, given = _hints(cls), {}
    prefix = f"{where}." if where else ""
    known = field_names(cls)
    for n, name in enumerate(sorted(set(value) - known - beside)):
        hint = did_you_mean(name, sorted(known | beside)) if n < HINTS else ""
        problems.append(f"{prefix}{name[:100]}: not a field{hint}")
    before = len(problems)
    for each in dataclasses.fields(cls):
        if value.get(each.name) is not None:
            given[each.name] = _decode_value(hints[each.name], value[each.name], f"{prefix}{each.name}", problems)
        elif each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
            problems.append(f"{prefix}{each.name}: missing")
    if len(problems) > before:
        return None
    try:
        return cls(**given)
    except ProtocolError as error:
        problems += [f"{prefix}{one}" for one in error.problems]
        return None


def _decode_value(hint: object, value: object, where: str, problems: list[str]) -> object:
    """A value of a type; what is wrong with it is added to `problems`."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _decode_union(args, value, where, problems)
    if hint is object:
        return value
    if origin is Literal:
        if value not in args or isinstance(value, bool):
            problems.append(f"{where}: expected {_describe_type(hint)}, got {_format_value(value)}")
        return value
    if origin is tuple and isinstance(value, list):
        if args[0] in (int, str) and all(type(one) is args[0] for one in value):
            return tuple(value)
        return tuple(_decode_value(args[0], one, f"{where}[{n}]", problems) for n, one in enumerate(value))
    if origin is _MAPPING:
        if isinstance(value, dict):
            return {key: _decode_value(args[1], one, f"{where}.{key}", problems) for key, one in value.items()}
    elif dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _decode_object(hint, value, where, problems)  # pyright: ignore[reportArgumentType]
    elif _is_scalar(hint, value):
        return _number(hint, value) if isinstance(value, (int, float)) else value
    problems.append(f"{where}: expected {_describe_type(hint)}, got {_format_value(value)}")
    return None


_MAPPING = get_origin(Mapping[str, object])


def _is_scalar(hint: object, value: object) -> bool:
    if hint is int:
        whole = isinstance(value, float) and value == value and abs(value) < 2**53 and value == int(value)
        return whole or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
    return hint in (str, bool) and isinstance(value, hint)


def _number(hint: object, value: int | float) -> int | float | bool:
    return value if isinstance(value, bool) else float(value) if hint is float else int(value)


def _decode_union(args: tuple[Any, ...], value: object, where: str, problems: list[str]) -> object:
    """A value of one of several types; where it is of none, what is wrong with the one that comes closest."""
    closest: list[str] | None = None
    for hint in args:
        if hint is type(None):
            continue
        own: list[str] = []
        found = _decode_value(hint, value, where, own)
        if not own:
            return found
        inner = not own[0].startswith(f"{where}: ")
        if inner and (closest is None or len(own) < len(closest)):
            closest = own
    if closest is not None:
        problems.extend(closest[:MAX_PROBLEMS])
        return None
    said = " or ".join(_describe_type(hint) for hint in args if hint is not type(None))
    problems.append(f"{where}: expected {said}, got {_format_value(value)}")
    return None


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _describe_type(hint: object) -> str:
    """A type in words."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe_type(one) for one in args if one is not type(None))
    if origin is Literal:
        return f"{'one of ' if len(args) > 1 else ''}{', '.join(repr(one) for one in args)}"
    if origin is tuple:
        return f"a list ({_describe_type(args[0])} each)"
    if origin is _MAPPING or dataclasses.is_dataclass(hint):
        return "an object"
    words = {str: "a string", int: "a whole number", float: "a number", bool: "true or false", object: "a value"}
    return words[hint]


def _format_value(value: object) -> str:
    """A value in a message; of what is large, only its kind."""
    if isinstance(value, (list, dict)):
        return kind_of(value)
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


BODY_BYTES = 32 * MIB
"""Of a request."""


def _too_large() -> ApiError:
    return ApiError(
        413, f"the body has more than {shown_bytes(BODY_BYTES)}, the limit for a request", reason="too_large"
    )


async def read_body(request: Request) -> bytes:
    """The body of a request.

    Raises:
        ApiError: it is larger than `BODY_BYTES` (413), or its client left.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > BODY_BYTES:
        raise _too_large()
    pieces, size = [], 0
    try:
        async for piece in request.stream():
            size += len(piece)
            if size > BODY_BYTES:
                raise _too_large()
            pieces.append(piece)
    except ClientDisconnect:
        raise invalid_request("the client left before its request was read") from None
    return b"".join(pieces)


def parse_fields(raw: bytes) -> dict[str, object]:
    """The fields of the object that a body is.

    Raises:
        ApiError: it is none.
    """
    try:
        return parse_object(raw)
    except ProtocolError as error:
        raise invalid_request(str(error)) from None


def streams_usage(options: StreamOptions | None, *, stream: bool) -> bool:
    """Whether a stream says how many tokens there were.

    Raises:
        ApiError: what is asked for belongs to a stream, and there is none.
    """
    if options is not None and not stream:
        raise invalid_request("stream_options: only for a stream (stream: true)")
    return options is not None and options.include_usage


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How an answer is chosen, and what it conforms to.

    Attributes:
        params: the parameters.
        constraint: what the text conforms to.
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
    """An object as a body and the parameters beside it.

    Args:
        cls: the body.
        fields: the object.
        defaults: parameters that a request need not name.
        renamed: parameters that are called otherwise in a request, by its name.

    Raises:
        ApiError: lists everything that is wrong with it.
    """
    problems: list[str] = []
    own = field_names(cls)
    given = {name: value for name, value in fields.items() if name not in own and name not in CONSTRAINT_NAMES}
    for name in sorted(set(given) & set(NEUTRAL_VALUES)):
        value = given.pop(name)
        if value is not None and value not in NEUTRAL_VALUES[name]:
            problems.append(f"{name}: not supported")
    for theirs, ours in (renamed or {}).items():
        if given.get(theirs) is not None:
            given[ours] = given.pop(theirs)
    body = params = None
    try:
        body = decode(cls, {name: value for name, value in fields.items() if name in own})
    except ProtocolError as error:
        problems += error.problems
    constraint = parse_constraint(fields, problems)
    try:
        params = parse_params({**defaults, **{k: v for k, v in given.items() if v is not None}}, beside=frozenset())
    except ParamsError as error:
        problems += [_suggest_field(line, own) for line in error.problems]
    if problems or body is None or params is None:
        raise invalid_request(str(ProtocolError(problems)))
    return body, SamplingOptions(params=params, constraint=constraint)


def _suggest_field(problem: str, own: frozenset[str]) -> str:
    """A parameter that is not known may be a misspelt field of the body."""
    name, _, rest = problem.partition(": ")
    if not rest.startswith("not a parameter"):
        return problem
    known = own | CONSTRAINT_NAMES | set(params_to_json(SamplingParams()))
    return f"{name[:100]}: not a field{did_you_mean(name, sorted(known))}"


def make_submission(asked: PromptRequest, reader: PromptReader, *, where: str = "") -> Submission:
    """What is asked as a request to the engine.

    Args:
        asked: the prompt and its parameters.
        reader: makes tokens of it.
        where: what comes before the messages of what is wrong.

    Raises:
        ApiError: it cannot be answered by this model and these rows.
    """
    try:
        request = reader.request(asked)
    except ValueError as error:
        long = "context of" in str(error) or "pages of" in str(error)
        code = "context_length_exceeded" if long else None
        # Clients that shorten what they send, or ask another model, know the refusal by these words of OpenAI's.
        said = f"; this model's maximum context length is {reader.schedule.context} tokens" if long else ""
        raise invalid_request(f"{where}{error}{said}", code=code, reason="too_long" if long else "invalid") from error
    params = request.params
    return Submission(request=request, score=params.echo and params.logprobs is not None)


def random_id(prefix: str) -> str:
    """An id that no other answer has."""
    return f"{prefix}-{secrets.token_hex(12)}"


def request_seed(params: SamplingParams) -> int:
    """The seed of a request: its own, or one that nobody has had."""
    return secrets.randbits(63) if params.seed is None else params.seed


def check_model_name(asked: str | None, names: Sequence[str]) -> None:
    """Compares the model that is asked for with the one that is served.

    Raises:
        ApiError: it is another one.
    """
    if asked is not None and asked not in names:
        raise ApiError(
            404,
            f"model: {asked[:200]!r} is not served here{did_you_mean(asked[:200], names)}; {names[0]!r} is",
            reason="absent",
            param="model",
            code="model_not_found",
        )
