"""`HttpServer`: an application at an address, and the limits on its connections.

uvicorn waits for the head of a request as long as the client likes, and writes to a client that does not read as long
as the client stays. `BoundedConnection` ends both. A connection has `header_seconds`, from its beginning or from the
first byte after a response, to send a whole head, and `write_seconds` to read some of a response that waits for it.
Beyond `max_connections` open connections, the one that is idle for longest is closed; if none is idle, the newest is.

A server shuts down when `stop` is called (by a signal), or when its engine ends. It then admits no more requests, lets
running ones go on for a while, and ends those that are left.
"""

import asyncio
import contextlib
import logging
import math
import re
import resource
import socket
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from levanter.serving.errors import ApiError, JsonResponse, json_bytes
from levanter.serving.limits import LimitsConfig
from levanter.serving.service import Service

FULL_RESPONSE = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
"""The response to a connection beyond the limit."""
CONNECTION_LOGGER = logging.getLogger("uvicorn.error.connection")
CONNECTION_LOGGER.setLevel(logging.ERROR)
END_OF_HEAD = re.compile(rb"\n\r?\n")
MAX_HEAD_BYTES = 1 << 14
"""Size limit of a request's head."""
RESERVED_FILES = 256
"""Open files of a process that are kept for other uses than connections."""


def bounded_protocol(limits: LimitsConfig) -> type[H11Protocol]:
    """The protocol class of a server's connections.

    Args:
        limits: limits on connections.
    """
    limits = replace(limits, max_connections=max_connections(limits.max_connections))
    # uvicorn instantiates a class for each connection. A subclass for each server keeps the idle connections of
    # several servers in a process apart.
    idle: OrderedDict[BoundedConnection, None] = OrderedDict()
    return type("BoundedConnectionOfServer", (BoundedConnection,), {"limits": limits, "idle": idle})


def max_connections(configured: int) -> int:
    """The number of connections that a process may open, which the limit on open files bounds.

    Args:
        configured: the configured number.
    """
    # The soft limit: beyond it neither a connection can be accepted nor a file opened.
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return configured
    # Small limits reserve half of the files.
    return max(1, min(configured, files - min(RESERVED_FILES, files // 2)))


def framing_problem(head: bytes) -> str | None:
    """Why it is ambiguous where the body of a request ends; None if it is not (RFC 9112, section 6).

    Two programs that decide differently read different requests on one connection, so its bytes cannot be trusted.
    What is wrong with a single length or encoding is left to h11, which refuses it.

    Args:
        head: the request line and the headers.
    """
    request_line, *lines = head.lstrip(b"\r\n").replace(b"\r\n", b"\n").split(b"\n")
    # Such a line continues the one before it, which programs treat differently.
    if any(line[:1] in (b" ", b"\t") for line in lines):
        return "a header continues on a second line, which is not supported"
    headers = [(name.strip().lower(), value) for name, _, value in (line.partition(b":") for line in lines)]
    lengths = [value for name, value in headers if name == b"content-length"]
    encodings = [value for name, value in headers if name == b"transfer-encoding"]
    if lengths and encodings:
        return "Content-Length and Transfer-Encoding: a request may have only one of them"
    # h11 takes equal lengths for one.
    if len(lengths) > 1 or any(b"," in value for value in lengths):
        return "Content-Length: a request may have only one"
    if encodings and not request_line.rstrip().endswith(b"HTTP/1.1"):
        return "Transfer-Encoding: only in HTTP/1.1"
    return None


class BoundedConnection(H11Protocol):
    """A connection that is closed if its client is too slow, or if it is idle and others need its place.

    Attributes:
        limits: the limits.
        idle: connections of this server without a request, those that are idle for longest first.
    """

    limits: LimitsConfig
    idle: "OrderedDict[BoundedConnection, None]"
    _head_timer: asyncio.TimerHandle | None = None
    _has_begun: bool = False
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Waits for a head, after closing an idle connection if there are too many."""
        # Warnings are about what clients send, as often as they like; errors of the application are logged.
        self.logger = CONNECTION_LOGGER
        # uvicorn first: it sets `transport` and `loop`, which the timers need.
        super().connection_made(transport)
        # uvicorn has added this connection to the set already.
        if len(self.connections) > self.limits.max_connections:
            if not self.idle:
                # Bytes without a parser: a connection beyond the limit must not cost anything.
                transport.write(FULL_RESPONSE)
                transport.close()
                return
            # Idle connections are in the order in which they became idle.
            longest, _ = self.idle.popitem(last=False)
            # `abort`, as the client of an idle connection may have stopped reading.
            longest.transport.abort()
        self._has_begun = True
        self._await_head(self.limits.header_seconds)

    def data_received(self, data: bytes) -> None:
        """Receives bytes; they do not restart the timer of a head that has begun."""
        # uvicorn parses first, so that the state below is that after these bytes.
        super().data_received(data)
        if self._is_running or self.transport.is_closing():
            self._stop_waiting()
        # The first bytes of the next head: from now on the time for heads counts, not the time for idling.
        elif not self._has_begun and self.conn.their_state is h11.IDLE:
            self._has_begun = True
            self._await_head(self.limits.header_seconds)

    def handle_events(self) -> None:
        """Parses what has arrived, if the head is not too long and says in one way where the body ends.

        h11 limits a head that is incomplete, and parses any that is complete: 20,000 short lines in one piece took
        80 ms, during which no other connection is served. It also accepts heads with two framings, and takes one.
        """
        if self.conn.their_state is h11.IDLE:
            received, _ = self.conn.trailing_data
            head = END_OF_HEAD.search(received[:MAX_HEAD_BYTES])
            problem = None
            if head is None and len(received) > MAX_HEAD_BYTES:
                problem = f"the head of the request has more than {MAX_HEAD_BYTES:,} bytes"
            elif head is not None:
                problem = framing_problem(received[: head.start()])
            if problem is not None:
                self.send_400_response(problem)
                return
        super().handle_events()

    def _unsupported_upgrade_warning(self) -> None:
        """Logs nothing: a client could fill the log with upgrades, which are answered as if they were not there."""

    def on_response_complete(self) -> None:
        """Waits for the next head."""
        super().on_response_complete()
        self._has_begun = False
        # A pipelined request may run already: it began in the call above.
        if not self._is_running and not self.transport.is_closing():
            self._await_head(self.limits.idle_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timers."""
        self._stop_waiting()
        self._stop_write_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are not HTTP with an error in the same form as all others."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            # A response is being sent: the bytes after its request are not HTTP, and cannot be answered in between.
            self.transport.close()
            return
        body = json_bytes(ApiError(400, msg).body)
        headers = {"content-type": JsonResponse.media_type, "content-length": str(len(body)), "connection": "close"}
        for event in (
            h11.Response(status_code=400, headers=list(headers.items()), reason="Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            # Through h11, so that its state matches what was sent.
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def pause_writing(self) -> None:
        """The client does not read: starts the timer within which it must."""
        super().pause_writing()
        self._stop_write_timer()
        # `abort` drops what is buffered; `close` would wait for the client to read it.
        self._write_timer = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again: stops the timer."""
        self._stop_write_timer()
        super().resume_writing()

    @property
    def _is_running(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self, seconds: float) -> None:
        self._stop_waiting()
        # At the end: this connection has been idle for the shortest time.
        self.idle[self] = None
        self._head_timer = self.loop.call_later(seconds, self.transport.close)

    def _stop_waiting(self) -> None:
        self.idle.pop(self, None)
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


ACCEPT_BACKLOG = 2048
"""Connections that may wait to be accepted."""
CLOSING_SECONDS = 5
"""Seconds that clients may take at shutdown to read the rest of their responses."""

logger = logging.getLogger(__name__)


class AddressError(ValueError):
    """An address that cannot be listened on."""


def bind_socket(host: str, port: int) -> socket.socket:
    """A socket that is bound to an address and does not listen yet.

    Raises:
        AddressError: another process has the address, or it is not one of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            # A port whose last connections linger in TIME_WAIT can be bound again.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise AddressError(
            f"host, port: {host}:{port} cannot be listened on ({error.strerror or error})\n"
            "  → port: 0 takes any that is free"
        ) from error
    return bound


class _Uvicorn(uvicorn.Server):
    """Installs no signal handlers, and calls `opened` when it listens."""

    def __init__(self, config: uvicorn.Config, opened: Callable[[], None]):
        super().__init__(config)
        self._opened = opened

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures no signals: the command that runs the server handles them."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts as uvicorn does."""
        await super().startup(sockets)
        self._opened()


class HttpServer:
    """Serves an application.

    Args:
        application: the application, from `app`.
        service: its service.
        drain_seconds: seconds for which running requests may go on at shutdown.
        limits: limits on connections.
        opened: is called when connections are accepted.
    """

    def __init__(
        self,
        application: Starlette,
        service: Service,
        *,
        drain_seconds: float,
        limits: LimitsConfig | None = None,
        opened: Callable[[], None] = lambda: None,
    ):
        limits = limits or LimitsConfig()
        self._service, self._drain_seconds, self._on_opened = service, drain_seconds, opened
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listening: socket.socket | None = None
        self._ending: asyncio.Task[None] | None = None
        self._stop_calls = 0
        # Access logs cost time in every request, a `Server` header reveals versions, and proxy headers are not trusted.
        config = uvicorn.Config(
            application,
            loop="asyncio",
            http=bounded_protocol(limits),
            # No route is a WebSocket.
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            # `bounded_protocol` closes connections before that.
            timeout_keep_alive=2 * math.ceil(limits.idle_seconds),
            timeout_graceful_shutdown=CLOSING_SECONDS,
            # asyncio accepts this many connections in one iteration of the loop. With a large number, twenty requests
            # that arrive together would all be parsed before a running stream gets its next token. The others wait in
            # the queue of the socket, whose length `_opened` sets.
            backlog=1,
        )
        self._server = _Uvicorn(config, self._opened)

    def run(self, listening: socket.socket) -> None:
        """Serves until `stop` is called or the engine ends.

        Args:
            listening: a socket from `bind_socket`; closed at the end.

        Raises:
            AddressError: another process listens there by now.
            BaseException: the exception that ended the engine.
        """
        try:
            listening.listen(ACCEPT_BACKLOG)
        except OSError as error:
            raise AddressError(f"host, port: another process listens there by now ({error.strerror})") from error
        self._listening = listening
        with asyncio.Runner() as runner:
            runner.run(self._serve(listening))
        if self._service.error is not None:
            raise self._service.error

    def stop(self) -> None:
        """Begins the shutdown; may be called in a signal handler.

        Raises:
            KeyboardInterrupt: it was called before.
        """
        self._stop_calls += 1
        # A second signal ends the process at once.
        if self._stop_calls > 1:
            raise KeyboardInterrupt
        if self._loop is not None:
            # A signal handler interrupts the event loop at any point: only this call may touch it from there.
            self._loop.call_soon_threadsafe(self._end)

    async def _serve(self, listening: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._service.on_end(self._end)
        # A signal that arrived before the loop existed.
        if self._stop_calls:
            self._end()
        # Returns when `should_exit` is set and connections are closed.
        await self._server.serve([listening])
        if self._ending is not None:
            # The server may exit before the drain task has returned.
            await self._ending

    def _opened(self) -> None:
        assert self._listening is not None
        self._listening.listen(ACCEPT_BACKLOG)
        # uvicorn has called `listen` with a backlog of 1, which is set back first.
        self._on_opened()

    def _end(self) -> None:
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        if self._service.healthy:
            logger.info("shutting down: running requests have %g s", self._drain_seconds)
        # The order matters: connections are closed only when the requests on them have ended.
        await self._service.drain(self._drain_seconds)
        self._server.should_exit = True
