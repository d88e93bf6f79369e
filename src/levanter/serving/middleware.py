"""ASGI middleware that rejects requests before a route sees them.

`middleware_stack` puts the classes in order: HTTP version, same origin, rate limit, API key, body limit. Each passes a
request on, or answers it with an error and reports a `RequestRejected` event.
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
from levanter.serving.limits import RELEASE_BODY, LimitsConfig
from levanter.serving.metrics import Observer, RequestRejected, ServerEvent, route_of_path

HTTP_VERSIONS = ("1.0", "1.1")
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
"""Host names by which clients reach a server that listens on the local machine only."""
MAX_TRACKED_CLIENTS = 10_000
"""Addresses whose rate is tracked; beyond that, those without a request for longest are dropped."""
OPEN_PATHS = ("/", "/health", "/ready")
"""Paths that need no key: the page, which contains nothing about this server, and probes."""
LINGER_SECONDS = 2.0
"""Seconds for which a client may go on sending after its body was rejected."""

MISSING_KEY = ApiError(
    401,
    "this server requires a key: send the header `Authorization: Bearer …`",
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


def ignore_event(event: ServerEvent) -> None:
    """An observer that does nothing."""
    del event


def middleware_stack(
    *,
    limits: LimitsConfig,
    key: ApiKey | None = None,
    names: Collection[str] | None = None,
    observe: Observer = ignore_event,
) -> Sequence[Middleware]:
    """The middleware of a server, the outermost first, for `serving.app.app`.

    Args:
        limits: limits on clients.
        key: the key that requests must carry; None for none.
        names: host names that requests may use; None for any. A server without a key that listens on the local machine
            only has `LOCAL_NAMES` and its own address.
        observe: receives an event for each rejected request.
    """
    # Cheap checks first. Versions differ in what the same bytes mean, so that check precedes all others.
    stack = [Middleware(HttpVersionCheck, observe=observe)]
    if names is not None:
        stack.append(Middleware(SameOrigin, names=names, observe=observe))
    # The rate limit comes before the key, so that keys are guessed no faster than requests may come. The body is read
    # last, and only for requests that passed everything else.
    if limits.requests_per_minute is not None:
        stack.append(Middleware(RateLimit, per_minute=limits.requests_per_minute, observe=observe))
    if key is not None:
        stack.append(Middleware(RequireApiKey, key=key, observe=observe))
    return (*stack, Middleware(BodyLimit, limits=limits, observe=observe))


async def reject(error: ApiError, scope: Scope, send: Send, observe: Observer) -> None:
    """Answers a request with an error.

    Args:
        error: the error; its `reason` is set.
        scope, send: ASGI's, of the request.
        observe: receives the event.
    """
    assert error.reason is not None, "a rejection has a reason"
    observe(RequestRejected(route=route_of_path(scope["path"]), reason=error.reason, status=error.status))
    await JsonResponse(error.body, status=error.status, headers=error.headers)(scope, _receive_nothing, send)


async def _receive_nothing() -> Message:
    raise AssertionError("an error is sent without reading anything")


class HttpVersionCheck:
    """Rejects requests of HTTP versions other than `HTTP_VERSIONS`.

    Args:
        app: the wrapped application.
        observe: receives an event for each rejected request.
    """

    def __init__(self, app: ASGIApp, *, observe: Observer = ignore_event):
        self._app, self._observe = app, observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers it with 400."""
        # The scope of `lifespan` has no version.
        version = scope.get("http_version", HTTP_VERSIONS[-1])
        if scope["type"] != "http" or version in HTTP_VERSIONS:
            await self._app(scope, receive, send)
            return
        message = f"HTTP/{version} is not supported; HTTP/{' and HTTP/'.join(HTTP_VERSIONS)} are"
        error = ApiError(400, message, reason="invalid", headers={"Connection": "close"})
        await reject(error, scope, send, self._observe)


class SameOrigin:
    """Rejects requests that pages of other sites make a browser send.

    A page that somebody visits can make the browser send requests to this machine, also under a name of its own domain
    that resolves to this machine (DNS rebinding). A server with a key is safe from both, because the page does not have
    the key. For a server without one the names in the headers `Host` and `Origin` decide.

    Args:
        app: the wrapped application.
        names: host names that requests may use.
        observe: receives an event for each rejected request.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        names: Collection[str] = LOCAL_NAMES,
        observe: Observer = ignore_event,
    ):
        self._app, self._observe = app, observe
        # Host names are not case-sensitive.
        self._names = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers it with 403."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        # Browsers always send `Host`; a client that does not is not a browser and passes.
        host, origin = headers.get(b"host"), headers.get(b"origin")
        problem = None
        if host is not None and _hostname(f"//{host}") not in self._names:
            problem = f"{host!r} is not a name of this server; it serves the local machine only, as {LOCAL_NAMES[0]}"
        # Browsers send `Origin` with every request of a script to another site. `null`, of sandboxed pages, is refused
        # too.
        elif origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
            problem = "pages of other sites may not use this server"
        if problem is None:
            await self._app(scope, receive, send)
            return
        await reject(ApiError(403, problem, reason="origin", code="origin"), scope, send, self._observe)


def _hostname(url: str) -> str | None:
    """The host of a URL, in lower case; None if it has none."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


class RateLimit:
    """Limits the requests of each client address by a token bucket.

    Args:
        app: the wrapped application.
        per_minute: requests a minute; also the size of the bucket, so that as many may come at once.
        observe: receives an event for each rejected request.
        now: a clock in seconds.
        open_paths: paths that are not counted: probes.
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
        # Address → tokens in its bucket and when they were counted, the least recent first.
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers it with 429 and the seconds after which the next one is accepted."""
        if scope["type"] != "http" or scope["path"] in self._open:
            await self._app(scope, receive, send)
            return
        # Behind a proxy all clients share the proxy's address; `proxy_headers` are not trusted.
        client = scope.get("client")
        wait = self.retry_after(client[0] if client else "")
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

    def retry_after(self, address: str) -> int | None:
        """Counts a request of an address.

        Returns:
            None if it is accepted, else the whole seconds after which one will be.
        """
        # `refill` is in requests a second.
        now, refill = self._now(), self._per_minute / 60
        # Removed and inserted again, so that the dictionary stays in the order of the last request.
        tokens, since = self._buckets.pop(address, (float(self._per_minute), now))
        # The bucket refills while no request comes, up to its size.
        tokens = min(float(self._per_minute), tokens + (now - since) * refill)
        accepted = tokens >= 1
        # A rejected request costs nothing: a client that goes on trying is accepted at the announced time.
        self._buckets[address] = (tokens - 1 if accepted else tokens, now)
        while len(self._buckets) > MAX_TRACKED_CLIENTS:
            # A forgotten address begins with a full bucket again. The bound keeps many addresses from filling the
            # memory.
            self._buckets.popitem(last=False)
        return None if accepted else max(1, math.ceil((1 - tokens) / refill))


class RequireApiKey:
    """Rejects requests without the API key.

    Args:
        app: the wrapped application.
        key: the key.
        observe: receives an event for each rejected request.
        open_paths: paths that need no key.
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
        # All other types are checked: a WebSocket without the key must not get past this point.
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in self._open):
            await self._app(scope, receive, send)
            return
        matches = self._key.is_in(scope["headers"])
        if matches:
            await self._app(scope, receive, send)
            return
        await reject(MISSING_KEY if matches is None else WRONG_KEY, scope, send, self._observe)


class BodyLimit:
    """Reads the whole body of a request before the application is called, within limits of size and time.

    A body is JSON, which cannot be used before its end. A client that sends it byte by byte occupies a connection and
    nothing else.

    Args:
        app: the wrapped application.
        limits: the limits.
        observe: receives an event for each rejected request.
    """

    def __init__(self, app: ASGIApp, *, limits: LimitsConfig, observe: Observer = ignore_event):
        self._app, self._observe = app, observe
        self._max_bytes, self._max_total = int(limits.max_body_mib * MIB), int(limits.max_bodies_mib * MIB)
        self._seconds = limits.body_seconds
        self._total = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on with its whole body, or answers it with 408, 413 or 503."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Bytes are counted until the application has parsed them, whatever happens in between.
        reader = _BodyReader(self)
        try:
            try:
                async with asyncio.timeout(self._seconds):
                    body = await reader.read(scope, receive)
            except TimeoutError:
                message = f"the body of the request did not arrive within {self._seconds:g} s"
                body = ApiError(408, message, reason="limit", headers={"Connection": "close"})
            if isinstance(body, ApiError):
                await reject(body, scope, _drain_before_close(receive, send), self._observe)
            elif body is not None:
                scope[RELEASE_BODY] = reader.release
                await self._app(scope, _replay_body(body, receive), send)
        finally:
            reader.release()

    def reserve(self, nbytes: int, so_far: int) -> ApiError | None:
        """Counts further bytes of a request that has `so_far` already.

        Returns:
            None, or the error if they exceed a limit; then nothing is counted.
        """
        if so_far + nbytes > self._max_bytes:
            message = f"the body has more than {shown_bytes(self._max_bytes)}, the limit for a request"
            return ApiError(413, message, reason="too_large", headers={"Connection": "close"})
        if self._total + nbytes > self._max_total:
            message = f"requests with {shown_bytes(self._max_total)} are being read; try again"
            headers = {"Connection": "close", "Retry-After": "1"}
            return ApiError(503, message, reason="limit", kind="server_error", headers=headers)
        self._total += nbytes
        return None

    def free(self, nbytes: int) -> None:
        """Counts bytes no longer."""
        self._total -= nbytes


class _BodyReader:
    """Reads the body of one request, and counts its bytes until they are released."""

    def __init__(self, limit: BodyLimit):
        self._limit = limit
        self.counted = 0

    async def read(self, scope: Scope, receive: Receive) -> bytes | ApiError | None:
        """The body; the error if it exceeds a limit; None if the client disconnected."""
        # A declared length is reserved at once, so that a body that is too large is rejected before it is read.
        declared = _content_length(scope["headers"])
        if declared is not None and (error := self._reserve(declared)) is not None:
            return error
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            # The client is gone, and gets no response.
            if message["type"] == "http.disconnect":
                return None
            chunk = message.get("body", b"")
            size += len(chunk)
            # Without a declared length, as in a chunked request, bytes are counted as they arrive.
            if size > self.counted and (error := self._reserve(size - self.counted)) is not None:
                return error
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)

    def release(self) -> None:
        """Frees the bytes: the application has parsed the body, or does not need it."""
        self._limit.free(self.counted)
        # `release` may be called twice: when the application has the body, and when the request ends.
        self.counted = 0

    def _reserve(self, nbytes: int) -> ApiError | None:
        # Counted over all requests, so that many large bodies together cannot exhaust the memory.
        error = self._limit.reserve(nbytes, self.counted)
        if error is None:
            self.counted += nbytes
        return error


def _content_length(headers: Collection[tuple[bytes, bytes]]) -> int | None:
    """The length that the headers of a request declare."""
    for name, value in headers:
        # A value that is not a number is rejected by the HTTP parser.
        if name == b"content-length" and value.isdigit():
            # A longer number is above any limit as well.
            return int(value[:20])
    return None


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """An ASGI `receive` that gives a body which was read, and then what `receive` gives."""
    pending = [body]

    async def replay() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replay


def _drain_before_close(receive: Receive, send: Send) -> Send:
    """An ASGI `send` for a response to a request whose body was not read to its end.

    If a connection is closed while bytes of a request wait in it, TCP resets it and the response may be lost. So the
    bytes that arrive are read and dropped for `LINGER_SECONDS`, or until the client has sent all or disconnected.
    """

    async def send_and_drain(message: Message) -> None:
        if message["type"] != "http.response.body":
            await send(message)
            return
        # The response is complete for the client, which knows its length; the connection stays open for the rest of its
        # body.
        await send({**message, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b""})

    return send_and_drain
