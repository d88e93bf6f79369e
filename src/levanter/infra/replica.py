"""A replica of a server: a server process on this machine, and an ASGI proxy that forwards requests to it.

`levanter.main.serve` is a process of its own, behind a port that only this machine reaches. The proxy in front forwards
requests and responses byte for byte as they arrive, so that streamed responses stream and the server notices a client
that disconnects.
"""

import asyncio
import contextlib
import json
import urllib.error
import urllib.request
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from levanter.infra.console import Console
from levanter.infra.errors import PEER_LOST, LaunchError
from levanter.infra.host import Host
from levanter.infra.processes import free_port

if TYPE_CHECKING:
    from aiohttp import ClientSession

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

LAST_LINES = 20
_OF_A_CONNECTION = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer"),
        *(b"transfer-encoding", b"upgrade"),
    }
)
"""Headers of one connection, which a proxy keeps to itself (RFC 9110, section 7.6.1)."""


class ServerOnHost:
    """A server process on this machine.

    Args:
        command: starts the server; the port is appended as `--port`.
        environment: variables in addition to those of this process.
        console: shows its lines.
        grace: seconds from SIGTERM, on which it ends its requests, to SIGKILL.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], console: Console, *, grace: float):
        self._host, self._console = Host("127.0.0.1"), console
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self.port = free_port()
        self._host.start(
            [*command, "--host", "127.0.0.1", "--port", str(self.port)], environment, grace=max(grace, 0.0)
        )

    async def ready(self, poll: float = 0.2) -> None:
        """Returns once the server is ready: the model is loaded and everything is compiled.

        Raises:
            LaunchError: it ended before, with its exit code and last lines.
        """
        # In a thread: a blocking request would stop the event loop of the actor.
        while not await asyncio.to_thread(self.answers, "/ready"):
            self.check()
            await asyncio.sleep(poll)

    def check(self) -> None:
        """Shows its new lines.

        Raises:
            LaunchError: it has ended.
        """
        code = self._news()
        if code is not None:
            tail = "\n".join(self._console.clean(line) for line in self._last)
            raise LaunchError(f"the server ended with exit code {code}\n{tail}", exit_code=code or PEER_LOST)

    def answers(self, path: str, timeout: float = 5.0) -> bool:
        """Whether the server responds to a path with 200."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=timeout) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    async def end(self, poll: float = 0.05) -> None:
        """Ends the server: SIGTERM, then SIGKILL after the grace period; returns when it has ended."""
        self._host.stop()
        while self._news() is None:
            await asyncio.sleep(poll)

    def _news(self) -> int | None:
        news = self._host.news()
        for line in news.lines:
            self._last.append(line)
            self._console.show(line)
        return news.code


class Forwarder:
    """An ASGI application that forwards every request to a server on this machine.

    Args:
        port: returns the server's port; called for each request.
    """

    def __init__(self, port: Callable[[], int]):
        self._port = port
        self._session: "ClientSession | None" = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serves one connection."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._pass_on(scope, receive, send)
        else:
            # Not served: 1003 is the code for data that an endpoint does not accept.
            await send({"type": "websocket.close", "code": 1003})

    async def _live(self, receive: Receive, send: Send) -> None:
        import aiohttp

        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                # No limits on time or connections here: the server enforces its own.
                self._session = aiohttp.ClientSession(
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
                    connector=aiohttp.TCPConnector(limit=0),
                    # The bytes go on as they are; decompressing them would contradict the Content-Encoding header.
                    auto_decompress=False,
                    skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
                )
                await send({"type": "lifespan.startup.complete"})
            else:
                if self._session is not None:
                    await self._session.close()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _pass_on(self, scope: Message, receive: Receive, send: Send) -> None:
        """Forwards one request; it ends when the client or the server ends it."""
        # `body_read` ends the wait of `hung_up`; `disconnect` ends the forwarding.
        body_read = asyncio.Event()
        disconnect = asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    disconnect.set()
                    return
                yield message.get("body", b"")
                if not message.get("more_body", False):
                    body_read.set()
                    return

        # Only after the body was read: two readers of `receive` would take messages from each other.
        async def hung_up() -> None:
            await body_read.wait()
            while (await receive())["type"] != "http.disconnect":
                continue
            disconnect.set()

        answer = asyncio.create_task(self._answer(scope, body(), send))
        watch = asyncio.create_task(hung_up())
        disconnected = asyncio.create_task(disconnect.wait())
        try:
            await asyncio.wait({answer, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (answer, watch, disconnected):
                if not task.done():
                    # Cancelling closes the connection, which tells the server that the client has disconnected.
                    task.cancel()
        # Raises what the forwarding raised; a cancelled one was ended by the disconnect above.
        with contextlib.suppress(asyncio.CancelledError):
            await answer

    async def _answer(self, scope: Message, body: AsyncIterator[bytes], send: Send) -> None:
        import aiohttp
        from yarl import URL

        path = scope.get("raw_path") or scope["path"].encode()
        query = b"?" + scope["query_string"] if scope.get("query_string") else b""
        # The raw path, already encoded: decoding and encoding it again could change it.
        url = URL(f"http://127.0.0.1:{self._port()}{(path + query).decode('latin-1')}", encoded=True)
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name.lower() not in _OF_A_CONNECTION
        ]
        has_body = any(name.lower() in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
        assert self._session is not None, "a request before the lifespan began"
        try:
            # A request without a body must be sent without one: chunked encoding would add
            # a header that the client did not send.
            request = self._session.request(
                scope["method"], url, headers=headers, data=body if has_body else None, allow_redirects=False
            )
            if not has_body:
                # Read the final, empty message too, so that the next one from `receive` is the disconnect.
                async for _ in body:
                    continue
            answered = await request
        except aiohttp.ClientConnectionError as error:
            await _unavailable(send, error)
            return
        async with answered:
            await send(
                {
                    "type": "http.response.start",
                    "status": answered.status,
                    "headers": [
                        (name.lower(), value)
                        for name, value in answered.raw_headers
                        if name.lower() not in _OF_A_CONNECTION
                    ],
                }
            )
            async for piece in answered.content.iter_any():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class Replica:
    """One server of an application; Ray Serve makes it an actor in a process of its own.

    Args:
        command: the server's.
        environment: its variables.
        hidden: texts that are never shown.
        grace: seconds that its requests have to end.
        attempt: the id of the launch, which makes Ray replace replicas of an earlier one.

    Raises:
        LaunchError: the server ended before it was ready.
    """

    async def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        hidden: Sequence[str],
        grace: float,
        attempt: str,
    ):
        del attempt
        self._server = _Here.server = ServerOnHost(command, environment, Console(hidden), grace=grace)
        # Ray routes no request to this actor before its constructor returns.
        await self._server.ready()

    def check_health(self) -> None:
        """Called by Ray periodically; a replica that raises is replaced.

        Raises:
            LaunchError: the server ended, or does not respond.
        """
        self._server.check()
        if not self._server.answers("/health"):
            raise LaunchError("the server does not respond to /health")

    async def __del__(self) -> None:
        """Ends the server; by now Ray has seen its requests end."""
        if (server := getattr(self, "_server", None)) is not None:
            await server.end()


class _Here:
    """The server of this process. Ray builds the actor and its ASGI application separately, so they share a global."""

    server: ServerOnHost | None = None

    @classmethod
    def port(cls) -> int:
        assert cls.server is not None, "used before the replica was created"
        return cls.server.port


def forwarding() -> Forwarder:
    """The application of the replica in this process."""
    return Forwarder(_Here.port)


async def _unavailable(send: Send, error: Exception) -> None:
    """Sends an error of the API: the server of this replica cannot be reached."""
    error_body = {
        "message": f"the server of this replica cannot be reached: {error}",
        "type": "unavailable",
        "code": None,
    }
    text = json.dumps({"error": error_body}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": 503, "headers": [*headers, (b"retry-after", b"5")]})
    await send({"type": "http.response.body", "body": text, "more_body": False})
