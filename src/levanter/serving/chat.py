"""Conversations as chat templates know them, of messages as OpenAI's clients write them.

Tools: what a conversation may call, what a call has to conform to, and calls in a text that was written freely.

Tools are given to the chat template, which says to the model what there is. Where a call is required its text conforms
to a JSON schema. Where it is not, a text that is as a whole one call or several is read as such: JSON objects with
`name` and `arguments` (or `parameters`), a list of them, or one or more inside of `<tool_call>` … `</tool_call>`.

`/v1/chat/completions`: the next message of a conversation, which may be calls of tools.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from levanter.base.bounded_json import Json
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
from levanter.serving.request_schema import ChatBody, Message, NamedTool, Tool
from levanter.serving.responses import ParsedCall, PartialChoice, ResponseBuilder, is_visible, respond
from levanter.serving.service import Service


def template_messages(given: Sequence[Message]) -> tuple[Mapping[str, object], ...]:
    """Messages as chat templates know them.

    Raises:
        ProtocolError: there is none, or a call has arguments that are no JSON object.
    """
    problems: list[str] = [] if given else ["messages: expected at least one"]
    found = []
    for n, message in enumerate(given):
        made: dict[str, object] = {"role": message.role}
        if isinstance(message.content, tuple):
            made["content"] = "\n".join(part.text for part in message.content)
        elif message.content is not None or message.tool_calls:
            made["content"] = message.content or ""
        else:
            problems.append(f"messages[{n}].content: missing")
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(message, name)) is not None:
                made[name] = value
        if message.tool_calls:
            made["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": _parse_arguments(
                            call.function.arguments, f"messages[{n}].tool_calls[{m}]", problems
                        ),
                    },
                }
                for m, call in enumerate(message.tool_calls)
            ]
        found.append(made)
    if problems:
        raise ProtocolError(problems)
    return tuple(found)


def _parse_arguments(text: str, where: str, problems: list[str]) -> object:
    """The arguments of a call, which templates write down themselves."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        problems.append(f"{where}.function.arguments: expected a JSON object")
    return value


_RESERVED_VARIABLES = frozenset({"messages", "tools", "bos_token", "eos_token", "add_generation_prompt"})


def template_variables(more: Mapping[str, object] | None, tools: Sequence[Tool] | None) -> Mapping[str, object]:
    """What a template knows beside the messages.

    Args:
        more: what the request gives it.
        tools: that may be called.

    Raises:
        ProtocolError: the request gives it what is not the request's to give.
    """
    found = dict(more or {})
    if taken := sorted(_RESERVED_VARIABLES & set(found)):
        raise ProtocolError([f"chat_template_kwargs.{name}: is not the request's to say" for name in taken])
    if tools:
        found["tools"] = [{"type": "function", "function": _tool_function(tool)} for tool in tools]
    return found


def _tool_function(tool: Tool) -> Mapping[str, object]:
    function = tool.function
    said = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {name: value for name, value in said.items() if value is not None}


_TOOL_NAME = re.compile(r"[\w.-]{1,64}")
_TAGGED = re.compile(r"\s*<tool_call>(.*?)</tool_call>", re.DOTALL)
CALL_PREFIXES = ("{", "[", "<tool_call>")
"""What a text begins with that may be a call."""
MAX_TOOLS = 128
"""That a request may name."""
ToolMode: TypeAlias = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        name: of the tool.
        arguments: a JSON text, as it was written.
    """

    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class ToolRules:
    """How an answer may call tools.

    Attributes:
        mode: `none`: not at all; `auto`: if it likes; `required`: at least one; `named`: the one tool in `tools`.
        tools: those that it may call.
        several: whether it may make several calls.
    """

    mode: ToolMode = "none"
    tools: tuple[Tool, ...] = ()
    several: bool = True

    @property
    def constraint(self) -> ConstraintSpec | None:
        """What the text of an answer has to conform to."""
        if self.mode == "named":
            return _schema_constraint(self.tools[0].function.parameters or {"type": "object"})
        if self.mode != "required":
            return None
        each = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.function.name},
                    "arguments": tool.function.parameters or {"type": "object"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for tool in self.tools
        ]
        most = {} if self.several else {"maxItems": 1}
        return _schema_constraint({"type": "array", "items": {"anyOf": each}, "minItems": 1, **most})

    def calls_in(self, text: str) -> tuple[ToolCall, ...]:
        """The calls that a text is; none where it is not as a whole calls of known tools."""
        if self.mode == "none":
            return ()
        if self.mode == "named":
            return (ToolCall(name=self.tools[0].function.name, arguments=text),)
        found = [call for one in _json_values(text) for call in [self._call(one)]]
        return () if any(call is None for call in found) else tuple(call for call in found if call is not None)

    def may_be_call(self, beginning: str) -> bool:
        """Whether a text that begins like this may turn out to be calls."""
        if self.mode in ("none", "named"):
            return False
        text = beginning.lstrip()
        return any(text.startswith(one) or one.startswith(text) for one in CALL_PREFIXES)

    def _call(self, given: object) -> ToolCall | None:
        if not isinstance(given, dict):
            return None
        name, arguments = given.get("name"), given.get("arguments", given.get("parameters"))
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        if all(name != tool.function.name for tool in self.tools):
            return None
        return ToolCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False))


def _schema_constraint(schema: Mapping[str, object]) -> ConstraintSpec:
    return ConstraintSpec(kind="json_schema", text=json.dumps(schema))


def _json_values(text: str) -> Sequence[object]:
    """The JSON objects that a text consists of; none where there is anything else in it."""
    pieces = [text]
    if text.lstrip().startswith("<tool_call>"):
        pieces, end = [], 0
        while (match := _TAGGED.match(text, end)) is not None:
            pieces.append(match[1])
            end = match.end()
        if text[end:].strip():
            return ()
    found: list[object] = []
    for piece in pieces:
        try:
            value = json.loads(piece)
        except (ValueError, RecursionError):
            return ()
        found += value if isinstance(value, list) else [value]
    return found


def tool_rules(tools: Sequence[Tool] | None, choice: str | NamedTool | None, *, several: bool | None) -> ToolRules:
    """How an answer may call tools.

    Args:
        tools: those of the request.
        choice: its `tool_choice`.
        several: its `parallel_tool_calls`.

    Raises:
        ProtocolError: lists what does not go together.
    """
    problems = []
    names = [tool.function.name for tool in tools or ()]
    if len(names) > MAX_TOOLS:
        problems.append(f"tools: at most {MAX_TOOLS}, got {len(names)}")
    for n, name in enumerate(names):
        if not _TOOL_NAME.fullmatch(name):
            problems.append(f"tools[{n}].function.name: expected 1 to 64 letters, digits, `_`, `-` and `.`")
        elif name in names[:n]:
            problems.append(f"tools[{n}].function.name: {name!r} is a tool already")
    if not names and choice not in (None, "none", "auto"):
        problems.append("tool_choice: there are no `tools`")
    if isinstance(choice, NamedTool) and names and choice.function.name not in names:
        problems.append(f"tool_choice.function.name: {choice.function.name!r} is none of {', '.join(names)}")
    if problems:
        raise ProtocolError(problems)
    if not tools or choice == "none":
        return ToolRules()
    if isinstance(choice, NamedTool):
        named = next(tool for tool in tools if tool.function.name == choice.function.name)
        return ToolRules(mode="named", tools=(named,), several=False)
    mode: ToolMode = "required" if choice == "required" else "auto"
    return ToolRules(mode=mode, tools=tuple(tools), several=several is not False)


PATH = "/v1/chat/completions"


@dataclass(frozen=True, kw_only=True)
class ChatCall(ParsedCall):
    """A body that was read.

    Attributes:
        rules: how the answer may call tools.
    """

    rules: ToolRules


def parse_chat(raw: bytes, service: Service) -> ChatCall:
    """What a body asks for.

    Raises:
        ApiError: it cannot be answered; lists what is wrong with it.
    """
    fields = parse_fields(raw)
    if fields.get("echo"):
        raise invalid_request("echo: only for /v1/completions")
    most = service.chat_max_tokens
    if (newer := fields.get("max_completion_tokens")) is not None:
        if fields.get("max_tokens") not in (None, newer):
            raise invalid_request("max_completion_tokens: is not max_tokens, which is the same by its older name")
        fields["max_tokens"] = newer
    defaults = {**params_to_json(service.reader.defaults), "max_tokens": most or service.context, "logprobs": None}
    body, sampling = decode_request(ChatBody, fields, defaults={**defaults, "echo": False})
    if fields.get("max_tokens") is None and most is None:
        # As many as there is room for.
        sampling = replace(sampling, params=replace(sampling.params, max_tokens=None))
    check_model_name(body.model, service.names)
    try:
        rules = tool_rules(body.tools, body.tool_choice, several=body.parallel_tool_calls)
        messages = template_messages(body.messages)
        template = template_variables(body.chat_template_kwargs, () if rules.mode == "none" else body.tools)
    except ProtocolError as error:
        raise invalid_request(str(error)) from None
    params, constraint, id = _params(body, sampling), sampling.constraint, random_id("chatcmpl")
    if rules.constraint is not None:
        if constraint is not None:
            raise invalid_request(
                "tool_choice: a text that has to be a call conforms to nothing else (response_format)"
            )
        constraint = rules.constraint
    asked = PromptRequest(
        line=1, id=id, prompt=None, messages=messages, template=template, params=params, constraint=constraint
    )
    return ChatCall(
        id=id,
        submitted=(make_submission(asked, service.reader),),
        params=params,
        stream=body.stream,
        usage=streams_usage(body.stream_options, stream=body.stream),
        rules=rules,
    )


def _params(body: ChatBody, sampling: SamplingOptions) -> SamplingParams:
    """The parameters, with those that a conversation calls otherwise."""
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
    """The answer in a conversation."""

    call: ChatCall
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, choice: PartialChoice) -> Iterator[Mapping[str, Json]]:
        """Who speaks."""
        opened: dict[str, Json] = {"role": "assistant"}
        if self.call.rules.mode == "named":
            name = self.call.rules.tools[0].function.name
            opened["tool_calls"] = [_call_json(0, ToolCall(name=name, arguments=""), self._call_id(choice, 0))]
        else:
            opened["content"] = ""
        yield {"index": choice.index, "delta": opened, "logprobs": None, "finish_reason": None}

    def delta(self, choice: PartialChoice, piece: TokenDelta) -> Iterator[Mapping[str, Json]]:
        """What a piece adds; a text that may be calls is held back until it is known to be none, or has ended."""
        rules = self.call.rules
        choice.held.append(piece)
        if rules.mode != "named" and rules.may_be_call("".join(each.text for each in choice.pieces)) and not piece.last:
            return
        held, choice.held = choice.held, []
        calls = self._calls(choice) if piece.last and rules.mode != "named" else ()
        text, said = "".join(each.text for each in held), dict[str, Json]()
        if calls:
            said["tool_calls"] = [_call_json(n, call, self._call_id(choice, n)) for n, call in enumerate(calls)]
        elif text and rules.mode == "named":
            said["tool_calls"] = [{"index": 0, "function": {"arguments": text}}]
        elif text:
            said["content"] = text
        if said or piece.last or self.call.params.logprobs is not None:
            yield self._choice(choice, held, "delta", said, calls)

    def complete(self, choice: PartialChoice) -> Mapping[str, Json]:
        """The whole message."""
        calls = self._calls(choice)
        said: dict[str, Json] = {"role": "assistant", "content": None if calls else choice.text, "refusal": None}
        if calls:
            shown = [_call_json(n, call, self._call_id(choice, n)) for n, call in enumerate(calls)]
            said["tool_calls"] = [{key: value for key, value in one.items() if key != "index"} for one in shown]
        return self._choice(choice, choice.pieces, "message", said, calls)

    def _calls(self, choice: PartialChoice) -> tuple[ToolCall, ...]:
        return self.call.rules.calls_in(choice.text)

    def _call_id(self, choice: PartialChoice, n: int) -> str:
        return f"call_{self.call.id.rpartition('-')[2]}_{choice.index}_{n}"

    def _choice(
        self,
        choice: PartialChoice,
        pieces: Sequence[TokenDelta],
        where: str,
        said: dict[str, Json],
        calls: Sequence[ToolCall],
    ) -> Mapping[str, Json]:
        last = pieces[-1] if pieces else None
        reason = None if last is None else last.reason
        found: dict[str, Json] = {
            "index": choice.index,
            where: said,
            "logprobs": self._logprobs(pieces),
            "finish_reason": "tool_calls" if calls and reason == "stop" and self._free else reason,
        }
        if reason is not None:
            found["stop_reason"] = None if last is None else last.matched
        return found

    @property
    def _free(self) -> bool:
        """Whether it was the answer's choice to call something, or what."""
        return self.call.rules.mode in ("auto", "required")

    def _logprobs(self, pieces: Sequence[TokenDelta]) -> Json:
        if self.call.params.logprobs is None:
            return None
        content: list[Json] = []
        for piece in pieces:
            if piece.token is not None and is_visible(piece):
                top: list[Json] = [self._token(id, value) for id, value in piece.token.top]
                content.append({**self._token(piece.token.id, piece.token.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, id: int, logprob: float | None) -> dict[str, Json]:
        return {"token": self.texts.text(id), "logprob": logprob, "bytes": list(self.texts.bytes(id))}


def _call_json(n: int, call: ToolCall, id: str) -> dict[str, Json]:
    return {"index": n, "id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


async def chat_completions(request: Request) -> Response:
    """Answers `POST /v1/chat/completions`."""
    return await respond(request, path=PATH, read=parse_chat, build=ChatBuilder)
