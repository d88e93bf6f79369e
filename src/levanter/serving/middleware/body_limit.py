"""The door that reads the body of a request, within bounds.

It is read whole before the application is called: it is JSON, which means nothing before its end, and whoever sends it
byte by byte keeps a connection and nothing else.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from levanter.base.input_limits import MIB, shown_bytes
from levanter.serving.errors import ApiError
from levanter.serving.events import Observer
from levanter.serving.limits import LimitsConfig
from levanter.serving.middleware.reject import turn_away, unobserved

LINGER_SECONDS = 2.0
"""How long a client that is refused may go on sending."""


class BodyLimit:
    """Reads the body of a request before the application is called, within bounds.

    Args:
        app: what is behind the door.
        limits: the bounds.
        observe: is told of whom is turned away.
    """

    def __init__(self, app: ASGIApp, *, limits: LimitsConfig, observe: Observer = unobserved):
        self._app, self._observe = app, observe
        self._most, self._most_together = int(limits.max_body_mib * MIB), int(limits.max_bodies_mib * MIB)
        self._seconds = limits.body_seconds
        self._together = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on with its whole body, or answers it with 408, 413 or 503."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        reading = _Reading(self)
        try:
            try:
                async with asyncio.timeout(self._seconds):
                    body = await reading.read(scope, receive)
            except TimeoutError:
                said = f"the body of the request did not arrive within {self._seconds:g} s"
                body = ApiError(408, said, reason="limit", headers={"Connection": "close"})
            if isinstance(body, ApiError):
                await turn_away(body, scope, _lingering(receive, send), self._observe)
            elif body is not None:
                await self._app(scope, _then(body, receive, reading.release), send)
        finally:
            reading.release()

    def count(self, nbytes: int, so_far: int) -> ApiError | None:
        """Counts bytes of a request that has so many already.

        Returns:
            Why they are not taken, or None.
        """
        if so_far + nbytes > self._most:
            said = f"the body has more than {shown_bytes(self._most)}, the limit for a request"
            return ApiError(413, said, reason="too_large", headers={"Connection": "close"})
        if self._together + nbytes > self._most_together:
            said = f"requests with {shown_bytes(self._most_together)} are being read; try again"
            headers = {"Connection": "close", "Retry-After": "1"}
            return ApiError(503, said, reason="limit", kind="server_error", headers=headers)
        self._together += nbytes
        return None

    def forget(self, nbytes: int) -> None:
        """Counts bytes no longer."""
        self._together -= nbytes


class _Reading:
    """The body of one request on its way in."""

    def __init__(self, door: BodyLimit):
        self._door = door
        self.counted = 0

    async def read(self, scope: Scope, receive: Receive) -> bytes | ApiError | None:
        """The body, why it is not taken, or None if the client left."""
        announced = _announced(scope["headers"])
        if announced is not None and (refusal := self._count(announced)) is not None:
            return refusal
        parts: list[bytes] = []
        have = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            have += len(part)
            if have > self.counted and (refusal := self._count(have - self.counted)) is not None:
                return refusal
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    def release(self) -> None:
        """The application has made something else of the body, or nobody wants it."""
        self._door.forget(self.counted)
        self.counted = 0

    def _count(self, nbytes: int) -> ApiError | None:
        refusal = self._door.count(nbytes, self.counted)
        if refusal is None:
            self.counted += nbytes
        return refusal


def _announced(headers: Collection[tuple[bytes, bytes]]) -> int | None:
    """The length that a request says its body has."""
    for name, value in headers:
        if name == b"content-length" and value.isdigit():
            return int(value[:20])
    return None


def _then(body: bytes, receive: Receive, taken: Callable[[], None]) -> Receive:
    """Gives a whole body, and then what the server has to say; who asks for that has taken the body."""
    waiting = [body]

    async def whole() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        taken()
        return await receive()

    return whole


def _lingering(receive: Receive, send: Send) -> Send:
    """Sends an answer to a request whose body is not read, and lets the client read it.

    A connection that is closed while bytes of a request wait in it is reset, and what it answered is lost on the way.
    So what comes is thrown away for a moment, until the client has sent all or left.
    """

    async def lingering(message: Message) -> None:
        if message["type"] != "http.response.body":
            await send(message)
            return
        await send({**message, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b""})

    return lingering
