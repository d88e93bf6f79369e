"""Reads the messages of a conversation and its tools, from whatever source: JSON, Parquet, Arrow, HTTP.

The same record gives templates the same values everywhere. A field that is null is an absent field, because files of
rows have every message with the fields of all, and transformers leaves them out, too. Content in parts is one text.
Tools, and the arguments of calls, may be JSON text, as OpenAI and trl write them; templates get the values. Messages of
ShareGPT (`from`, `value`) are read as `role` and `content`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from levanter.base.bounded_json import json_kind, parse_json
from levanter.base.input_limits import OutOfBoundsError
from levanter.config.errors import did_you_mean
from levanter.data.assistant_mask import ASSISTANT
from levanter.data.chat import invalid_character
from levanter.data.errors import DataError, raise_problems
from levanter.data.record_values import ParsedArguments

ROLES = ("system", "developer", "user", ASSISTANT, "tool", "function", "ipython", "environment")
"""The roles that templates know. `format.roles` maps others to them."""
COUNT_KEYS = ("weight", "train", "training", "loss")
"""Keys of a message that say whether it counts in the loss: OpenAI's and Mistral's, axolotl's, and ms-swift's."""
_SHAREGPT_ROLES = {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT}
_PART_TEXTS = ("text", "input_text", "output_text")
_TOOLS = "tools"
_RESERVED = {
    "chat_template": "a record cannot set its template; set format.chat_template",
    "messages": "messages are a key of the record",
    "tokenize": "it is ours to set",
    "return_dict": "it is ours to set",
    "return_assistant_tokens_mask": "it is ours to set",
}


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages as templates read them.

    Attributes:
        messages: the messages; the record's system message first.
        context: the numbers, from 0, of the assistant's messages that a record excludes from the loss (`weight: 0`).
    """

    messages: list[dict[str, Any]]
    context: frozenset[int] = frozenset()


def read_message(
    message: Mapping[str, Any], where: str, problems: list[str], *, roles: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A message as templates read it; its role is not checked.

    Args:
        message: the message.
        where: a prefix of problems, such as `messages[0].`.
        problems: receives the problems.
        roles: roles that have a name of their own, so that ShareGPT's default does not apply.
    """
    fields = {key: value for key, value in message.items() if value is not None and key not in COUNT_KEYS}
    if "role" not in fields and isinstance(sender := fields.get("from"), str):
        names = {"from": "role", "value": "content"}
        fields = {names.get(key, key): value for key, value in fields.items()}
        fields["role"] = sender if sender in (roles or {}) else _SHAREGPT_ROLES.get(sender, sender)
    if "function_call" in fields:
        problems.append(f"{where}function_call: an older form of calls; write it as tool_calls")
    content = _read_content(fields.get("content"), f"{where}content", problems)
    calls = _read_calls(fields.get("tool_calls"), f"{where}tool_calls", problems)
    if content is None and not calls:
        problems.append(f"{where}content: missing")
    # In the order of the record, because templates may write whole messages.
    read = {key: {"content": content, "tool_calls": calls}.get(key, value) for key, value in fields.items()}
    if not calls:
        read.pop("tool_calls", None)
    for key, value in read.items():
        invalid = invalid_character(key, f"{where}a key") or invalid_character(value, f"{where}{key}")
        if invalid is not None:
            problems.append(invalid)
    return read


def _read_content(content: object, where: str, problems: list[str]) -> str | None:
    """A content as one text; None if there is none. OpenAI's parts are pieces of one message, joined as lines."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        problems.append(f"{where}: {json_kind(content)}, expected text, or a list of text parts")
        return ""
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else json_kind(part)
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str) or (not isinstance(part, str) and kind not in _PART_TEXTS):
            problems.append(
                f"{where}[{number}]: {kind!r}, and only text is read (parts {{type: text, text: …}}): leave out "
                "records with other parts"
            )
        else:
            texts.append(text)
    return "\n".join(texts)


def _read_calls(calls: object, where: str, problems: list[str]) -> list[Any]:
    """The calls of a message, with their arguments as objects, because templates serialize them themselves."""
    calls = _from_json(calls, where, problems)
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        if calls:
            problems.append(f"{where}: expected a list of calls, each {{function: {{name: …, arguments: …}}}}")
        return []
    read = []
    for number, call in enumerate(calls):
        fields = {key: value for key, value in call.items() if value is not None}
        # Some sets have name and arguments without `function` around them, which templates read, too.
        inner = fields.get("function", fields)
        if not isinstance(inner, Mapping):
            problems.append(f"{where}[{number}].function: {json_kind(inner)}, expected an object")
            continue
        function = fields if inner is fields else {key: value for key, value in inner.items() if value is not None}
        if "arguments" in function:
            path = f"{where}[{number}].{'function.' if function is not fields else ''}arguments"
            # Clients send an empty text for a call without arguments.
            stored = function["arguments"] or "{}"
            value = _from_json(stored, path, problems)
            if not isinstance(value, Mapping):
                problems.append(f"{path}: expected a JSON object")
            else:
                function["arguments"] = ParsedArguments(value, stored) if isinstance(stored, str) else value
        read.append({**fields, "function": function} if function is not fields else fields)
    return read


def read_tools(tools: object, where: str, problems: list[str]) -> list[Any]:
    """The tools of a record or a request; none for null, and for an empty list or text.

    Args:
        tools: a list of objects, or JSON text of one, or a list of JSON texts.
        where: its key, for problems.
        problems: receives the problems.
    """
    tools = _from_json(tools, where, problems) or []
    if not isinstance(tools, list | tuple):
        problems.append(f"{where}: {json_kind(tools)}, expected a list of tools")
        return []
    read = []
    for number, tool in enumerate(tools):
        tool = _from_json(tool, f"{where}[{number}]", problems)
        if not isinstance(tool, Mapping):
            problems.append(f"{where}[{number}]: {json_kind(tool)}, expected an object: a tool's schema")
            continue
        fields = {key: value for key, value in tool.items() if value is not None}
        if isinstance(function := fields.get("function"), Mapping):
            fields["function"] = {key: value for key, value in function.items() if value is not None}
        read.append(fields)
    if (problem := invalid_character(read, where)) is not None:
        problems.append(problem)
    return read


def _from_json(value: object, where: str, problems: list[str]) -> object:
    """A value that may be JSON text; blank text is no value."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value) if value.strip() else None
    except (json.JSONDecodeError, OutOfBoundsError) as error:
        problems.append(f"{where}: text, but not JSON ({error})")
        return None


def checked_messages(
    messages: Sequence[Any],
    record: Mapping[str, Any],
    origin: str,
    *,
    system: str | None,
    roles: Mapping[str, str] | None,
) -> Conversation:
    """Reads and validates messages; adds the record's system message in front, and renames roles for the template.

    Args:
        messages: the record's messages.
        record: the record.
        origin: the file and position of the record, for messages.
        system: the key of a record that holds a system message; None for none.
        roles: the template's names of roles that it does not know; None if the format has no such key.

    Raises:
        DataError: lists every invalid message.
    """
    if system is not None and record.get(system):
        # The system message may be a text or a whole message; its role is `system` in either case.
        prompt = record[system]
        messages = [{**(prompt if isinstance(prompt, Mapping) else {"content": prompt}), "role": "system"}, *messages]
    problems: list[str] = []
    read: list[dict[str, Any]] = []
    context: set[int] = set()
    for number, message in enumerate(messages):
        where = f"message {number + 1}: "
        if not isinstance(message, Mapping):
            expected = "expected an object with role and content"
            problems.append(f"{where}{expected}, found {type(message).__name__}")
            continue
        fields = read_message(message, where, problems, roles=roles)
        problems += [f"{where}{problem}" for problem in _role_problems(fields.get("role"), message, roles)]
        role = fields.get("role")
        role = (roles or {}).get(role, role) if isinstance(role, str) else role
        read.append({**fields, "role": role})
        for key in COUNT_KEYS:
            weight = message.get(key)
            if weight is not None and weight not in (0, 1):
                problems.append(f"{where}{key}: {weight!r}: an answer counts in the loss (1, true) or not (0, false)")
            elif weight is not None and role == ASSISTANT and not weight:
                context.add(number)
    raise_problems([f"{origin}: {problem}" for problem in problems])
    return Conversation(messages=read, context=frozenset(context))


def _role_problems(role: object, message: Mapping[str, Any], roles: Mapping[str, str] | None) -> Iterator[str]:
    mapped = roles or {}
    known = (*mapped, *mapped.values(), *(name for name in ROLES if name not in mapped))
    if not isinstance(role, str):
        keys = ", ".join(map(repr, message)) or "none"
        yield f"has no role (its keys are {keys}): expected role and content, or from and value"
    elif role not in known:
        way = "rename it in the records" if roles is None else f"map others with format.roles (roles: {{{role}: …}})"
        listed = ", ".join(dict.fromkeys(known))
        yield f"unknown role {role!r}{did_you_mean(role, known)}; known are {listed}; {way}"


def template_arguments(record: Mapping[str, Any], key: str | None, origin: str) -> dict[str, Any]:
    """The variables of the template other than the messages: `tools`, and the object under a key of the record.

    Args:
        record: the record.
        key: its key; None for none.
        origin: the file and position of the record, for messages.

    Raises:
        DataError: the value is not an object, or it sets a reserved variable; the tools are no tools.
    """
    arguments = (record.get(key) if key is not None else None) or {}
    if not isinstance(arguments, Mapping):
        raise DataError(f"{origin}: {key!r} is {type(arguments).__name__}, expected an object")
    problems = [f"{key}.{name}: {why}" for name, why in _RESERVED.items() if name in arguments]
    if (problem := invalid_character(dict(arguments), str(key))) is not None:
        problems.append(problem)
    # Tools among the further variables win, as they do where both are arguments of a function.
    where, tools = (f"{key}.{_TOOLS}", arguments[_TOOLS]) if _TOOLS in arguments else (_TOOLS, record.get(_TOOLS))
    read = read_tools(tools, where, problems)
    raise_problems([f"{origin}: {problem}" for problem in problems])
    # The encoder itself sets whether the text ends with a generation prompt; upstream drops the key, too.
    more = {name: value for name, value in arguments.items() if name not in ("add_generation_prompt", _TOOLS)}
    return {**({_TOOLS: read} if read else {}), **more}
