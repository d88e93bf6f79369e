"""Conversations as chat templates know them, of messages as OpenAI's clients write them."""

import json
from collections.abc import Mapping, Sequence

from levanter.serving.protocol import ProtocolError
from levanter.serving.request_schema import Message, Tool


def messages_of(given: Sequence[Message]) -> tuple[Mapping[str, object], ...]:
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
                        "arguments": _arguments(call.function.arguments, f"messages[{n}].tool_calls[{m}]", problems),
                    },
                }
                for m, call in enumerate(message.tool_calls)
            ]
        found.append(made)
    if problems:
        raise ProtocolError(problems)
    return tuple(found)


def _arguments(text: str, where: str, problems: list[str]) -> object:
    """The arguments of a call, which templates write down themselves."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        problems.append(f"{where}.function.arguments: expected a JSON object")
    return value


_OURS = frozenset({"messages", "tools", "bos_token", "eos_token", "add_generation_prompt"})


def template_fields(more: Mapping[str, object] | None, tools: Sequence[Tool] | None) -> Mapping[str, object]:
    """What a template knows beside the messages.

    Args:
        more: what the request gives it.
        tools: that may be called.

    Raises:
        ProtocolError: the request gives it what is not the request's to give.
    """
    found = dict(more or {})
    if taken := sorted(_OURS & set(found)):
        raise ProtocolError([f"chat_template_kwargs.{name}: is not the request's to say" for name in taken])
    if tools:
        found["tools"] = [{"type": "function", "function": _function(tool)} for tool in tools]
    return found


def _function(tool: Tool) -> Mapping[str, object]:
    function = tool.function
    said = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {name: value for name, value in said.items() if value is not None}
