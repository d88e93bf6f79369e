"""Tools: what a conversation may call, what a call has to conform to, and calls in a text that was written freely.

Tools are given to the chat template, which says to the model what there is. Where a call is required its text conforms
to a JSON schema. Where it is not, a text that is as a whole one call or several is read as such: JSON objects with
`name` and `arguments` (or `parameters`), a list of them, or one or more inside of `<tool_call>` … `</tool_call>`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from levanter.inference.requests import ConstraintSpec
from levanter.serving.protocol import ProtocolError
from levanter.serving.request_schema import NamedTool, Tool

_NAME = re.compile(r"[\w.-]{1,64}")
_TAGGED = re.compile(r"\s*<tool_call>(.*?)</tool_call>", re.DOTALL)
BEGINNINGS = ("{", "[", "<tool_call>")
"""What a text begins with that may be a call."""
MOST_TOOLS = 128
"""That a request may name."""
Mode: TypeAlias = Literal["none", "auto", "required", "named"]


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

    mode: Mode = "none"
    tools: tuple[Tool, ...] = ()
    several: bool = True

    @property
    def constraint(self) -> ConstraintSpec | None:
        """What the text of an answer has to conform to."""
        if self.mode == "named":
            return _schema(self.tools[0].function.parameters or {"type": "object"})
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
        return _schema({"type": "array", "items": {"anyOf": each}, "minItems": 1, **most})

    def calls_in(self, text: str) -> tuple[ToolCall, ...]:
        """The calls that a text is; none where it is not as a whole calls of known tools."""
        if self.mode == "none":
            return ()
        if self.mode == "named":
            return (ToolCall(name=self.tools[0].function.name, arguments=text),)
        found = [call for one in _objects(text) for call in [self._call(one)]]
        return () if any(call is None for call in found) else tuple(call for call in found if call is not None)

    def may_be_call(self, beginning: str) -> bool:
        """Whether a text that begins like this may turn out to be calls."""
        if self.mode in ("none", "named"):
            return False
        text = beginning.lstrip()
        return any(text.startswith(one) or one.startswith(text) for one in BEGINNINGS)

    def _call(self, given: object) -> ToolCall | None:
        if not isinstance(given, dict):
            return None
        name, arguments = given.get("name"), given.get("arguments", given.get("parameters"))
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        if all(name != tool.function.name for tool in self.tools):
            return None
        return ToolCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False))


def _schema(schema: Mapping[str, object]) -> ConstraintSpec:
    return ConstraintSpec(kind="json_schema", text=json.dumps(schema))


def _objects(text: str) -> Sequence[object]:
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


def rules_of(tools: Sequence[Tool] | None, choice: str | NamedTool | None, *, several: bool | None) -> ToolRules:
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
    if len(names) > MOST_TOOLS:
        problems.append(f"tools: at most {MOST_TOOLS}, got {len(names)}")
    for n, name in enumerate(names):
        if not _NAME.fullmatch(name):
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
    mode: Mode = "required" if choice == "required" else "auto"
    return ToolRules(mode=mode, tools=tuple(tools), several=several is not False)
