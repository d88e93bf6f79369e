"""A server of this machine behind an address: started, watched, ended, and its answers passed on as they come."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="the `ray` extra is not installed")

from levanter.infra.console import Console
from levanter.infra.errors import LaunchError
from levanter.infra.replica import Forwarder, ServerOnHost

STAND_IN = Path(__file__).parents[2] / "helpers" / "streaming_server.py"


class Client:
    """One request to an ASGI application.

    Args:
        body: what is posted; None asks with GET.
    """

    def __init__(self, path: str, body: dict | None = None, *, headers: tuple[tuple[bytes, bytes], ...] = ()):
        text = b"" if body is None else json.dumps(body).encode()
        length = () if body is None else ((b"content-length", str(len(text)).encode()),)
        path, _, query = path.partition("?")
        self.scope = {
            **{"type": "http", "method": "GET" if body is None else "POST", "path": path, "raw_path": path.encode()},
            **{"query_string": query.encode(), "headers": [(b"host", b"replica"), *headers, *length]},
        }
        self.incoming: asyncio.Queue[dict] = asyncio.Queue()
        self.incoming.put_nowait({"type": "http.request", "body": text[:5], "more_body": True})
        self.incoming.put_nowait({"type": "http.request", "body": text[5:], "more_body": False})
        self.status, self.headers, self.pieces = 0, {}, []
        self.came = asyncio.Event()

    async def send(self, message: dict) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        elif message["body"]:
            self.pieces.append(message["body"].decode())
            self.came.set()

    async def ask(self, app: Forwarder) -> "Client":
        await app(self.scope, self.incoming.get, self.send)
        return self

    @property
    def text(self) -> str:
        return "".join(self.pieces)


PATIENCE = 200.0
"""Seconds after which a test is taken to hang."""


async def _until(holds) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await holds():
            await asyncio.sleep(0.05)


async def _with_server(test, port=None) -> None:
    server = ServerOnHost([sys.executable, str(STAND_IN)], {}, Console(), grace=10.0)
    app = Forwarder(lambda: port or server.port)
    signals: asyncio.Queue[dict] = asyncio.Queue()
    said: asyncio.Queue[dict] = asyncio.Queue()
    life = asyncio.create_task(app({"type": "lifespan"}, signals.get, said.put))
    try:
        signals.put_nowait({"type": "lifespan.startup"})
        assert (await said.get())["type"] == "lifespan.startup.complete"
        async with asyncio.timeout(PATIENCE):
            await server.ready()
        await test(app, server)
    finally:
        signals.put_nowait({"type": "lifespan.shutdown"})
        await life
        await server.end()
    with pytest.raises(LaunchError, match="the server ended with exit code"):
        server.check()


def test_answers_are_passed_on_as_they_come():
    """Status, headers, query and body; each event of a stream by itself, before the next one exists."""

    async def test(app, server):
        asked = await Client("/key?a=%20b", headers=((b"authorization", b"Bearer k"), (b"connection", b"close"))).ask(
            app
        )
        assert (asked.status, asked.text) == (200, "Bearer k")
        streamed = Client("/v1", {"n": 4, "text": "a \U0001f600", "when": "asked"})
        answer = asyncio.create_task(streamed.ask(app))
        for n in range(4):
            there = "".join(f"data: {number} a \U0001f600\n\n" for number in range(n + 1))

            async def arrived(there=there) -> bool:
                return streamed.text == there

            await _until(arrived)
            await Client("/next").ask(app)
        await answer
        assert streamed.text == there
        assert streamed.headers[b"content-type"] == b"text/event-stream"
        assert b"transfer-encoding" not in streamed.headers

    asyncio.run(_with_server(test))


def test_who_hangs_up_is_noticed_by_the_server():
    async def test(app, server):
        client = Client("/v1", {"n": 100_000})
        answer = asyncio.create_task(client.ask(app))
        await client.came.wait()
        client.incoming.put_nowait({"type": "http.disconnect"})
        await answer

        async def noticed() -> bool:
            return (await Client("/hung").ask(app)).text == "1"

        await _until(noticed)

    asyncio.run(_with_server(test))


def test_a_server_that_cannot_be_reached_is_a_503_in_the_protocols_words():
    async def test(app, server):
        client = await Client("/v1", {"n": 1}).ask(app)
        assert client.status == 503 and client.headers[b"retry-after"]
        assert "cannot be reached" in json.loads(client.text)["error"]["message"]

    # No server listens on port 1.
    asyncio.run(_with_server(test, port=1))


def test_a_server_that_ends_before_it_is_ready_says_why():
    async def start() -> None:
        command = [sys.executable, "-c", "import os, sys; print('no such', os.environ['MY_KEY']); sys.exit(3)"]
        server = ServerOnHost(command, {"MY_KEY": "very-secret"}, Console(["very-secret"]), grace=1.0)
        async with asyncio.timeout(PATIENCE):
            await server.ready()

    with pytest.raises(LaunchError, match=r"exit code 3\nno such \*\*\*") as found:
        asyncio.run(start())
    assert found.value.exit_code == 3
