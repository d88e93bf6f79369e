"""A pool of keep-alive connections to web servers.

This module knows nothing of ranges. It receives bodies directly into the caller's memory, because on a fast network
copies, and the Python code between them, dominate the CPU time.
"""

import base64
import contextlib
import http.client
import socket
import ssl
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeGuard
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from levanter.io.ranges.request import Attempt, GivenUpError, Pieces, RangeError, TransientError

CONNECT_SECONDS = 10.0
STALL_SECONDS = 20.0
"""Seconds without a byte after which a connection counts as dead."""
SLICE_BYTES = 256 << 10
"""The most bytes that are received between two checks for cancellation."""
AHEAD_BYTES = 32 << 10
"""The most of them that may be in the TLS layer already, and no longer in the socket buffer."""
AGENT = "levanter"

Headers = Mapping[str, str]


def is_web(url: str) -> bool:
    """Whether a URL is one of a web server."""
    return url.startswith(("http://", "https://"))


def shown_url(url: str) -> str:
    """A URL without the password, or the signature, that may be in it."""
    split_url = urlsplit(url)
    host = split_url.netloc.rpartition("@")[2]
    return f"{split_url.scheme}://{host}{split_url.path}"


class Connections:
    """Idle connections by server; a request takes one and returns it after the answer."""

    def __init__(self, *, stall_seconds: float = STALL_SECONDS):
        self._idle: dict[tuple[str, str], list[http.client.HTTPConnection]] = {}
        self._lock = threading.Lock()
        self._stall_seconds = stall_seconds
        # A checkpoint has no `close`, so its connections are closed when it is garbage-collected.
        weakref.finalize(self, _close_idle, self._idle, self._lock)

    @cached_property
    def _context(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    def get(self, url: str, headers: Headers, attempt: Attempt) -> "HttpAnswer":
        """Sends a GET request; returns when the header of the answer has arrived, before the body.

        Raises:
            TransientError: no connection was made, or it ended before an answer.
            GivenUpError: the attempt was given up.
        """
        split_url = urlsplit(url)
        idle = self._take(split_url)
        if idle is not None:
            try:
                return self._ask(idle, split_url, headers, attempt)
            except TransientError:
                # The server may have closed the idle connection; a new one may work.
                attempt.check()
        return self._ask(self._connect(split_url), split_url, headers, attempt)

    def give_back(self, connection: http.client.HTTPConnection, url: str) -> None:
        """Returns a connection to the pool; the last answer must have been received completely."""
        split_url = urlsplit(url)
        with self._lock:
            self._idle.setdefault((split_url.scheme, split_url.netloc), []).append(connection)

    def close(self) -> None:
        """Closes the idle connections."""
        _close_idle(self._idle, self._lock)

    def _take(self, split_url: SplitResult) -> http.client.HTTPConnection | None:
        with self._lock:
            idle = self._idle.get((split_url.scheme, split_url.netloc))
            # The most recently used one: the server is least likely to have closed it.
            return idle.pop() if idle else None

    def _connect(self, split_url: SplitResult) -> http.client.HTTPConnection:
        host, port = split_url.hostname or "", split_url.port
        proxy = getproxies().get(split_url.scheme)
        # The proxies of the environment (`HTTPS_PROXY`, `NO_PROXY`), as `urllib` reads them; `http.client` ignores
        # them.
        proxy_url = urlsplit(proxy) if proxy and not proxy_bypass(host) else None
        peer, peer_port = (proxy_url.hostname or "", proxy_url.port) if proxy_url else (host, port)
        if split_url.scheme == "https":
            connection = http.client.HTTPSConnection(peer, peer_port, timeout=CONNECT_SECONDS, context=self._context)
            if proxy_url:
                connection.set_tunnel(host, port)
        else:
            connection = http.client.HTTPConnection(peer, peer_port, timeout=CONNECT_SECONDS)
        return connection

    def _ask(
        self, connection: http.client.HTTPConnection, split_url: SplitResult, headers: Headers, attempt: Attempt
    ) -> "HttpAnswer":
        target = split_url.path or "/"
        if split_url.query:
            target += f"?{split_url.query}"
        if split_url.scheme == "http" and connection.host != split_url.hostname:
            # A proxy needs the absolute URL.
            target = f"http://{split_url.netloc.rpartition('@')[2]}{target}"
        # `identity`: ranges of a compressed body could not be placed.
        sent = {"User-Agent": AGENT, "Accept-Encoding": "identity", **_authorization(split_url), **headers}
        try:
            attempt.check()
            if connection.sock is None:
                connection.connect()
            assert connection.sock is not None, "connected"
            # The connection was made with the shorter `CONNECT_SECONDS`; from here on a pause of the server is
            # tolerated longer.
            connection.sock.settimeout(self._stall_seconds)
            # Registered after `connect`: before it, there is no socket that another thread could shut down.
            attempt.stops_by(lambda: _cut(connection.sock))
            attempt.streams = True
            if split_url.scheme == "http" and connection.host != split_url.hostname:
                sent["Host"] = split_url.netloc.rpartition("@")[2]
            connection.request("GET", target, headers=sent)
            return HttpAnswer(connection, connection.getresponse(), attempt)
        except ssl.SSLCertVerificationError as error:
            connection.close()
            raise RangeError(
                f"{shown_url(split_url.geturl())}: its certificate is not trusted ({error.reason})"
            ) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _broken(connection, attempt, error) from error
        except BaseException:
            attempt.is_over()
            connection.close()
            raise


def _close_idle(idle: dict[tuple[str, str], list[http.client.HTTPConnection]], lock: threading.Lock) -> None:
    with lock:
        connections = [candidate for several in idle.values() for candidate in several]
        idle.clear()
    for connection in connections:
        connection.close()


def _cut(sock: socket.socket | None) -> None:
    if sock is not None:
        with contextlib.suppress(OSError):  # it may be closed already
            # The method of `SSLSocket` would also drop the TLS state that the reading thread uses.
            socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _broken(connection: http.client.HTTPConnection, attempt: Attempt, error: Exception) -> Exception:
    attempt.is_over()
    connection.close()
    if attempt.given_up:
        return GivenUpError()
    return TransientError(_reason(error))


def _wake_at(sock: socket.socket, nbytes: int) -> None:
    """Sets how many bytes must be waiting before `recv` returns, so that a slow connection causes few wake-ups."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, max(1, nbytes))


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no data arrived in time"
    if isinstance(error, socket.gaierror):
        return "the host name cannot be resolved"
    if isinstance(error, http.client.RemoteDisconnected):
        return "the connection was closed without an answer"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _authorization(split_url: SplitResult) -> Headers:
    if split_url.username is None:
        return {}
    credentials = f"{unquote(split_url.username)}:{unquote(split_url.password or '')}"
    return {"Authorization": "Basic " + base64.b64encode(credentials.encode()).decode()}


@dataclass(frozen=True)
class HttpAnswer:
    """An answer whose header has been received and whose body has not."""

    connection: http.client.HTTPConnection
    response: http.client.HTTPResponse
    attempt: Attempt

    @property
    def status(self) -> int:
        """The status code."""
        return self.response.status

    @property
    def status_text(self) -> str:
        """The status as messages show it."""
        return f"{self.response.status} {self.response.reason}".strip()

    def header(self, name: str) -> str | None:
        """A header's value."""
        return self.response.headers.get(name)

    @property
    def length(self) -> int | None:
        """Bytes that the body is announced to have."""
        return self.response.length

    def receive(self, into: Pieces) -> None:
        """Fills pieces of memory, one after another, with the next bytes of the body.

        Raises:
            TransientError: the body ended, or the connection did.
            GivenUpError: the attempt was given up.
        """
        sock = None if self.response.chunked else self.connection.sock
        # `http.client` has read ahead with the header. Once its buffer is empty, bytes come from the socket.
        buffered = sock is not None
        try:
            for piece in into:
                offset = self._with_the_head(piece) if buffered else 0
                buffered = buffered and offset == len(piece)
                while offset < len(piece):
                    self.attempt.check()
                    count = self._some(sock, piece[offset : offset + SLICE_BYTES], len(piece) - offset)
                    if count == 0:
                        raise TransientError("the answer ended early")
                    offset += count
                    self.attempt.received += count
            if sock is not None:
                # The connection goes back to the pool, and `http.client` reads the next header in small pieces.
                _wake_at(sock, 1)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _broken(self.connection, self.attempt, error) from error
        except BaseException:
            self.close()
            self.attempt.check()
            raise

    def _with_the_head(self, into: memoryview) -> int:
        """Copies the part of the body that `http.client` has buffered together with the header."""
        head = self.response.fp.peek(1)[: len(into)]
        into[: len(head)] = self.response.fp.read(len(head))
        self.attempt.received += len(head)
        self._arrived(len(head))
        return len(head)

    def _some(self, sock: socket.socket | None, into: memoryview, limit: int) -> int:
        """Receives some bytes; directly from the socket, unless the body is chunked."""
        # The body of a chunked answer has chunk sizes in it, so only `http.client` can read it.
        if sock is None:
            return self.response.readinto(into)
        # The TLS layer may hold bytes that are no longer in the socket buffer; waiting for all of them would wait for
        # bytes that never come.
        _wake_at(sock, min(limit, SLICE_BYTES) - AHEAD_BYTES)
        count = sock.recv_into(into)
        self._arrived(count)
        return count

    def _arrived(self, nbytes: int) -> None:
        # `http.client` does not see the bytes that were received past it, so its count is kept by hand: `end` reads it.
        if self.response.length is not None:
            self.response.length -= nbytes

    def whole(self, limit: int) -> bytes:
        """The rest of the body, at most `limit` bytes and one."""
        try:
            content = self.response.read(limit + 1)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _broken(self.connection, self.attempt, error) from error
        if self.response.length and len(content) <= limit:
            self.close()
            raise TransientError(f"the answer ended after {len(content):,} bytes, {self.response.length:,} too early")
        self.attempt.received += len(content)
        return content

    def end(self, connections: Connections, url: str) -> None:
        """Returns the connection to the pool if the body was received completely; closes it otherwise."""
        # An answer that was received in part has bytes of its body on the connection, which would start the next
        # answer.
        done = self.response.isclosed() or self.response.length == 0
        reusable = done and not self.response.will_close
        self.attempt.is_over()
        if reusable and not self.attempt.given_up:
            self.response.close()
            connections.give_back(self.connection, url)
        else:
            self.connection.close()

    def close(self) -> None:
        """Ends the connection with the answer."""
        self.attempt.is_over()
        self.connection.close()


def is_overloaded(status: int) -> bool:
    """Whether a status means that the server is overloaded."""
    return status in (429, 503)


def is_transient(status: int) -> bool:
    """Whether the same request may succeed later."""
    return status in (408, 425, 429) or status >= 500


def retry_after_seconds(value: str | None) -> float | None:
    """Seconds of a `Retry-After` header; None where it has none, or a date."""
    return float(value) if is_digits(value) else None


def is_digits(value: str | None) -> TypeGuard[str]:
    """Whether a header is a whole number of at most nine digits."""
    return value is not None and value.isascii() and value.isdigit() and len(value) <= 9
