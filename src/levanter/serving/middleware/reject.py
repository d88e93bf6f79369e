"""How the doors in front of the application turn a request away: no route hears of it, observers do."""

from starlette.types import Message, Scope, Send

from levanter.serving.errors import ApiError, JsonAnswer
from levanter.serving.events import Observer, Rejected, ServerEvent


def unobserved(event: ServerEvent) -> None:
    """Nobody counts."""
    del event


async def turn_away(error: ApiError, scope: Scope, send: Send, observe: Observer) -> None:
    """Answers a request with an error.

    Args:
        error: why it is not let in.
        scope, send: of the request.
        observe: is told.
    """
    assert error.reason is not None, "a request is turned away for a reason"
    observe(Rejected(route=scope["path"], reason=error.reason, status=error.status))
    await JsonAnswer(error.body, status=error.status, headers=error.headers)(scope, _nothing, send)


async def _nothing() -> Message:
    raise AssertionError("an error is sent without reading anything")
