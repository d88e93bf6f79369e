"""`ServerEvent`: what happens in a server, for whoever counts. No event holds text of a prompt or of an answer.

Observers are called on the event loop, in the order of what happens; times are seconds of `time.monotonic`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

EndReason: TypeAlias = Literal["stop", "length", "cancelled", "failed"]
"""Why a choice ended: as the answer says, because its client left or was cut off, or because it could not go on."""
RejectReason: TypeAlias = Literal[
    "invalid", "too_long", "too_large", "queue_full", "draining", "key", "limit", "origin", "absent"
]
"""Why nothing was begun: no valid request, more than the context, a body that is too large, too much waits, the server
is ending, no key or a wrong one, too many requests or too slow ones, from a page of another site, or no such model or
route."""


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """A request is in the queue.

    Attributes:
        request: its id.
        route: the path that it came by.
        prompt_tokens: of its prompt.
        choices: that it has.
        at: when.
    """

    request: str
    route: str
    prompt_tokens: int
    choices: int
    at: float


@dataclass(frozen=True, kw_only=True)
class Produced:
    """A choice has more tokens.

    Attributes:
        request, choice: whose.
        tokens: how many more.
        first: whether these are its first ones.
        since: seconds since its tokens before, or since it was admitted.
        at: when they were read from the devices.
    """

    request: str
    choice: int
    tokens: int
    first: bool
    since: float
    at: float


@dataclass(frozen=True, kw_only=True)
class ChoiceEnded:
    """A choice has ended.

    Attributes:
        request, choice: which.
        reason: why.
        tokens: that it has.
        since: seconds since it was admitted.
        at: when.
    """

    request: str
    choice: int
    reason: EndReason
    tokens: int
    since: float
    at: float


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A request was refused.

    Attributes:
        route: the path that it came by.
        reason: why.
        status: of the answer.
    """

    route: str
    reason: RejectReason
    status: int


ServerEvent: TypeAlias = Admitted | Produced | ChoiceEnded | Rejected
Observer: TypeAlias = Callable[[ServerEvent], None]
"""Is told what happens, on the event loop: it must not wait for anything."""


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """What the engine is doing, as of its last step.

    Attributes:
        rows: rows that there are.
        running: rows that run.
        waiting: choices that wait for one, and prompts that wait to be scored.
        waiting_tokens: of their prompts.
        drain_seconds: in which all of these and those that run are likely to be done.
        pages: of the cache, over all shards.
        pages_free: of these, how many nobody holds; pages that are kept for prompts that begin alike are free.
        computed_tokens: of prompts, computed so far; those of rows that gave way count each time.
        shared_tokens: of prompts, that nobody had to compute, since another row had.
    """

    rows: int
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    drain_seconds: float = 0.0
    pages: int = 0
    pages_free: int = 0
    computed_tokens: int = 0
    shared_tokens: int = 0
