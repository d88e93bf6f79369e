"""How the doors in front of the application turn a request away: no route hears of it, observers do.

The door that only HTTP comes through that is spoken here.

The door that other sites do not come through.

A page that somebody visits can make the browser send requests to this machine, also to a name of its own that it lets
point here. Where a key is asked for, neither has it; where there is none, the names in `Host` and `Origin` tell.

The door that counts the requests of each client address.

The door that looks at the key of requests.

The door that reads the body of a request, within bounds.

It is read whole before the application is called: it is JSON, which means nothing before its end, and whoever sends it
byte by byte keeps a connection and nothing else.

The doors of a server, one behind the other: who comes through all of them reaches a route.
"""

import asyncio
import contextlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from urllib.parse import urlsplit

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from levanter.base.input_limits import MIB, shown_bytes
from levanter.serving.api_key import ApiKey
from levanter.serving.errors import ApiError, JsonResponse
from levanter.serving.limits import LimitsConfig
from levanter.serving.metrics import Observer, RequestRejected, ServerEvent


def ignore_event(event: ServerEvent) -> None:
    """Nobody counts."""
    del event


async def reject(error: ApiError, scope: Scope, send: Send, observe: Observer) -> None:
    """Answers a request with an error.

    Args:
        error: why it is not let in.
        scope, send: of the request.
        observe: is told.
    """
    assert error.reason is not None, "a request is turned away for a reason"
    observe(RequestRejected(route=scope["path"], reason=error.reason, status=error.status))
    await JsonResponse(error.body, status=error.status, headers=error.headers)(scope, _receive_nothing, send)


async def _receive_nothing() -> Message:
    raise AssertionError("an error is sent without reading anything")


HTTP_VERSIONS = ("1.0", "1.1")


class HttpVersionCheck:
    """Turns away requests of other versions of HTTP: what they mean by the same words is not known.

    Args:
        app: what is behind the door.
        observe: is told of whom is turned away.
    """

    def __init__(self, app: ASGIApp, *, observe: Observer = ignore_event):
        self._app, self._observe = app, observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers it with 400."""
        version = scope.get("http_version", HTTP_VERSIONS[-1])
        if scope["type"] != "http" or version in HTTP_VERSIONS:
            await self._app(scope, receive, send)
            return
        said = f"HTTP/{version} is not spoken here, HTTP/{' and HTTP/'.join(HTTP_VERSIONS)} are"
        error = ApiError(400, said, reason="invalid", headers={"Connection": "close"})
        await reject(error, scope, send, self._observe)


LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
"""What a server that only this machine reaches is called by its clients."""


class SameOrigin:
    """Turns away what pages of other sites make a browser send.

    Args:
        app: what is behind the door.
        names: by which clients may call this server.
        observe: is told of whom is turned away.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        names: Collection[str] = LOCAL_NAMES,
        observe: Observer = ignore_event,
    ):
        self._app, self._observe = app, observe
        self._names = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers it with 403."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        # Browsers name the host; who names none is no browser.
        host, origin = headers.get(b"host"), headers.get(b"origin")
        problem = None
        if host is not None and _hostname(f"//{host}") not in self._names:
            problem = f"this server is not called {host!r}: it answers this machine alone, as {LOCAL_NAMES[0]}"
        elif origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
            problem = "pages of other sites may not ask this server"
        if problem is None:
            await self._app(scope, receive, send)
            return
        await reject(ApiError(403, problem, reason="origin", code="origin"), scope, send, self._observe)


def _hostname(url: str) -> str | None:
    """The host of a URL, in lower case; None where there is none."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


MAX_TRACKED_CLIENTS = 10_000
"""Addresses that are counted at most; those that were not heard of for longest are forgotten first."""


class RateLimit:
    """Requests of one client address within a minute, as a bucket that fills evenly.

    Args:
        app: what is behind the door.
        per_minute: requests; so many may come at once, too.
        observe: is told of whom is turned away.
        now: a clock in seconds.
        open_paths: what is not counted: probes.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        per_minute: int,
        observe: Observer = ignore_event,
        now: Callable[[], float] = time.monotonic,
        open_paths: Collection[str] = ("/health", "/ready", "/metrics"),
    ):
        self._app, self._per_minute, self._observe, self._now = app, per_minute, observe, now
        self._open = frozenset(open_paths)
        self._known: OrderedDict[str, tuple[float, float]] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers it with 429 and the seconds after which the next one is taken."""
        if scope["type"] != "http" or scope["path"] in self._open:
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        wait = self.wait_of(client[0] if client else "")
        if wait is None:
            await self._app(scope, receive, send)
            return
        error = ApiError(
            429,
            f"more than {self._per_minute:,} requests a minute from this address; the next in {wait} s",
            reason="limit",
            kind="rate_limit_error",
            code="rate_limit_exceeded",
            headers={"Retry-After": str(wait)},
        )
        await reject(error, scope, send, self._observe)

    def wait_of(self, address: str) -> int | None:
        """Counts a request of an address.

        Returns:
            None if it is taken, else the whole seconds after which one will be.
        """
        now, a_second = self._now(), self._per_minute / 60
        there, since = self._known.pop(address, (float(self._per_minute), now))
        there = min(float(self._per_minute), there + (now - since) * a_second)
        taken = there >= 1
        self._known[address] = (there - 1 if taken else there, now)
        while len(self._known) > MAX_TRACKED_CLIENTS:
            self._known.popitem(last=False)
        return None if taken else max(1, math.ceil((1 - there) / a_second))


OPEN_PATHS = ("/", "/health", "/ready")
"""What is answered without a key: the page, which says nothing of this server by itself, and probes."""

MISSING_KEY = ApiError(
    401,
    "this server asks for a key: send the header `Authorization: Bearer …`",
    reason="key",
    code="invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)
WRONG_KEY = ApiError(
    401,
    "the key in the header `Authorization` is not this server's",
    reason="key",
    code="invalid_api_key",
    headers={"WWW-Authenticate": 'Bearer error="invalid_token"'},
)


class RequireApiKey:
    """Lets in who carries the key.

    Args:
        app: what is behind the door.
        key: the key.
        observe: is told of whom is turned away.
        open_paths: what is answered without it.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        key: ApiKey,
        observe: Observer = ignore_event,
        open_paths: Collection[str] = OPEN_PATHS,
    ):
        self._app, self._key, self._observe, self._open = app, key, observe, frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers it with 401."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in self._open):
            await self._app(scope, receive, send)
            return
        carried = self._key.is_in(scope["headers"])
        if carried:
            await self._app(scope, receive, send)
            return
        await reject(MISSING_KEY if carried is None else WRONG_KEY, scope, send, self._observe)


LINGER_SECONDS = 2.0
"""How long a client that is refused may go on sending."""


class BodyLimit:
    """Reads the body of a request before the application is called, within bounds.

    Args:
        app: what is behind the door.
        limits: the bounds.
        observe: is told of whom is turned away.
    """

    def __init__(self, app: ASGIApp, *, limits: LimitsConfig, observe: Observer = ignore_event):
        self._app, self._observe = app, observe
        self._most, self._most_together = int(limits.max_body_mib * MIB), int(limits.max_bodies_mib * MIB)
        self._seconds = limits.body_seconds
        self._together = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on with its whole body, or answers it with 408, 413 or 503."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        reading = _BodyReader(self)
        try:
            try:
                async with asyncio.timeout(self._seconds):
                    body = await reading.read(scope, receive)
            except TimeoutError:
                said = f"the body of the request did not arrive within {self._seconds:g} s"
                body = ApiError(408, said, reason="limit", headers={"Connection": "close"})
            if isinstance(body, ApiError):
                await reject(body, scope, _drain_before_close(receive, send), self._observe)
            elif body is not None:
                await self._app(scope, _replay_body(body, receive, reading.release), send)
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


class _BodyReader:
    """The body of one request on its way in."""

    def __init__(self, door: BodyLimit):
        self._door = door
        self.counted = 0

    async def read(self, scope: Scope, receive: Receive) -> bytes | ApiError | None:
        """The body, why it is not taken, or None if the client left."""
        announced = _content_length(scope["headers"])
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


def _content_length(headers: Collection[tuple[bytes, bytes]]) -> int | None:
    """The length that a request says its body has."""
    for name, value in headers:
        if name == b"content-length" and value.isdigit():
            return int(value[:20])
    return None


def _replay_body(body: bytes, receive: Receive, taken: Callable[[], None]) -> Receive:
    """Gives a whole body, and then what the server has to say; who asks for that has taken the body."""
    waiting = [body]

    async def whole() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        taken()
        return await receive()

    return whole


def _drain_before_close(receive: Receive, send: Send) -> Send:
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


def middleware_stack(
    *,
    limits: LimitsConfig,
    key: ApiKey | None = None,
    names: Collection[str] | None = None,
    observe: Observer = ignore_event,
) -> Sequence[Middleware]:
    """The doors, the outermost first: what `serving.app.app` takes as its middleware.

    Args:
        limits: what clients may send.
        key: what they must carry; None for nothing.
        names: by which they may call the server; None for any. One without a key that only this machine reaches has
            `serving.origin.LOCAL_NAMES` and its own address.
        observe: is told of whom is turned away.
    """
    found = [Middleware(HttpVersionCheck, observe=observe)]
    if names is not None:
        found.append(Middleware(SameOrigin, names=names, observe=observe))
    # Keys are guessed no faster than requests may come, and a body is read only of who is otherwise welcome.
    if limits.requests_per_minute is not None:
        found.append(Middleware(RateLimit, per_minute=limits.requests_per_minute, observe=observe))
    if key is not None:
        found.append(Middleware(RequireApiKey, key=key, observe=observe))
    return (*found, Middleware(BodyLimit, limits=limits, observe=observe))
