"""Chat templates: a conversation → text, and which parts of it the assistant wrote.

A template is Jinja, in the dialect that Hugging Face tokenizers carry: `messages`, `bos_token`, `eos_token` and
`add_generation_prompt` are in scope, `raise_exception` refuses a conversation, and `{% generation %}` … `{%
endgeneration %}` encloses what the assistant wrote. Templates run in a sandbox, because they come with downloaded
files.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from levanter.base.bounded_json import lone_surrogate
from levanter.base.input_limits import MIB, read_bounded
from levanter.data.errors import DataError
from levanter.data.record_values import NO_TEXT, ParsedArguments
from levanter.data.template_sandbox import Sandbox, run
from levanter.io.paths import open_read

# Marks around generated text while a template runs: noncharacters, which no text has.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_MARKS = re.compile(f"[{_BEGIN}{_END}]")


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
        bos_token, eos_token: the values of the variables of these names.
        where: its key in the configuration, for messages.
    """

    text: str
    bos_token: str
    eos_token: str
    where: str = "chat_template"

    @property
    def marks_generation(self) -> bool:
        """Whether the template marks what the assistant wrote."""
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
        """Raises a `DataError` if the text is not a valid template."""
        if (match := NO_TEXT.search(self.text)) is not None:
            raise DataError(f"{self.where}: has U+{ord(match.group()):04X} at {match.start()}, which no text contains")
        assert self._template is not None

    def render(
        self, messages: Sequence[Any], variables: Mapping[str, Any], origin: str
    ) -> tuple[str, list[tuple[int, int]]]:
        """Renders a conversation; returns the text and the character spans that the template marks as the assistant's.

        Raises:
            DataError: the template refuses the messages.
        """
        defaults = {"bos_token": self.bos_token, "eos_token": self.eos_token, "add_generation_prompt": False}
        try:
            template = self._template
            # `messages` last: a record's further arguments must not replace the conversation.
            marked = _render_any(
                lambda values: run(lambda: template.render(**{**defaults, **variables, "messages": values})), messages
            )
        # A template is foreign code: besides its own refusals it may fail with any of these on a message of unexpected
        # shape.
        except _FAILURES as error:
            where = _error_line(error)
            raise DataError(f"{origin}: the chat template refuses these messages{where} ({error})") from error
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
