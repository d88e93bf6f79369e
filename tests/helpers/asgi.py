"""ASGI applications asked without a server, and with one in a thread of this process."""

import asyncio
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvicorn
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send


@dataclass
class Answer:
    """What came back."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


async def reply(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that answers with the length of the body it read."""
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    have, more = 0, True
    while more:
        message = await receive()
        have, more = have + len(message.get("body", b"")), message.get("more_body", False)
    body = str(have).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def behind(app: ASGIApp, *doors: Middleware) -> ASGIApp:
    """An application behind doors, the outermost first."""
    for door in reversed(doors):
        app = door.cls(app, *door.args, **door.kwargs)
    return app


def ask(
    app: ASGIApp,
    path: str = "/v1/completions",
    *,
    method: str = "POST",
    headers: Mapping[str, str] | Sequence[tuple[str, str]] = (),
    parts: Sequence[bytes | None] = (b"",),
    client: str = "10.0.0.1",
) -> Answer:
    """One request.

    Args:
        app: the application.
        path, method, headers: of the request.
        parts: of its body, as they arrive; None for a client that leaves. Behind the last one nothing comes.
        client: its address.
    """
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    scope: Scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in pairs],
        "client": (client, 1),
    }
    answer, waiting = Answer(), list(parts)

    async def receive() -> Message:
        if not waiting:
            return await asyncio.get_running_loop().create_future()
        part = waiting.pop(0)
        if part is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": bool(waiting)}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            answer.body += message.get("body", b"")

    asyncio.run(app(scope, receive, send))
    return answer


@contextmanager
def listening(app: ASGIApp, *, protocol: type[asyncio.Protocol]) -> Iterator[int]:
    """A uvicorn server on a free port, in a thread; gives the port and ends the server afterwards.

    Args:
        app: what it serves.
        protocol: of its connections.
    """
    config = uvicorn.Config(app, http=protocol, ws="none", loop="asyncio", log_config=None, access_log=False)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()
