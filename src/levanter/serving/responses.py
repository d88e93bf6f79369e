"""`Reply`: an answer that is still being made, and that nobody makes any more when its client has left.

What a client has not read after a while, or what has piled up for it, ends its answer too: nobody waits for it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from levanter.base.json_types import Json
from levanter.serving import sse
from levanter.serving.errors import ApiError, JsonAnswer
from levanter.serving.service import PendingRequest

READ_SECONDS = 30.0
"""How long a client may take to read what it was sent."""


class Reply(Response):
    """An answer that comes of a ticket.

    Args:
        ticket: what it waits for.
        id: of the answer, which is in its head too.
    """

    def __init__(self, ticket: PendingRequest, *, id: str):
        super().__init__()
        self._ticket, self._named = ticket, {"x-request-id": id}

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answer, until it is sent, its client leaves, or it reads too slowly."""
        work = asyncio.ensure_future(self._send(scope, receive, send))
        left = asyncio.ensure_future(_left(receive))
        cut = asyncio.ensure_future(self._ticket.cut.wait())
        try:
            await asyncio.wait((work, left, cut), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            self._ticket.close()
            for task in (work, left, cut):
                task.cancel()
            await asyncio.gather(work, left, cut, return_exceptions=True)


async def _left(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


class JsonReply(Reply):
    """An answer that is sent when all of it is there.

    Args:
        ticket: what it waits for.
        made: makes it.
        id: of it.
    """

    def __init__(self, ticket: PendingRequest, made: Callable[[], Awaitable[Mapping[str, Json]]], *, id: str):
        super().__init__(ticket, id=id)
        self._made = made

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = JsonAnswer(await self._made(), headers=self._named)
        except ApiError as error:
            answer = JsonAnswer(error.body, status=error.status, headers={**error.headers, **self._named})
        await answer(scope, receive, send)


class SseReply(Reply):
    """An answer as server-sent events, each as soon as it is there.

    Args:
        ticket: what it waits for.
        events: they, the one that ends a stream included; what goes wrong on the way is an event as well.
        id: of it.
    """

    def __init__(self, ticket: PendingRequest, events: AsyncIterator[bytes], *, id: str):
        super().__init__(ticket, id=id)
        self._events = events

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        headers = {"content-type": sse.MEDIA_TYPE, **sse.HEADERS, **self._named}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        write = _Watched(send, late=self._ticket.cut.set)
        try:
            await write({"type": "http.response.start", "status": 200, "headers": raw})
            try:
                async for event in self._events:
                    await write(_more(event))
            except ApiError as error:
                await write(_more(sse.event(error.body) + sse.DONE))
            await write({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            write.end()


class _Watched:
    """Sends messages, and says when one has not been taken for `READ_SECONDS`.

    One timer looks after all of them: to set one for each message took as long as to send it.

    Args:
        send: ASGI's.
        late: is called when a message is late.
    """

    def __init__(self, send: Send, *, late: Callable[[], None]):
        self._send, self._late = send, late
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._timer = self._loop.call_later(READ_SECONDS, self._look)

    async def __call__(self, message: Message) -> None:
        """Sends a message."""
        self._since = self._loop.time()
        await self._send(message)
        self._since = None

    def end(self) -> None:
        """Looks no more."""
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        since = now if self._since is None else self._since
        if now - since >= READ_SECONDS:
            self._late()
        else:
            self._timer = self._loop.call_at(since + READ_SECONDS, self._look)


def _more(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}
