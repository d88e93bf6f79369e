"""A model at the terminal: lines go in, texts come out as they grow.

Ctrl-C ends the answer that is being written, and at the prompt the line; pressed twice during one answer it ends the
program, as it does everywhere. Ctrl-D ends the session. Lines may come from a file or a pipe, too: then what cannot be
answered is said and makes the exit code 2.
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from levanter.base.exit_codes import OK
from levanter.commands.cli.signals import interrupts_delegated
from levanter.commands.generate.chat_session import ChatTurn, Dialogue
from levanter.config.errors import did_you_mean
from levanter.inference.prompts import PromptRequest

PROMPT = "> "
HELP = """\
a line         {line}
/text TEXT     goes on with a text as it is
/new           forgets the conversation
/help          shows this
/exit, Ctrl-D  ends; Ctrl-C ends an answer"""


@dataclass(kw_only=True)
class SessionStats:
    """What a session at the terminal came to.

    Attributes:
        answers: how many.
        tokens: generated.
        seconds: from each question to its last token, together.
        refused: what could not be answered, by number.
        failed: what went wrong while it was answered, by number.
        exit_code: of the program.
    """

    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    refused: dict[int, str] = field(default_factory=dict[int, str])
    failed: dict[int, str] = field(default_factory=dict[int, str])
    exit_code: int = OK


class Terminal:
    """Asks for lines and answers them.

    Args:
        dialogue: the model.
        write: shows text.
        read: the next line, after a prompt; raises EOFError behind the last one.
    """

    def __init__(
        self,
        dialogue: Dialogue,
        *,
        write: Callable[[str], object] | None = None,
        read: Callable[[str], str] | None = None,
    ):
        self.dialogue = dialogue
        self.session = SessionStats()
        self._write = write or _write
        self._read = read or _reader()
        self._messages: list[dict[str, object]] = []
        self._answering = self._stop = False
        self._line = 0

    def show(self, text: str) -> None:
        """Shows a line of our own."""
        self._write(f"{text}\n")

    def run(self) -> SessionStats:
        """Answers line by line, until there are no more."""
        self.show(f"{'a conversation' if self.chats else 'a text'}; /help says what else there is")
        words: Mapping[str, Callable[[str], object]] = {
            "/text": self.complete,
            "/new": lambda _: self.forget(),
            "/help": lambda _: self.show(HELP.format(line="says something" if self.chats else "is gone on with")),
        }

        def take(line: str) -> bool:
            word, _, rest = line.strip().partition(" ")
            if word in ("/exit", "/quit"):
                return False
            if word in words:
                words[word](rest)
            elif word.startswith("/"):
                self.refuse(f"{word}: no such command{did_you_mean(word, [*words, '/exit'])}")
            else:
                (self.chat if self.chats else self.complete)(line)
            return True

        self.each_line(take)
        return self.session

    @property
    def chats(self) -> bool:
        """Whether the model takes conversations."""
        return self.dialogue.reader.template is not None

    def each_line(self, take: Callable[[str], bool], prompt: str = PROMPT) -> None:
        """Gives `take` the lines that are not empty, until it has enough or there are no more."""
        with interrupts_delegated(self._pressed):
            while True:
                try:
                    line = self._read(prompt)
                    self._line += 1
                    if line.strip() and not take(line):
                        return
                except EOFError:
                    self._write("\n" if at_terminal() else "")
                    return
                except KeyboardInterrupt:
                    if self._answering or not at_terminal():
                        raise
                    self._write("\n")

    def once(self, act: Callable[[], object]) -> None:
        """Does one thing, whose answers Ctrl-C ends."""
        with interrupts_delegated(self._pressed):
            act()

    def ask(self, asked: Callable[[Dialogue], PromptRequest]) -> ChatTurn | None:
        """Answers a request that stands for itself."""
        return self._answer(lambda: asked(self.dialogue))

    def complete(self, text: str) -> ChatTurn | None:
        """Goes on with a text."""
        return self._answer(lambda: self.dialogue.complete(text))

    def chat(self, text: str) -> ChatTurn | None:
        """Says something in the conversation; what could not be answered is no part of it."""
        self._messages.append({"role": "user", "content": text})
        said = self._answer(lambda: self.dialogue.chat(self._messages))
        if said is None or said.error is not None:
            self._messages.pop()
        else:
            self._messages.append({"role": "assistant", "content": said.text})
        return said

    def forget(self) -> None:
        """Begins another conversation."""
        self._messages.clear()

    def refuse(self, why: str) -> None:
        """Says that a line cannot be answered."""
        self.session.refused[self._line] = why
        self.show(f"error: {why}")

    def _answer(self, asked: Callable[[], PromptRequest]) -> ChatTurn | None:
        try:
            request = asked()
            self._answering, self._stop = True, False
            said = self.dialogue.say(request, self._write, lambda: self._stop)
        except ValueError as error:
            self.refuse(str(error))
            return None
        finally:
            self._answering = False
        self._write("\n")
        self.session.answers += 1
        self.session.tokens += said.tokens
        self.session.seconds += said.seconds
        if said.error is not None:
            self.session.failed[self._line] = said.error
            self.show(f"error: {said.error}")
        else:
            self.show(_figures(said))
        return said

    def _pressed(self) -> None:
        """What Ctrl-C does."""
        if self._answering and not self._stop:
            self._stop = True
        else:
            raise KeyboardInterrupt


def _figures(said: ChatTurn) -> str:
    """How fast an answer came, and why it ended where it did."""
    ended = {"stop": "", "length": ", cut at max_tokens or the context", "cancelled": ", stopped"}[said.reason]
    first = "" if said.first is None else f", the first after {said.first:.2f} s"
    rate = "" if said.rate is None else f", then {said.rate:.1f} a second"
    return f"[{said.tokens} tokens{first}{rate}{ended}]"


def at_terminal() -> bool:
    """Whether somebody sits at it: lines come from no file and no pipe."""
    return sys.stdin is not None and sys.stdin.isatty()


def _reader() -> Callable[[str], str]:
    """How lines are read: with editing and a history at a terminal, without a prompt elsewhere."""
    if not at_terminal():
        return lambda _: input()
    with suppress(ImportError):
        import readline  # noqa: F401 - `input` uses it where it is imported
    return input


def _write(text: str) -> None:
    print(text, end="", flush=True)
