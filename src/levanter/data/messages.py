"""Validates the messages of a conversation record and its further template arguments."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from levanter.config.errors import did_you_mean
from levanter.data.assistant_mask import ASSISTANT
from levanter.data.chat import NO_TEXT
from levanter.data.errors import DataError, raise_problems

ROLES = ("system", "developer", "user", ASSISTANT, "tool", "function", "ipython", "environment")
"""The roles that templates know. `format.roles` maps others to them."""
_TOOLS = "tools"
_RESERVED = {
    "chat_template": "a record cannot set its template; set format.chat_template",
    "messages": "messages are a key of the record",
    "tokenize": "it is ours to set",
    "return_dict": "it is ours to set",
    "return_assistant_tokens_mask": "it is ours to set",
}


def checked_messages(
    messages: Sequence[Any], record: Mapping[str, Any], origin: str, *, system: str | None, roles: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Validates messages; adds the record's system message in front, and renames roles for the template.

    Args:
        messages: the record's messages.
        record: the record.
        origin: the file and position of the record, for messages.
        system: the key of a record that holds a system message; None for none.
        roles: the template's names of roles that it does not know.

    Raises:
        DataError: lists every invalid message.
    """
    if system is not None and record.get(system):
        # The system message may be a text or a whole message; its role is `system` in either case.
        prompt = record[system]
        messages = [{**(prompt if isinstance(prompt, Mapping) else {"content": prompt}), "role": "system"}, *messages]
    raise_problems([f"{origin}: {problem}" for problem in _problems(messages, roles)])
    # Parquet has null where a message lacks a key that others have; templates test whether a key is defined.
    return [
        {key: field for key, field in message.items() if field is not None or key == "content"}
        | {"role": roles.get(message["role"], message["role"])}
        for message in messages
    ]


def _problems(messages: Sequence[Any], roles: Mapping[str, str]) -> Iterator[str]:
    known = (*roles, *roles.values(), *(role for role in ROLES if role not in roles))
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping):
            yield f"message {number}: expected an object with role and content, found {type(message).__name__}"
            continue
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str):
            yield f"message {number}: has no role (its keys are {', '.join(map(repr, message)) or 'none'})"
        elif role not in known:
            yield (
                f"message {number}: unknown role {role!r}{did_you_mean(role, known)}; known are "
                f"{', '.join(dict.fromkeys(known))}; map others with format.roles (roles: {{{role}: …}})"
            )
        if isinstance(content, str) and (match := NO_TEXT.search(content)) is not None:
            position = match.start()
            yield f"message {number}: its content has U+{ord(match.group()):04X} at {position}, which no text contains"
        # A message that only calls tools has no content. Content that is a list of parts (images) is refused below.
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            problem = "missing" if content is None else f"{type(content).__name__}, and only text is read"
            yield f"message {number}: its content is {problem}"


def template_arguments(record: Mapping[str, Any], key: str | None, origin: str) -> dict[str, Any]:
    """The variables of the template other than the messages: `tools`, and the object under a key of the record.

    Args:
        record: the record.
        key: its key; None for none.
        origin: the file and position of the record, for messages.

    Raises:
        DataError: the value is not an object, or it sets a reserved variable.
    """
    arguments = (record.get(key) if key is not None else None) or {}
    if not isinstance(arguments, Mapping):
        raise DataError(f"{origin}: {key!r} is {type(arguments).__name__}, expected an object")
    raise_problems([f"{origin}: {key}.{name}: {why}" for name, why in _RESERVED.items() if name in arguments])
    tools = {_TOOLS: record[_TOOLS]} if record.get(_TOOLS) else {}
    # The encoder itself sets whether the text ends with a generation prompt; upstream drops the key, too.
    return {**tools, **{name: argument for name, argument in arguments.items() if name != "add_generation_prompt"}}
