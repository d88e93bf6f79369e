"""Connections: how many, how slow, and for how long.

uvicorn waits for the head of a request as long as the client likes, and writes to whoever does not read as long as the
client stays. Here both end: a connection has `header_seconds` from its beginning, or from the first byte behind an
answer, to send a whole head, however many bytes come meanwhile, and `write_seconds` to take something of an answer that
waits for it. Where more than `max_connections` are open, the one that is idle for longest makes room; if none is, the
newest goes.
"""

import asyncio
import re
import resource
from collections import OrderedDict
from dataclasses import replace

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from levanter.serving.errors import ApiError, JsonAnswer, json_bytes
from levanter.serving.limits import LimitsConfig

FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
"""What a connection gets that there is no room for."""
END_OF_HEAD = re.compile(rb"\n\r?\n")
MOST_HEAD = 1 << 14
"""Bytes of a request's head."""
OTHER_FILES = 256
"""Open files of a process that are not connections, at most."""


def bounded(limits: LimitsConfig) -> type[H11Protocol]:
    """The protocol of a server's connections.

    Args:
        limits: their bounds.
    """
    limits = replace(limits, max_connections=connections_within(limits.max_connections))
    # uvicorn makes one of a class, and there may be several servers in a process.
    idle: OrderedDict[BoundedConnection, None] = OrderedDict()
    return type("BoundedConnectionOfServer", (BoundedConnection,), {"limits": limits, "idle": idle})


def connections_within(wanted: int) -> int:
    """How many connections a process may have open: the files that it may open bound them.

    Args:
        wanted: connections.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, files - min(OTHER_FILES, files // 2)))


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
                transport.write(FULL)
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
            if len(came) > MOST_HEAD and END_OF_HEAD.search(came[:MOST_HEAD]) is None:
                self.send_400_response(f"the head of the request has more than {MOST_HEAD:,} bytes")
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
        headers = {"content-type": JsonAnswer.media_type, "content-length": str(len(body)), "connection": "close"}
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
