"""From a request to its answer: the way that completions and conversations have in common."""

from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from levanter.serving.request_parsing import read_body
from levanter.serving.request_schema import FORMATS
from levanter.serving.response_builder import AskedCall, Builder
from levanter.serving.responses import JsonReply, SseReply
from levanter.serving.service import PendingRequest, Service
from levanter.serving.token_strings import TokenTexts

C = TypeVar("C", bound=AskedCall)
SHORT_BODY = 2048
"""Bytes of a body that is read in less time than it takes to hand it to another thread, and to take turns with that at
the interpreter: in these turns every stream waits."""


def is_quickly_read(raw: bytes) -> bool:
    """Whether a body is short, and asks for nothing that takes long to understand whatever its length: a schema, an
    expression, a grammar. A name may be written by its characters' codes, so nothing that has codes is quick."""
    return len(raw) <= SHORT_BODY and b"\\u" not in raw and not any(name in raw for name in _SLOW)


_SLOW = tuple(name.encode() for name in FORMATS)


async def answered(
    request: Request,
    *,
    path: str,
    read: Callable[[bytes, Service], C],
    build: Callable[[C, PendingRequest, Service, TokenTexts], Builder],
    at_once: Callable[[bytes], bool] | None = None,
) -> Response:
    """Reads a request, asks the engine, and answers with what comes of it.

    Args:
        request: the request.
        path: that it came by.
        read: makes a call of its body.
        build: makes the answer to the call.
        at_once: whether a body is read on the event loop, and not beside it; None for none.

    Raises:
        ApiError: it cannot be answered.
    """
    service: Service = request.app.state.service
    raw = await read_body(request)
    if at_once is not None and at_once(raw):
        call = read(raw, service)
    else:
        call = await service.off_loop(lambda: read(raw, service))
    ticket = service.ask(call.submitted, route=path, streamed=call.stream)
    answer = build(call, ticket, service, request.app.state.texts)
    if call.stream:
        return SseReply(ticket, answer.events(), id=call.id)
    return JsonReply(ticket, answer.whole, id=call.id)
