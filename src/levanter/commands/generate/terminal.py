"""An interactive session: reads lines from the terminal and streams the answers.

Ctrl-C ends the current answer, or discards the line at the prompt; pressed twice during one answer it ends the program.
Ctrl-D ends the session. Lines may also come from a file or a pipe; then a line that cannot be answered makes the exit
code 2.
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
/text TEXT     continues a text without the chat template
/new           starts a new conversation
/help          shows this
/exit, Ctrl-D  ends the session; Ctrl-C ends an answer"""


@dataclass(kw_only=True)
class SessionStats:
    """Statistics of a session.

    Attributes:
        answers: number of answers.
        tokens: generated tokens.
        seconds: total time from each question to its last token.
        refused: errors of lines that could not be answered, by line number.
        failed: errors of answers that could not be finished, by line number.
        exit_code: of the program.
    """

    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    refused: dict[int, str] = field(default_factory=dict[int, str])
    failed: dict[int, str] = field(default_factory=dict[int, str])
    exit_code: int = OK


class Terminal:
    """Reads lines and answers them.

    Args:
        dialogue: the model.
        write: shows text.
        read: returns the next line after showing a prompt; raises EOFError after the last one.
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
        """Shows a line of the program itself."""
        self._write(f"{text}\n")

    def run(self) -> SessionStats:
        """Answers line by line until the input ends."""
        self.show(f"{'a conversation' if self.chats else 'a text'}; /help lists the commands")
        words: Mapping[str, Callable[[str], object]] = {
            "/text": self.complete,
            "/new": lambda _: self.forget(),
            "/help": lambda _: self.show(HELP.format(line="sends a message" if self.chats else "is continued")),
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

        self.read_lines(take)
        return self.session

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return self.dialogue.reader.template is not None

    def read_lines(self, take: Callable[[str], bool], prompt: str = PROMPT) -> None:
        """Passes each non-empty line to `take` until it returns False or the input ends."""
        # SIGINT reaches `_pressed` instead of the handler that ends the run.
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
                # Ctrl-C at the prompt discards the line, as in a shell; during an answer it arrives here only when
                # pressed twice.
                except KeyboardInterrupt:
                    if self._answering or not at_terminal():
                        raise
                    self._write("\n")

    def once(self, act: Callable[[], object]) -> None:
        """Runs one action during which Ctrl-C ends the current answer."""
        with interrupts_delegated(self._pressed):
            act()

    def ask(self, make_request: Callable[[Dialogue], PromptRequest]) -> ChatTurn | None:
        """Answers a request outside of the conversation."""
        return self._answer(lambda: make_request(self.dialogue))

    def complete(self, text: str) -> ChatTurn | None:
        """Continues a text."""
        return self._answer(lambda: self.dialogue.complete(text))

    def chat(self, text: str) -> ChatTurn | None:
        """Adds a message to the conversation and answers it; a message that fails is removed again."""
        self._messages.append({"role": "user", "content": text})
        # The template is applied to the whole conversation, so the message must be in it already.
        turn = self._answer(lambda: self.dialogue.chat(self._messages))
        if turn is None or turn.error is not None:
            # Otherwise the next turn would contain two user messages in a row.
            self._messages.pop()
        else:
            self._messages.append({"role": "assistant", "content": turn.text})
        return turn

    def forget(self) -> None:
        """Starts a new conversation."""
        self._messages.clear()

    def refuse(self, why: str) -> None:
        """Records and shows that a line cannot be answered."""
        self.session.refused[self._line] = why
        self.show(f"error: {why}")

    def _answer(self, make_request: Callable[[], PromptRequest]) -> ChatTurn | None:
        try:
            request = make_request()
            # From here on Ctrl-C ends the answer instead of discarding the line.
            self._answering, self._stop = True, False
            turn = self.dialogue.say(request, self._write, lambda: self._stop)
        except ValueError as error:
            self.refuse(str(error))
            return None
        # In any case, so that the next Ctrl-C counts as one at the prompt.
        finally:
            self._answering = False
        self._write("\n")
        self.session.answers += 1
        self.session.tokens += turn.tokens
        self.session.seconds += turn.seconds
        if turn.error is not None:
            self.session.failed[self._line] = turn.error
            self.show(f"error: {turn.error}")
        else:
            self.show(_figures(turn))
        return turn

    def _pressed(self) -> None:
        """Handles Ctrl-C."""
        # The first Ctrl-C asks the answer to end after its current token, the second one does not wait.
        if self._answering and not self._stop:
            self._stop = True
        else:
            raise KeyboardInterrupt


def _figures(turn: ChatTurn) -> str:
    """The speed of an answer and the reason for its end, in a line."""
    ended = {"stop": "", "length": ", cut at max_tokens or the context", "cancelled": ", stopped"}[turn.reason]
    first = "" if turn.first is None else f", the first after {turn.first:.2f} s"
    rate = "" if turn.rate is None else f", then {turn.rate:.1f} a second"
    return f"[{turn.tokens} tokens{first}{rate}{ended}]"


def at_terminal() -> bool:
    """Whether standard input is a terminal, not a file or a pipe."""
    return sys.stdin is not None and sys.stdin.isatty()


def _reader() -> Callable[[str], str]:
    """The function that reads a line: with editing and history at a terminal, without a prompt elsewhere."""
    if not at_terminal():
        return lambda _: input()
    with suppress(ImportError):
        import readline  # noqa: F401 - `input` uses it where it is imported
    return input


def _write(text: str) -> None:
    print(text, end="", flush=True)
