"""From a body to what is asked of the engine: what completions and conversations have in common."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from levanter.base.input_limits import MIB, shown_bytes
from levanter.config.errors import did_you_mean
from levanter.inference import response_format
from levanter.inference.jsonl import AskedLine
from levanter.inference.params import ParamsError, SamplingParams, fields_of, params_of
from levanter.inference.prompts import PromptReader
from levanter.inference.requests import ConstraintSpec
from levanter.serving.errors import ApiError, invalid
from levanter.serving.inbox import Submitted
from levanter.serving.protocol import ProtocolError, decode, names_of, parse_object
from levanter.serving.request_schema import FORMATS, NEUTRAL, StreamOptions

BODY_BYTES = 32 * MIB
"""Of a request."""
D = TypeVar("D")


async def read_body(request: Request) -> bytes:
    """The body of a request.

    Raises:
        ApiError: it is larger than `BODY_BYTES` (413), or its client left.
    """
    said = f"the body has more than {shown_bytes(BODY_BYTES)}, the limit for a request"
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > BODY_BYTES:
        raise ApiError(413, said, reason="too_large")
    pieces, size = [], 0
    try:
        async for piece in request.stream():
            size += len(piece)
            if size > BODY_BYTES:
                raise ApiError(413, said, reason="too_large")
            pieces.append(piece)
    except ClientDisconnect:
        raise invalid("the client left before its request was read") from None
    return b"".join(pieces)


def fields_in(raw: bytes) -> dict[str, object]:
    """The fields of the object that a body is.

    Raises:
        ApiError: it is none.
    """
    try:
        return parse_object(raw)
    except ProtocolError as error:
        raise invalid(str(error)) from None


def wants_usage(options: StreamOptions | None, *, stream: bool) -> bool:
    """Whether a stream says how many tokens there were.

    Raises:
        ApiError: what is asked for belongs to a stream, and there is none.
    """
    if options is not None and not stream:
        raise invalid("stream_options: only for a stream (stream: true)")
    return options is not None and options.include_usage


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How an answer is chosen, and what it conforms to.

    Attributes:
        params: the parameters.
        constraint: what the text conforms to.
    """

    params: SamplingParams
    constraint: ConstraintSpec | None


def decoded(
    cls: type[D],
    fields: Mapping[str, object],
    *,
    defaults: Mapping[str, object],
    renamed: Mapping[str, str] | None = None,
) -> tuple[D, Sampling]:
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
    own = names_of(cls)
    given = {name: value for name, value in fields.items() if name not in own and name not in FORMATS}
    for name in sorted(set(given) & set(NEUTRAL)):
        value = given.pop(name)
        if value is not None and value not in NEUTRAL[name]:
            problems.append(f"{name}: not supported")
    for theirs, ours in (renamed or {}).items():
        if given.get(theirs) is not None:
            given[ours] = given.pop(theirs)
    body = params = None
    try:
        body = decode(cls, {name: value for name, value in fields.items() if name in own})
    except ProtocolError as error:
        problems += error.problems
    constraint = response_format.constraint_of(fields, problems)
    try:
        params = params_of({**defaults, **{k: v for k, v in given.items() if v is not None}}, beside=frozenset())
    except ParamsError as error:
        problems += [_nearer(line, own) for line in error.problems]
    if problems or body is None or params is None:
        raise invalid(str(ProtocolError(problems)))
    return body, Sampling(params=params, constraint=constraint)


def _nearer(problem: str, own: frozenset[str]) -> str:
    """A parameter that is not known may be a misspelt field of the body."""
    name, _, rest = problem.partition(": ")
    if not rest.startswith("not a parameter"):
        return problem
    known = own | FORMATS | set(fields_of(SamplingParams()))
    return f"{name[:100]}: not a field{did_you_mean(name, sorted(known))}"


def submitted(asked: AskedLine, reader: PromptReader, *, where: str = "") -> Submitted:
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
        raise invalid(f"{where}{error}{said}", code=code, reason="too_long" if long else "invalid") from error
    params = request.params
    return Submitted(request=request, score=params.echo and params.logprobs is not None)


def fresh_id(prefix: str) -> str:
    """An id that no other answer has."""
    return f"{prefix}-{secrets.token_hex(12)}"


def fresh_seed(params: SamplingParams) -> int:
    """The seed of a request: its own, or one that nobody has had."""
    return secrets.randbits(63) if params.seed is None else params.seed


def of_this_model(asked: str | None, names: Sequence[str]) -> None:
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
