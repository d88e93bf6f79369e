"""Connections: how many, how slow, and for how long.

uvicorn waits for the head of a request as long as the client likes, and writes to whoever does not read as long as the
client stays. Here both end: a connection has `header_seconds` from its beginning, or from the first byte behind an
answer, to send a whole head, however many bytes come meanwhile, and `write_seconds` to take something of an answer that
waits for it. Where more than `max_connections` are open, the one that is idle for longest makes room; if none is, the
newest goes.

`HttpServer`: an application at an address, from the first connection to the end of the last one.

It ends when it is told to (`stop`, from a signal), or when its engine does. Told once, it takes no more requests, lets
those that are there go on for a while, and ends them then.
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
"""What a connection gets that there is no room for."""
END_OF_HEAD = re.compile(rb"\n\r?\n")
MAX_HEAD_BYTES = 1 << 14
"""Bytes of a request's head."""
RESERVED_FILES = 256
"""Open files of a process that are not connections, at most."""


def bounded_protocol(limits: LimitsConfig) -> type[H11Protocol]:
    """The protocol of a server's connections.

    Args:
        limits: their bounds.
    """
    limits = replace(limits, max_connections=max_connections(limits.max_connections))
    # uvicorn makes one of a class, and there may be several servers in a process.
    idle: OrderedDict[BoundedConnection, None] = OrderedDict()
    return type("BoundedConnectionOfServer", (BoundedConnection,), {"limits": limits, "idle": idle})


def max_connections(wanted: int) -> int:
    """How many connections a process may have open: the files that it may open bound them.

    Args:
        wanted: connections.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, files - min(RESERVED_FILES, files // 2)))


class BoundedConnection(H11Protocol):
    """A connection that ends where its client is too slow, or others need its place.

    Attributes:
        limits: the bounds.
        idle: connections of this server without a request, those that are idle for longest first.
    """

    limits: LimitsConfig
    idle: "OrderedDict[BoundedConnection, None]"
    _head_timer: asyncio.TimerHandle | None = None
    _has_begun: bool = False
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Waits for a head; makes room first, if there is none."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            if not self.idle:
                transport.write(FULL_RESPONSE)
                transport.close()
                return
            longest, _ = self.idle.popitem(last=False)
            longest.transport.abort()
        self._has_begun = True
        self._await_head(self.limits.header_seconds)

    def data_received(self, data: bytes) -> None:
        """Takes bytes; the clock of a head that has begun goes on."""
        super().data_received(data)
        if self._is_running or self.transport.is_closing():
            self._stop_waiting()
        elif not self._has_begun and self.conn.their_state is h11.IDLE:
            self._has_begun = True
            self._await_head(self.limits.header_seconds)

    def handle_events(self) -> None:
        """Reads what came. h11 bounds a head that has not ended, and reads any that has: 20,000 short lines in one
        piece took it 80 ms, in which nobody else is answered."""
        if self.conn.their_state is h11.IDLE:
            came, _ = self.conn.trailing_data
            if len(came) > MAX_HEAD_BYTES and END_OF_HEAD.search(came[:MAX_HEAD_BYTES]) is None:
                self.send_400_response(f"the head of the request has more than {MAX_HEAD_BYTES:,} bytes")
                return
        super().handle_events()

    def on_response_complete(self) -> None:
        """Waits for the next head."""
        super().on_response_complete()
        self._has_begun = False
        if not self._is_running and not self.transport.is_closing():
            self._await_head(self.limits.idle_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection."""
        self._stop_waiting()
        self._stop_write_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Says of what is no HTTP that it is none, as everything else is said that is wrong."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            # An answer is on its way; what comes behind the request that it is for is not understood.
            self.transport.close()
            return
        body = json_bytes(ApiError(400, msg).body)
        headers = {"content-type": JsonResponse.media_type, "content-length": str(len(body)), "connection": "close"}
        for event in (
            h11.Response(status_code=400, headers=list(headers.items()), reason="Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def pause_writing(self) -> None:
        """The client does not read: it has a while to begin again."""
        super().pause_writing()
        self._stop_write_timer()
        self._write_timer = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads."""
        self._stop_write_timer()
        super().resume_writing()

    @property
    def _is_running(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self, seconds: float) -> None:
        self._stop_waiting()
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
"""Connections that wait to be accepted."""
CLOSING_SECONDS = 5
"""How long clients may take, at the end, to read what they were sent."""

logger = logging.getLogger(__name__)


class AddressError(ValueError):
    """An address that cannot be listened on."""


def bind_socket(host: str, port: int) -> socket.socket:
    """A socket that holds an address; nobody is listened to yet.

    Raises:
        AddressError: somebody else has it, or it is none of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        except OSError:
            made.close()
            raise
    except OSError as error:
        raise AddressError(
            f"host, port: {host}:{port} cannot be listened on ({error.strerror or error})\n"
            "  → port: 0 takes any that is free"
        ) from error
    return made


class _Uvicorn(uvicorn.Server):
    """Leaves signals to whoever runs it, and says when it listens."""

    def __init__(self, config: uvicorn.Config, opened: Callable[[], None]):
        super().__init__(config)
        self._opened = opened

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts as uvicorn does."""
        await super().startup(sockets)
        self._opened()


class HttpServer:
    """Serves an application.

    Args:
        application: made by `app`.
        service: whose.
        drain_seconds: seconds that running requests may take to finish at shutdown.
        limits: of connections.
        opened: is called when connections are answered.
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
        self._service, self._drain_seconds, self._opened_by = service, drain_seconds, opened
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listening: socket.socket | None = None
        self._ending: asyncio.Task[None] | None = None
        self._told = 0
        config = uvicorn.Config(
            application,
            loop="asyncio",
            http=bounded_protocol(limits),
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
            # asyncio accepts so many at a turn. Were it all that wait, twenty requests that come at once would be read
            # and refused one behind the other, and who is being answered would wait for all of them. `_opened` has the
            # others wait at the socket.
            backlog=1,
        )
        self._server = _Uvicorn(config, self._opened)

    def run(self, listening: socket.socket) -> None:
        """Serves until it is told to end, or the engine ends.

        Args:
            listening: made by `bind_socket`; closed at the end.

        Raises:
            AddressError: somebody else listens there by now.
            BaseException: what ended the engine.
        """
        try:
            listening.listen(ACCEPT_BACKLOG)
        except OSError as error:
            raise AddressError(f"host, port: somebody else listens there by now ({error.strerror})") from error
        self._listening = listening
        with asyncio.Runner() as runner:
            runner.run(self._serve(listening))
        if self._service.error is not None:
            raise self._service.error

    def stop(self) -> None:
        """Tells it to end; may be called in a signal handler.

        Raises:
            KeyboardInterrupt: it was told before.
        """
        self._told += 1
        if self._told > 1:
            raise KeyboardInterrupt
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end)

    async def _serve(self, listening: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._service.on_end(self._end)
        if self._told:
            self._end()
        await self._server.serve([listening])
        if self._ending is not None:
            await self._ending

    def _opened(self) -> None:
        assert self._listening is not None
        self._listening.listen(ACCEPT_BACKLOG)
        self._opened_by()

    def _end(self) -> None:
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        if self._service.healthy:
            logger.info("ending: requests that are there have %g s", self._drain_seconds)
        await self._service.drain(self._drain_seconds)
        self._server.should_exit = True
