"""From a request to its answer: the way that completions and conversations have in common."""

from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from levanter.serving.answering import Streamed, Whole
from levanter.serving.building import AskedCall, Builder
from levanter.serving.reading import read_body
from levanter.serving.service import Service, Ticket
from levanter.serving.token_texts import TokenTexts

C = TypeVar("C", bound=AskedCall)


async def answered(
    request: Request,
    *,
    path: str,
    read: Callable[[bytes, Service], C],
    build: Callable[[C, Ticket, Service, TokenTexts], Builder],
) -> Response:
    """Reads a request, asks the engine, and answers with what comes of it.

    Args:
        request: the request.
        path: that it came by.
        read: makes a call of its body; it is done beside the event loop.
        build: makes the answer to the call.

    Raises:
        ApiError: it cannot be answered.
    """
    service: Service = request.app.state.service
    raw = await read_body(request)
    call = await service.off_loop(lambda: read(raw, service))
    ticket = service.ask(call.submitted, route=path, streamed=call.stream)
    answer = build(call, ticket, service, request.app.state.texts)
    if call.stream:
        return Streamed(ticket, answer.events(), id=call.id)
    return Whole(ticket, answer.whole, id=call.id)
