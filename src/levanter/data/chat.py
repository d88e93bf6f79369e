"""Chat templates: a conversation → text, and which parts of it the assistant wrote.

A template is Jinja, in the dialect that Hugging Face tokenizers carry: `messages`, `bos_token`, `eos_token` and
`add_generation_prompt` are in scope, `raise_exception` refuses a conversation, and `{% generation %}` … `{%
endgeneration %}` encloses what the assistant wrote. It is run in a sandbox: a template is data.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from levanter.base.input_limits import MIB, read_bounded
from levanter.data.errors import DataError
from levanter.data.template_sandbox import Sandbox, run
from levanter.io.paths import open_read

# Marks around generated text while a template runs: noncharacters, which no text has.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_MARKS = re.compile(f"[{_BEGIN}{_END}]")
NO_TEXT = re.compile("[\ud800-\udfff\ufdd0-\ufdef]")
"""Characters that no text has: halves of pairs, and the noncharacters that are marks here."""


class _Generation(Extension):
    """`{% generation %}`: marks what is inside."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own attribute

    def parse(self, parser: Parser) -> nodes.Node:
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
        bos_token, eos_token: what it knows under these names.
        where: its key in the configuration, for messages.
    """

    text: str
    bos_token: str
    eos_token: str
    where: str = "chat_template"

    @property
    def marks_generation(self) -> bool:
        """Whether it says what the assistant wrote."""
        return re.search(r"{%-?\s*generation\s*-?%}", self.text) is not None

    @cached_property
    def _template(self) -> Template:
        environment = Sandbox(extensions=[_Generation, "jinja2.ext.loopcontrols"])
        try:
            return environment.from_string(self.text)
        except (RecursionError, MemoryError, SyntaxError):
            raise DataError(f"{self.where}: not a template that can be run: it is nested too deep") from None
        except TemplateError as error:
            raise DataError(f"{self.where}: not a Jinja template ({error})") from error

    def check(self) -> None:
        """Raises a `DataError` if it is no template."""
        assert self._template is not None

    def render(
        self, messages: Sequence[Any], more: Mapping[str, Any], origin: str
    ) -> tuple[str, list[tuple[int, int]]]:
        """A conversation as text, and the spans of characters that the assistant wrote.

        Raises:
            DataError: the template refuses the messages.
        """
        known = {"bos_token": self.bos_token, "eos_token": self.eos_token, "add_generation_prompt": False}
        try:
            template = self._template
            marked = run(lambda: template.render(**{**known, **more, "messages": messages}))
        except (TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            where = _error_line(error)
            raise DataError(f"{origin}: the chat template refuses these messages{where} ({error})") from error
        # Positions are counted in the text without marks.
        pieces = _MARKS.split(marked)
        marks = _MARKS.findall(marked)
        spans, place, opened = [], 0, None
        for piece, mark in zip(pieces, [*marks, ""], strict=True):
            place += len(piece)
            if mark == _BEGIN:
                opened = place
            elif mark == _END and opened is not None:
                spans.append((opened, place))
                opened = None
        return "".join(pieces), spans


def is_template(text: str) -> bool:
    """Whether a text is a template itself: no path has a tag of Jinja, or several lines."""
    return "{{" in text or "{%" in text or "\n" in text


def template_text(template: str | None) -> str | None:
    """A chat template, written down or in a file.

    Raises:
        ValueError: the file is not UTF-8, or is larger than any template.
        MissingFileError: it is not there.
    """
    if template is None or is_template(template):
        return template
    with open_read(template) as file:
        try:
            return read_bounded(file, MIB, where=f"chat_template: {template}").decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"chat_template: {template}: not UTF-8 at byte {error.start}") from None


def _error_line(error: BaseException) -> str:
    """The line of the template where it failed, where that is known: Jinja puts it into the traceback."""
    line, at = None, error.__traceback__
    while at is not None:
        if at.tb_frame.f_code.co_filename == "<template>":
            line = at.tb_lineno
        at = at.tb_next
    return "" if line is None else f" at its line {line}"
