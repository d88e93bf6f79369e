"""Chat templates: a conversation → text, and which parts of it the assistant wrote.

A template is Jinja, in the dialect that Hugging Face tokenizers carry. In scope is what `apply_chat_template` of
transformers 5 passes: `messages`, the tokenizer's special tokens by name (`bos_token`, …), `tools`, `documents` and
`add_generation_prompt`. `raise_exception` refuses a conversation, and `{% generation %}` … `{% endgeneration %}`
encloses what the assistant wrote. Of several templates, the one named `tool_use` writes conversations with tools.
Templates run in a sandbox, because they come with downloaded files.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from levanter.base.bounded_json import lone_surrogate
from levanter.base.input_limits import MIB, read_bounded
from levanter.data.errors import DataError
from levanter.data.record_values import ParsedArguments
from levanter.data.template_sandbox import Sandbox, run
from levanter.data.tokenizer import TemplateTokenizer, Tokenizer
from levanter.io.paths import open_read

# Marks around generated text while a template runs: noncharacters, which no text has.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_MARKS = re.compile(f"[{_BEGIN}{_END}]")
NO_TEXT = re.compile("[\ud800-\udfff\ufdd0-\ufdef]")
"""Characters that no text of a conversation has: surrogates, and noncharacters, which serve as marks in templates."""


class _Generation(Extension):
    """`{% generation %}`: marks the text that its body renders."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own attribute

    def parse(self, parser: Parser) -> nodes.Node:
        # A call block passes its body to `_mark` as the function `caller`.
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    @staticmethod
    def _mark(caller: Callable[[], str]) -> str:
        return f"{_BEGIN}{caller()}{_END}"


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template, ready to run.

    Attributes:
        text: the template.
        tools_text: the template of conversations with tools; None for the same.
        tokens: special tokens by the names of their variables; a name that is missing is not defined.
        where: its key in the configuration, for messages.
    """

    text: str
    tools_text: str | None = None
    tokens: Mapping[str, str] = field(default_factory=dict[str, str])
    where: str = "chat_template"

    @property
    def digest(self) -> str:
        """Hex SHA-256 of the text, or of both texts."""
        texts = self.text if self.tools_text is None else json.dumps([self.text, self.tools_text])
        return hashlib.sha256(texts.encode()).hexdigest()

    def selected(self, variables: Mapping[str, Any]) -> "ChatTemplate":
        """The template for a conversation with these variables, which may be the one for tools."""
        return self if self.tools_text is None or variables.get("tools") is None else self._for_tools

    @cached_property
    def _for_tools(self) -> "ChatTemplate":
        assert self.tools_text is not None
        return replace(self, text=self.tools_text, tools_text=None)

    @property
    def marks_generation(self) -> bool:
        """Whether the template, that of conversations without tools, marks what the assistant wrote."""
        return re.search(r"{%-?\s*generation\s*-?%}", self.text) is not None

    @cached_property
    def _template(self) -> Template:
        # `loopcontrols` (`break`, `continue`) is enabled in transformers too, and some templates use it.
        environment = Sandbox(extensions=[_Generation, "jinja2.ext.loopcontrols"])
        try:
            return environment.from_string(self.text)
        # Jinja compiles to Python, whose parser has limits of its own on nesting.
        except (RecursionError, MemoryError, SyntaxError):
            raise DataError(f"{self.where}: not a template that can be run: it is nested too deep") from None
        except TemplateError as error:
            raise DataError(f"{self.where}: not a Jinja template ({error})") from error

    def check(self) -> None:
        """Raises a `DataError` if a text is not a valid template."""
        if (match := NO_TEXT.search(self.text)) is not None:
            raise DataError(f"{self.where}: has U+{ord(match.group()):04X} at {match.start()}, which no text contains")
        assert self._template is not None
        if self.tools_text is not None:
            self._for_tools.check()

    def render(
        self, messages: Sequence[Any], variables: Mapping[str, Any], origin: str
    ) -> tuple[str, list[tuple[int, int]]]:
        """Renders a conversation; returns the text and the character spans that the template marks as the assistant's.

        Raises:
            DataError: the template refuses the messages.
        """
        # None where there are none: templates ask `tools is not none` of a variable that is always defined.
        defaults = {**self.tokens, "tools": None, "documents": None, "add_generation_prompt": False}
        try:
            template = self.selected(variables)._template
            prepared = [_prepared(message) for message in messages]
            # `messages` last: a record's further arguments must not replace the conversation.
            marked = _render_any(
                lambda values: run(lambda: template.render(**{**defaults, **variables, "messages": values})), prepared
            )
        # A template is foreign code: besides its own refusals it may fail with any of these on a message of unexpected
        # shape.
        except _FAILURES as error:
            where = _error_line(error)
            raise DataError(f"{origin}: the chat template refuses these messages{where} ({error})") from error
        _require_proportion(marked, messages, variables, origin)
        # Positions are counted in the text without marks.
        pieces = _MARKS.split(marked)
        marks = _MARKS.findall(marked)
        spans, position, opened = [], 0, None
        for piece, mark in zip(pieces, [*marks, ""], strict=True):
            position += len(piece)
            # A begin mark without its end (a template that stops within the block) gives no span.
            if mark == _BEGIN:
                opened = position
            elif mark == _END and opened is not None:
                spans.append((opened, position))
                opened = None
        text = "".join(pieces)
        # Values were checked, but a template may write half of a surrogate pair itself.
        if (start := lone_surrogate(text)) is not None:
            raise DataError(f"{origin}: the chat template writes U+{ord(text[start]):04X}, which no text contains")
        return text, spans


_FAILURES = (TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""What a template raises: its own refusals, and errors of its expressions."""


def _render_any(render: Callable[[Sequence[Any]], str], messages: Sequence[Any]) -> str:
    """Renders messages in the form that the template understands.

    Templates differ in what they expect of a message that calls tools. Its content is absent, and a template that adds
    it to a text fails: then it is an empty text. Its arguments are an object, and a template that expects JSON text
    fails, or writes Python's form of the object: then they are JSON text.
    """
    forms = [messages]
    if any("content" not in message for message in messages):
        forms.append([{"content": "", **message} for message in messages])
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    arguments = [value for call in calls if isinstance(value := _arguments(call), Mapping) and value]
    if arguments:
        forms += [[_with_argument_text(message) for message in form] for form in forms]
    first_error, python_form = None, None
    for form in forms:
        try:
            text = render(form)
        except _FAILURES as error:
            first_error = first_error or error
            continue
        if not any(str(value) in text for value in arguments):
            return text
        # A content may have the same characters, and then every form has them.
        python_form = python_form or text
    if python_form is None:
        assert first_error is not None
        raise first_error
    return python_form


def _arguments(call: Mapping[str, Any]) -> object:
    return call.get("function", call).get("arguments")


def _with_argument_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message with the arguments of its calls as JSON text."""
    if not message.get("tool_calls"):
        return message

    def as_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
        value = _arguments(call)
        text = value.json_text if isinstance(value, ParsedArguments) else json.dumps(value, ensure_ascii=False)
        inner = {**call.get("function", call), "arguments": text}
        return {**call, "function": inner} if "function" in call else inner

    return {**message, "tool_calls": [as_text(call) for call in message["tool_calls"]]}


_REASONING = ("reasoning_content", "thinking", "reasoning")


def _prepared(message: object) -> object:
    """A message as `apply_chat_template` gives it to a template."""
    if not isinstance(message, Mapping):
        return message
    # Parquet and clients write null for a field that is not there; templates would write "None", or fail.
    present = {key: value for key, value in message.items() if value is not None}
    reasoning = next((present[key] for key in _REASONING if key in present), None)
    # Published templates read the reasoning under either of two names.
    return present if reasoning is None else {"thinking": reasoning, **present, "reasoning_content": reasoning}


_FREE_CHARACTERS = MIB
_LARGEST_RATIO = 16


def _require_proportion(text: str, messages: Sequence[Any], variables: Mapping[str, Any], origin: str) -> None:
    """Refuses a text that is out of proportion to its conversation, before minutes are spent on its tokens.

    Raises:
        DataError: the text is longer than 1 Mi characters and 16 times the conversation.
    """
    if len(text) <= _FREE_CHARACTERS:
        return
    size = len(str(messages)) + len(str(variables))
    if len(text) > _FREE_CHARACTERS + _LARGEST_RATIO * size:
        raise DataError(
            f"{origin}: the chat template writes {len(text):,} characters for a conversation of {size:,}; the limit is "
            f"{_FREE_CHARACTERS:,} and {_LARGEST_RATIO} times the conversation"
        )


def select_template(tokenizer: Tokenizer, text: str | None, *, where: str = "chat_template") -> ChatTemplate | None:
    """The template of a run: the configured one, or else the tokenizer's; None if there is none.

    Args:
        tokenizer: the tokenizer, which has the special tokens and may have templates by name.
        text: the configured template, or the name of one of the tokenizer's; None for the tokenizer's.
        where: the key of the configured one, for messages.
    """
    files = tokenizer if isinstance(tokenizer, TemplateTokenizer) else None
    named = {} if files is None else files.chat_templates
    tokens = {} if files is None else files.named_tokens
    if text is not None:
        return ChatTemplate(text=named.get(text, text), tokens=tokens, where=where)
    if not named:
        return None
    names = ", ".join(sorted(named))
    # A conversation without tools is refused where the files have templates for other purposes only.
    missing = f"the tokenizer has the chat templates {names}, and none is named default: set chat_template to a name"
    default = named.get("default", "{{ raise_exception(" + json.dumps(missing) + ") }}")
    where = f"the chat template of {tokenizer.name}"
    return ChatTemplate(text=default, tools_text=named.get("tool_use"), tokens=tokens, where=where)


def is_template(text: str) -> bool:
    """Whether a text is a template rather than a path: paths contain no Jinja tag and no line break."""
    return "{{" in text or "{%" in text or "\n" in text


def template_text(template: str | None) -> str | None:
    """The text of a chat template that is given as text or as the path of a file.

    Raises:
        ValueError: the file is not UTF-8, or is larger than any template.
        MissingFileError: the file does not exist.
    """
    if template is None or is_template(template):
        return template
    with open_read(template) as file:
        try:
            return read_bounded(file, MIB, where=f"chat_template: {template}").decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"chat_template: {template}: not UTF-8 at byte {error.start}") from None


def _error_line(error: BaseException) -> str:
    """The line of the template that failed, if it is known: Jinja puts it into the traceback."""
    line, trace = None, error.__traceback__
    while trace is not None:
        # The innermost frame of the template, so keep the last match.
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return "" if line is None else f" at its line {line}"


def invalid_character(value: object, where: str) -> str | None:
    """Where a JSON value has a character that no text of a conversation has, in words; None where it has none.

    Args:
        value: text, or lists and objects of texts, whose keys are texts too.
        where: its key, for the words.
    """
    if isinstance(value, str):
        match = NO_TEXT.search(value)
        return match and f"{where}: has U+{ord(match.group()):04X} at {match.start()}, which no text contains"
    if isinstance(value, dict):
        for key, item in value.items():
            # A key with such a character cannot be printed itself.
            if (problem := invalid_character(key, f"a key of {where}")) is not None:
                return problem
            if (problem := invalid_character(item, f"{where}.{key}")) is not None:
                return problem
    if isinstance(value, list):
        for number, item in enumerate(value):
            if (problem := invalid_character(item, f"{where}[{number}]")) is not None:
                return problem
    return None
