"""`Inbox`: what the event loop has for the engine's thread. That thread sleeps in it while there is nothing to do."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from levanter.inference.requests import Request
from levanter.inference.scheduler import QueueFullError


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """A request to be answered.

    Attributes:
        request: the request.
        score: whether its prompt is scored before it is gone on with; a request for no tokens is only scored.
    """

    request: Request
    score: bool = False

    @property
    def tokens(self) -> int:
        """What of the queue it takes."""
        return len(self.request.tokens) * self.request.params.n


@dataclass(frozen=True, kw_only=True)
class Cancel:
    """Nobody wants more of a request.

    Attributes:
        request: its id.
        choice: which choice; None for all.
    """

    request: str
    choice: int | None = None


@dataclass(frozen=True, kw_only=True)
class Drain:
    """Everything that is going on ends where it is, as if it had reached its `max_tokens`."""


Letter: TypeAlias = Submitted | Cancel | Drain


class InboxClosedError(Exception):
    """Nobody reads letters any more."""


class Inbox:
    """Letters for the engine's thread, and a bound on what waits.

    Args:
        max_queued_tokens: of prompts that wait; a single request may have more.
    """

    def __init__(self, max_queued_tokens: int):
        self.max_queued_tokens = max_queued_tokens
        self._changed = threading.Condition()
        self._letters: list[Letter] = []
        self._queued = 0
        self._closed = False

    @property
    def queued_tokens(self) -> int:
        """Tokens of prompts that wait, in here or at the engine."""
        with self._changed:
            return self._queued

    def submit(self, submitted: Sequence[Submitted]) -> None:
        """Puts requests in, all of them or none.

        Raises:
            QueueFullError: too much waits already.
            InboxClosedError: nobody reads them any more.
        """
        new = sum(each.tokens for each in submitted)
        with self._changed:
            if self._closed:
                raise InboxClosedError
            if self._queued and self._queued + new > self.max_queued_tokens:
                raise QueueFullError(
                    f"{self._queued} tokens wait, {new} more would be over the {self.max_queued_tokens} of the queue"
                )
            self._queued += new
            self._letters += submitted
            self._changed.notify()

    def post(self, letter: Cancel | Drain) -> None:
        """Puts a letter in that always finds room."""
        with self._changed:
            self._letters.append(letter)
            self._changed.notify()

    def close(self) -> None:
        """Lets the engine's thread go; nothing more comes in."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def leave(self) -> list[Letter]:
        """Closes it; what nobody has read."""
        with self._changed:
            self._closed = True
            left, self._letters = self._letters, []
            return left

    def take(self, *, wait: bool) -> list[Letter] | None:
        """All letters; None when the inbox is closed.

        Args:
            wait: whether to sleep until there are some.
        """
        with self._changed:
            while wait and not self._letters and not self._closed:
                self._changed.wait()
            taken, self._letters = self._letters, []
            return None if self._closed else taken

    def report(self, waiting: int) -> None:
        """What waits at the engine, now that all that was taken is there."""
        with self._changed:
            self._queued = waiting + sum(each.tokens for each in self._letters if isinstance(each, Submitted))
