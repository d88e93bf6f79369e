"""`/v1/chat/completions`: the next message of a conversation, which may consist of tool calls.

OpenAI's messages become the messages and variables of the chat template, which writes the tools into the prompt.
With `tool_choice: required` or a named tool, the text must conform to a JSON schema of calls. Otherwise a text that
consists of calls as a whole is parsed as such: JSON objects with `name` and `arguments` (or `parameters`), a list of
them, or one or more inside `<tool_call>` … `</tool_call>`.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from levanter.base.bounded_json import Json
from levanter.data.chat import invalid_character
from levanter.data.messages import read_message, read_tools
from levanter.inference.prompts import PromptRequest
from levanter.inference.requests import MAX_TOP_LOGPROBS, ConstraintSpec, SamplingParams, params_to_json
from levanter.serving.engine_thread import TokenDelta
from levanter.serving.errors import invalid_request
from levanter.serving.request_parsing import (
    ProtocolError,
    SamplingOptions,
    check_model_name,
    decode_request,
    make_submission,
    parse_fields,
    random_id,
    request_seed,
    streams_usage,
)
from levanter.serving.request_schema import ChatBody, NamedTool, Tool
from levanter.serving.responses import ParsedCall, PartialChoice, ResponseBuilder, is_visible, respond
from levanter.serving.service import Service

MAX_MESSAGES = 10_000
"""Messages of one conversation."""


def template_messages(messages: object) -> tuple[Mapping[str, object], ...]:
    """Messages in the form that chat templates expect, as training reads them.

    Args:
        messages: the messages as the client wrote them, decoded as `Message` before: templates see the order of the
            client's keys.

    Raises:
        ProtocolError: there are no messages, one has no content, or the arguments of a call are no JSON object.
    """
    listed: Sequence[Mapping[str, object]] = messages if isinstance(messages, list) else []
    problems: list[str] = [] if listed else ["messages: expected at least one"]
    if len(listed) > MAX_MESSAGES:
        raise ProtocolError([f"messages: at most {MAX_MESSAGES:,}, got {len(listed):,}"])
    read = tuple(read_message(message, f"messages[{n}].", problems) for n, message in enumerate(listed))
    if problems:
        raise ProtocolError(problems)
    return read


# The server sets these itself: a request that replaced them would bypass the checks of its messages and tools.
_RESERVED_VARIABLES = frozenset({"messages", "tools", "bos_token", "eos_token", "add_generation_prompt"})
"""Variables of templates that a request cannot set."""


def template_variables(more: Mapping[str, object] | None, tools: object) -> Mapping[str, object]:
    """The variables of a chat template other than the messages.

    Args:
        more: variables that the request sets.
        tools: tools that the model may call, as the client wrote them, decoded as `Tool` before.

    Raises:
        ProtocolError: the request sets a reserved variable, or a tool has characters that no text has.
    """
    variables = dict(more or {})
    problems = [
        f"chat_template_kwargs.{name}: cannot be set by a request" for name in _RESERVED_VARIABLES & set(more or {})
    ]
    if (problem := invalid_character(variables, "chat_template_kwargs")) is not None:
        problems.append(problem)
    read = read_tools(tools, "tools", problems)
    if problems:
        raise ProtocolError(sorted(problems))
    return {**variables, **({"tools": read} if read else {})}


_TOOL_NAME = re.compile(r"[\w.-]{1,64}")
_TAGGED = re.compile(r"\s*<tool_call>(.*?)</tool_call>", re.DOTALL)
CALL_PREFIXES = ("{", "[", "<tool_call>")
"""Beginnings of a text that may be tool calls."""
MAX_TOOLS = 128
"""Tools of one request."""
ToolMode: TypeAlias = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A tool call in a response.

    Attributes:
        name: name of the tool.
        arguments: its arguments as JSON text.
    """

    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class ToolRules:
    """How a response may call tools.

    Attributes:
        mode: `none`: no calls; `auto`: the model decides; `required`: at least one; `named`: the one tool in `tools`.
        tools: tools that it may call.
        several: whether it may make several calls.
    """

    mode: ToolMode = "none"
    tools: tuple[Tool, ...] = ()
    several: bool = True

    @property
    def constraint(self) -> ConstraintSpec | None:
        """The constraint of the response's text."""
        if self.mode == "named":
            # The text consists of the arguments alone; the name is known.
            return _schema_constraint(self.tools[0].function.parameters or {"type": "object"})
        if self.mode != "required":
            return None
        # Each tool's parameters are a document of their own, to whose root their references are relative.
        definitions = {
            f"tool_{n}": embedded_schema(tool.function.parameters or {"type": "object"}, f"#/$defs/tool_{n}")
            for n, tool in enumerate(self.tools)
        }
        call_schemas = [
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "arguments": {"$ref": f"#/$defs/tool_{n}"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for n, tool in enumerate(self.tools)
        ]
        limit = {} if self.several else {"maxItems": 1}
        return _schema_constraint(
            {"$defs": definitions, "type": "array", "items": {"anyOf": call_schemas}, "minItems": 1, **limit}
        )

    def calls_in(self, text: str) -> tuple[ToolCall, ...]:
        """The calls that a text consists of; none if anything in it is not a call of a known tool."""
        if self.mode == "none":
            return ()
        if self.mode == "named":
            # The constraint made the text consist of the arguments.
            return (ToolCall(name=self.tools[0].function.name, arguments=text),)
        calls = [self._call(value) for value in _json_values(text)]
        # One value that is no call makes the whole text a text.
        return () if any(call is None for call in calls) else tuple(call for call in calls if call is not None)

    def may_be_call(self, beginning: str) -> bool:
        """Whether a text that begins like this may turn out to be calls."""
        if self.mode in ("none", "named"):
            return False
        text = beginning.lstrip()
        # Either the text has one of the prefixes, or it is still shorter than one.
        return any(text.startswith(prefix) or prefix.startswith(text) for prefix in CALL_PREFIXES)

    def _call(self, value: object) -> ToolCall | None:
        if not isinstance(value, dict):
            return None
        # Models are trained with either of the two names for the arguments.
        name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        # A JSON object that names no known tool is text: clients could not execute it.
        if all(name != tool.function.name for tool in self.tools):
            return None
        return ToolCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False))


_NAMES_OF_SCHEMAS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
"""Keywords of JSON schemas whose value is an object from any name to a schema."""
_VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keywords of JSON schemas whose value is data, in which `$ref` means nothing."""


def embedded_schema(schema: Mapping[str, object], pointer: str) -> Mapping[str, object]:
    """A schema for a place inside another one, where its references to its own root and parts still hold.

    Args:
        schema: a document of its own.
        pointer: the place, as a reference (`#/$defs/x`).
    """
    id = schema.get("$id")

    def moved(reference: str) -> str:
        base, mark, rest = reference.partition("#")
        # The document may refer to itself by its name, too. `#name` is an anchor, which does not depend on its place.
        is_inside = not base or base == id
        return pointer + rest if is_inside and (mark or base) and (not rest or rest.startswith("/")) else reference

    def walk(part: object, *, names: bool) -> object:
        if isinstance(part, list):
            return [walk(item, names=False) for item in part]
        if not isinstance(part, Mapping):
            return part
        if names:
            return {name: walk(item, names=False) for name, item in part.items()}
        return {
            key: moved(value)
            if key == "$ref" and isinstance(value, str)
            else value
            if key in _VALUES
            else walk(value, names=key in _NAMES_OF_SCHEMAS)
            for key, value in part.items()
        }

    # With a name of its own inside, references would be relative to that; the dialect is the outer document's.
    result = walk({key: value for key, value in schema.items() if key not in ("$id", "$schema")}, names=False)
    assert isinstance(result, dict)
    return result


def _schema_constraint(schema: Mapping[str, object]) -> ConstraintSpec:
    return ConstraintSpec(kind="json_schema", text=json.dumps(schema))


def _json_values(text: str) -> Sequence[object]:
    """The JSON values that a text consists of; none if it contains anything else."""
    pieces = [text]
    if text.lstrip().startswith("<tool_call>"):
        # Tagged calls may follow each other, with nothing but spaces between them.
        pieces, end = [], 0
        # `match` is anchored: anything between two tagged calls makes the text a text.
        while (match := _TAGGED.match(text, end)) is not None:
            pieces.append(match[1])
            end = match.end()
        if text[end:].strip():
            return ()
    values: list[object] = []
    for piece in pieces:
        try:
            value = json.loads(piece)
        except (ValueError, RecursionError):
            return ()
        # `required` calls are a list, by the schema above; models that choose by themselves also write single objects.
        values += value if isinstance(value, list) else [value]
    return values


def tool_rules(tools: Sequence[Tool] | None, choice: str | NamedTool | None, *, several: bool | None) -> ToolRules:
    """How the response to a request may call tools.

    Args:
        tools: tools of the request.
        choice: its `tool_choice`.
        several: its `parallel_tool_calls`.

    Raises:
        ProtocolError: lists conflicts between these fields.
    """
    problems = []
    names = [tool.function.name for tool in tools or ()]
    if len(names) > MAX_TOOLS:
        raise ProtocolError([f"tools: at most {MAX_TOOLS}, got {len(names)}"])
    for n, name in enumerate(names):
        if not _TOOL_NAME.fullmatch(name):
            problems.append(f"tools[{n}].function.name: expected 1 to 64 letters, digits, `_`, `-` and `.`")
        elif name in names[:n]:
            problems.append(f"tools[{n}].function.name: {name!r} is the name of an earlier tool")
    # `none` and `auto` are defaults that clients send without tools.
    if not names and choice not in (None, "none", "auto"):
        problems.append("tool_choice: there are no `tools`")
    if isinstance(choice, NamedTool) and names and choice.function.name not in names:
        problems.append(f"tool_choice.function.name: {choice.function.name!r} is none of {', '.join(names)}")
    if problems:
        raise ProtocolError(problems)
    if not tools or choice == "none":
        return ToolRules()
    if isinstance(choice, NamedTool):
        # The name was checked above.
        named = next(tool for tool in tools if tool.function.name == choice.function.name)
        return ToolRules(mode="named", tools=(named,), several=False)
    mode: ToolMode = "required" if choice == "required" else "auto"
    return ToolRules(mode=mode, tools=tuple(tools), several=several is not False)


PATH = "/v1/chat/completions"


@dataclass(frozen=True, kw_only=True)
class ChatCall(ParsedCall):
    """A parsed request body.

    Attributes:
        rules: how the response may call tools.
    """

    rules: ToolRules


def parse_chat(raw: bytes, service: Service) -> ChatCall:
    """Parses the body of a request.

    Raises:
        ApiError: lists its problems.
    """
    fields = parse_fields(raw, service.reader)
    # Chat responses have no place for the prompt.
    if fields.get("echo"):
        raise invalid_request("echo: only for /v1/completions")
    limit = service.chat_max_tokens
    if (newer := fields.get("max_completion_tokens")) is not None:
        if fields.get("max_tokens") not in (None, newer):
            raise invalid_request("max_completion_tokens: differs from max_tokens, its older name")
        # One of the two names is kept for everything below.
        fields["max_tokens"] = newer
    # `logprobs` is a flag in a chat completion and a number in `SamplingParams`: the run's default does not apply.
    defaults = {**params_to_json(service.reader.defaults), "max_tokens": limit or service.context, "logprobs": None}
    body, sampling = decode_request(ChatBody, fields, defaults={**defaults, "echo": False})
    if fields.get("max_tokens") is None and limit is None:
        # None means the rest of the context, which is known once the prompt is tokenized.
        sampling = replace(sampling, params=replace(sampling.params, max_tokens=None))
    check_model_name(body.model, service.names)
    try:
        rules = tool_rules(body.tools, body.tool_choice, several=body.parallel_tool_calls)
        messages = template_messages(fields["messages"])
        # With `tool_choice: none` the prompt does not contain the tools at all.
        template = template_variables(body.chat_template_kwargs, () if rules.mode == "none" else fields.get("tools"))
    except ProtocolError as error:
        raise invalid_request(str(error)) from None
    params, constraint, id = _params(body, sampling), sampling.constraint, random_id("chatcmpl")
    if rules.constraint is not None:
        # A text can conform to one grammar only.
        if constraint is not None:
            raise invalid_request("tool_choice: a required call cannot have another constraint (response_format)")
        constraint = rules.constraint
    prompt = PromptRequest(
        line=1, id=id, prompt=None, messages=messages, template=template, params=params, constraint=constraint
    )
    return ChatCall(
        id=id,
        submitted=(make_submission(prompt, service.reader),),
        params=params,
        stream=body.stream,
        usage=streams_usage(body.stream_options, stream=body.stream),
        rules=rules,
    )


def _params(body: ChatBody, sampling: SamplingOptions) -> SamplingParams:
    """The parameters, with `logprobs` and `top_logprobs`, which mean something else in a chat completion."""
    problems = []
    if body.top_logprobs is not None and not body.logprobs:
        problems.append("top_logprobs: needs logprobs: true")
    top = body.top_logprobs or 0
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        problems.append(f"top_logprobs: must be from 0 to {MAX_TOP_LOGPROBS}, got {top}")
    if problems:
        raise invalid_request("\n".join(problems))
    params = sampling.params
    return replace(params, seed=request_seed(params), logprobs=top if body.logprobs else None)


class ChatBuilder(ResponseBuilder):
    """The response to a chat completion request."""

    call: ChatCall
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, choice: PartialChoice) -> Iterator[Mapping[str, Json]]:
        """The role, and with a named tool the beginning of its call."""
        delta: dict[str, Json] = {"role": "assistant"}
        if self.call.rules.mode == "named":
            name = self.call.rules.tools[0].function.name
            delta["tool_calls"] = [_call_json(0, ToolCall(name=name, arguments=""), self._call_id(choice, 0))]
        else:
            # OpenAI's first chunk has the role and an empty text.
            delta["content"] = ""
        yield {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, choice: PartialChoice, delta: TokenDelta) -> Iterator[Mapping[str, Json]]:
        """The text of one more token; text that may be calls is kept back until it is known."""
        rules = self.call.rules
        choice.pending.append(delta)
        # A text that begins like a call cannot be sent as text and taken back later.
        if rules.mode != "named" and rules.may_be_call(choice.text) and not delta.last:
            return
        # Either it is known that there is no call, or the choice has ended: all deltas go out together.
        pending, choice.pending = choice.pending, []
        # Calls are recognized in the whole text, so they go out with the last chunk.
        calls = self._calls(choice) if delta.last and rules.mode != "named" else ()
        text, message = "".join(item.text for item in pending), dict[str, Json]()
        if calls:
            message["tool_calls"] = [_call_json(n, call, self._call_id(choice, n)) for n, call in enumerate(calls)]
        # The name went out with the opening, so chunks continue the arguments of call 0.
        elif text and rules.mode == "named":
            message["tool_calls"] = [{"index": 0, "function": {"arguments": text}}]
        elif text:
            message["content"] = text
        if message or delta.last or self.call.params.logprobs is not None:
            yield self._choice(choice, pending, "delta", message, calls)

    def complete(self, choice: PartialChoice) -> Mapping[str, Json]:
        """The whole message."""
        calls = self._calls(choice)
        message: dict[str, Json] = {"role": "assistant", "content": None if calls else choice.text, "refusal": None}
        if calls:
            items = [_call_json(n, call, self._call_id(choice, n)) for n, call in enumerate(calls)]
            # Only the calls of a stream have an index.
            message["tool_calls"] = [{key: value for key, value in item.items() if key != "index"} for item in items]
        return self._choice(choice, choice.deltas, "message", message, calls)

    def _calls(self, choice: PartialChoice) -> tuple[ToolCall, ...]:
        return self.call.rules.calls_in(choice.text)

    # Derived from the id of the response, so that chunks of a stream agree on it without state.
    def _call_id(self, choice: PartialChoice, n: int) -> str:
        return f"call_{self.call.id.rpartition('-')[2]}_{choice.index}_{n}"

    def _choice(
        self,
        choice: PartialChoice,
        deltas: Sequence[TokenDelta],
        where: str,
        message: dict[str, Json],
        calls: Sequence[ToolCall],
    ) -> Mapping[str, Json]:
        last = deltas[-1] if deltas else None
        reason = None if last is None else last.reason
        body: dict[str, Json] = {
            "index": choice.index,
            where: message,
            "logprobs": self._logprobs(deltas),
            # A text that was cut by `max_tokens` keeps `length`: its calls may be incomplete.
            "finish_reason": "tool_calls" if calls and reason == "stop" and self._chooses_calls else reason,
        }
        if reason is not None:
            body["stop_reason"] = None if last is None else last.matched
        return body

    @property
    def _chooses_calls(self) -> bool:
        """Whether the model chooses which tools it calls: OpenAI's `finish_reason` is `stop` for a named tool."""
        return self.call.rules.mode in ("auto", "required")

    def _logprobs(self, deltas: Sequence[TokenDelta]) -> Json:
        if self.call.params.logprobs is None:
            return None
        content: list[Json] = []
        for delta in deltas:
            if delta.token is not None and is_visible(delta):
                top: list[Json] = [self._token(id, value) for id, value in delta.token.top]
                content.append({**self._token(delta.token.id, delta.token.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, id: int, logprob: float | None) -> dict[str, Json]:
        return {"token": self.texts.text(id), "logprob": logprob, "bytes": list(self.texts.bytes(id))}


def _call_json(n: int, call: ToolCall, id: str) -> dict[str, Json]:
    return {"index": n, "id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


async def chat_completions(request: Request) -> Response:
    """Answers `POST /v1/chat/completions`."""
    return await respond(request, path=PATH, parse=parse_chat, build=ChatBuilder)
