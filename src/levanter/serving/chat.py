"""`/v1/chat/completions`: the next message of a conversation, which may be calls of tools."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from starlette.requests import Request
from starlette.responses import Response

from levanter.base.json_types import Json
from levanter.inference.jsonl import AskedLine
from levanter.inference.params import MOST_TOP_LOGPROBS, SamplingParams, fields_of
from levanter.serving.chat_messages import messages_of, template_fields
from levanter.serving.engine_messages import TokenDelta
from levanter.serving.errors import invalid
from levanter.serving.handler import answered
from levanter.serving.protocol import ProtocolError
from levanter.serving.request_parsing import (
    Sampling,
    decoded,
    fields_in,
    fresh_id,
    fresh_seed,
    of_this_model,
    submitted,
    wants_usage,
)
from levanter.serving.request_schema import ChatBody
from levanter.serving.response_builder import AskedCall, Builder, ChoiceSoFar, is_shown
from levanter.serving.service import Service
from levanter.serving.tools import ToolCall, ToolRules, rules_of

PATH = "/v1/chat/completions"


@dataclass(frozen=True, kw_only=True)
class ChatCall(AskedCall):
    """A body that was read.

    Attributes:
        rules: how the answer may call tools.
    """

    rules: ToolRules


def read_chat(raw: bytes, service: Service) -> ChatCall:
    """What a body asks for.

    Raises:
        ApiError: it cannot be answered; lists what is wrong with it.
    """
    fields = fields_in(raw)
    if fields.get("echo"):
        raise invalid("echo: only for /v1/completions")
    most = service.chat_max_tokens
    if (newer := fields.get("max_completion_tokens")) is not None:
        if fields.get("max_tokens") not in (None, newer):
            raise invalid("max_completion_tokens: is not max_tokens, which is the same by its older name")
        fields["max_tokens"] = newer
    defaults = {**fields_of(service.reader.defaults), "max_tokens": most or service.context, "logprobs": None}
    body, sampling = decoded(ChatBody, fields, defaults={**defaults, "echo": False})
    if fields.get("max_tokens") is None and most is None:
        # As many as there is room for.
        sampling = replace(sampling, params=replace(sampling.params, max_tokens=None))
    of_this_model(body.model, service.names)
    try:
        rules = rules_of(body.tools, body.tool_choice, several=body.parallel_tool_calls)
        messages = messages_of(body.messages)
        template = template_fields(body.chat_template_kwargs, () if rules.mode == "none" else body.tools)
    except ProtocolError as error:
        raise invalid(str(error)) from None
    params, constraint, id = _params(body, sampling), sampling.constraint, fresh_id("chatcmpl")
    if rules.constraint is not None:
        if constraint is not None:
            raise invalid("tool_choice: a text that has to be a call conforms to nothing else (response_format)")
        constraint = rules.constraint
    asked = AskedLine(
        line=1, id=id, prompt=None, messages=messages, template=template, params=params, constraint=constraint
    )
    return ChatCall(
        id=id,
        submitted=(submitted(asked, service.reader),),
        params=params,
        stream=body.stream,
        usage=wants_usage(body.stream_options, stream=body.stream),
        rules=rules,
    )


def _params(body: ChatBody, sampling: Sampling) -> SamplingParams:
    """The parameters, with those that a conversation calls otherwise."""
    problems = []
    if body.top_logprobs is not None and not body.logprobs:
        problems.append("top_logprobs: needs logprobs: true")
    top = body.top_logprobs or 0
    if not 0 <= top <= MOST_TOP_LOGPROBS:
        problems.append(f"top_logprobs: must be from 0 to {MOST_TOP_LOGPROBS}, got {top}")
    if problems:
        raise invalid("\n".join(problems))
    params = sampling.params
    return replace(params, seed=fresh_seed(params), logprobs=top if body.logprobs else None)


class Chat(Builder):
    """The answer in a conversation."""

    call: ChatCall
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, choice: ChoiceSoFar) -> Iterator[Mapping[str, Json]]:
        """Who speaks."""
        opened: dict[str, Json] = {"role": "assistant"}
        if self.call.rules.mode == "named":
            name = self.call.rules.tools[0].function.name
            opened["tool_calls"] = [_shown_call(0, ToolCall(name=name, arguments=""), self._call_id(choice, 0))]
        else:
            opened["content"] = ""
        yield {"index": choice.index, "delta": opened, "logprobs": None, "finish_reason": None}

    def delta(self, choice: ChoiceSoFar, piece: TokenDelta) -> Iterator[Mapping[str, Json]]:
        """What a piece adds; a text that may be calls is held back until it is known to be none, or has ended."""
        rules = self.call.rules
        choice.held.append(piece)
        if rules.mode != "named" and rules.may_be_call("".join(each.text for each in choice.pieces)) and not piece.last:
            return
        held, choice.held = choice.held, []
        calls = self._calls(choice) if piece.last and rules.mode != "named" else ()
        text, said = "".join(each.text for each in held), dict[str, Json]()
        if calls:
            said["tool_calls"] = [_shown_call(n, call, self._call_id(choice, n)) for n, call in enumerate(calls)]
        elif text and rules.mode == "named":
            said["tool_calls"] = [{"index": 0, "function": {"arguments": text}}]
        elif text:
            said["content"] = text
        if said or piece.last or self.call.params.logprobs is not None:
            yield self._choice(choice, held, "delta", said, calls)

    def complete(self, choice: ChoiceSoFar) -> Mapping[str, Json]:
        """The whole message."""
        calls = self._calls(choice)
        said: dict[str, Json] = {"role": "assistant", "content": None if calls else choice.text, "refusal": None}
        if calls:
            shown = [_shown_call(n, call, self._call_id(choice, n)) for n, call in enumerate(calls)]
            said["tool_calls"] = [{key: value for key, value in one.items() if key != "index"} for one in shown]
        return self._choice(choice, choice.pieces, "message", said, calls)

    def _calls(self, choice: ChoiceSoFar) -> tuple[ToolCall, ...]:
        return self.call.rules.calls_in(choice.text)

    def _call_id(self, choice: ChoiceSoFar, n: int) -> str:
        return f"call_{self.call.id.rpartition('-')[2]}_{choice.index}_{n}"

    def _choice(
        self,
        choice: ChoiceSoFar,
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
            if piece.token is not None and is_shown(piece):
                top: list[Json] = [self._token(id, value) for id, value in piece.token.top]
                content.append({**self._token(piece.token.id, piece.token.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, id: int, logprob: float | None) -> dict[str, Json]:
        return {"token": self.texts.text(id), "logprob": logprob, "bytes": list(self.texts.bytes(id))}


def _shown_call(n: int, call: ToolCall, id: str) -> dict[str, Json]:
    return {"index": n, "id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


async def chat_completions(request: Request) -> Response:
    """Answers `POST /v1/chat/completions`."""
    return await answered(request, path=PATH, read=read_chat, build=Chat)
