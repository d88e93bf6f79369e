"""`Backlog`: requests that have not come to the engine yet, in their order."""

from levanter.inference.requests import Request
from levanter.serving.inbox import Submitted


class Backlog:
    """Requests in their order, with what they take; each of them is found and counted without looking at the others.

    Args:
        context: positions of a row.
    """

    def __init__(self, context: int):
        self._context = context
        self._there: dict[str, Submitted] = {}
        self.tokens = self.choices = self.new_tokens = 0

    def __bool__(self) -> bool:
        return bool(self._there)

    def append(self, submitted: Submitted) -> None:
        """Puts a request behind all others."""
        self._there[submitted.request.id] = submitted
        self._count(submitted, 1)

    def pop(self) -> Submitted:
        """Takes the first one out."""
        return self._out(next(iter(self._there)))

    def discard(self, id: str) -> None:
        """Takes a request out, if it is there."""
        if id in self._there:
            self._out(id)

    def clear(self) -> list[Request]:
        """Takes all out."""
        return [self.pop().request for _ in range(len(self._there))]

    def _out(self, id: str) -> Submitted:
        found = self._there.pop(id)
        self._count(found, -1)
        return found

    def _count(self, submitted: Submitted, sign: int) -> None:
        """Adds to what all of them take: tokens of prompts, choices, and tokens that these may get."""
        request = submitted.request
        self.tokens += sign * submitted.tokens
        self.choices += sign * request.params.n
        self.new_tokens += sign * request.params.n * request.new_tokens(self._context)
