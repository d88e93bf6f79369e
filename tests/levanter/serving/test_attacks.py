"""A server in a process of its own under connections that want nothing good, beside one client that wants its text."""

import asyncio
import contextlib
import json
import random
import resource
import signal
import sys

import httpx
import pytest
from helpers.server_process import server_process

pytestmark = pytest.mark.timeout(1800)
ASKED = {"prompt": [5, 6, 7], "max_tokens": 60, "ignore_eos": True, "seed": 1, "stream": True}
LONG = json.dumps({"prompt": [5, 6, 7], "max_tokens": 150, "ignore_eos": True, "stream": True}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(LONG)


class Crowd:
    """What is around the client that is well-behaved."""

    def __init__(self, port: int):
        self.port, self.over = port, asyncio.Event()

    async def connect(self) -> asyncio.StreamWriter:
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        return writer

    async def dripping(self) -> None:
        """Sends a head byte by byte, again and again."""
        while not self.over.is_set():
            with contextlib.suppress(OSError):
                writer = await self.connect()
                for byte in HEAD * 1000:
                    if self.over.is_set() or writer.is_closing():
                        break
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(0.2)
                writer.close()

    async def idle(self, count: int) -> list[asyncio.StreamWriter]:
        """Connections on which nothing happens."""
        return [await self.connect() for _ in range(count)]

    async def leaving(self, count: int, rng: random.Random) -> None:
        """Connects and leaves: at once, within a request, or when it was sent."""
        for _ in range(count):
            with contextlib.suppress(OSError):
                writer = await self.connect()
                kind = rng.random()
                if kind < 0.6:
                    whole = HEAD + LONG
                    writer.write(whole if kind < 0.3 else whole[: rng.randrange(len(whole))])
                    await asyncio.sleep(rng.choice([0, 0, 0.001]))
                writer.transport.abort()


async def texts(url: str, over: asyncio.Event, found: list[str]) -> None:
    """Streams the same text again and again, each time over a connection of its own; any error ends the test."""
    while not over.is_set():
        async with (
            httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as http,
            http.stream("POST", "/v1/completions", json=ASKED) as answer,
        ):
            assert answer.status_code == 200, await answer.aread()
            events = [line[6:] async for line in answer.aiter_lines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        found.append("".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]))


async def attack(url: str, *, dripping: int, idle: int, leaving: int) -> list[str]:
    crowd, found = Crowd(int(url.rpartition(":")[2])), list[str]()
    asking = asyncio.ensure_future(texts(url, crowd.over, found))
    slow = [asyncio.ensure_future(crowd.dripping()) for _ in range(dripping)]
    waiting = await crowd.idle(idle)
    rng = random.Random(0)
    lots = [leaving // 20] * 20
    await asyncio.gather(*(crowd.leaving(count, random.Random(rng.random())) for count in lots))
    before = len(found)
    while len(found) < before + 2 and not asking.done():
        await asyncio.sleep(0.05)
    crowd.over.set()
    await asking
    await asyncio.gather(*slow)
    for writer in waiting:
        writer.transport.abort()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dripping", "idle", "leaving"),
    [pytest.param(10, 50, 200, id="few"), pytest.param(200, 1000, 10_000, id="many")],
)
def test_a_client_that_behaves_notices_nothing(tmp_path, dripping, idle, leaving):
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files[1], files[1]))
    try:
        with server_process(tmp_path, limits={"header_seconds": 5.0}, max_queued_tokens=1 << 20) as server:
            found = asyncio.run(attack(server.url, dripping=dripping, idle=idle, leaving=leaving))
            assert len(set(found)) == 1 and len(found) >= 2
            with httpx.Client(base_url=server.url, trust_env=False, timeout=None) as http:
                while (load := http.get("/status").json()["load"])["running"] or load["waiting"]:
                    pass
                assert load["pages_free"] == load["pages"]
                assert "levanter_compiles_after_ready_total 0\n" in http.get("/metrics").text
            sys.stdout.write(f"{len(found)} texts meanwhile\n")
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(300) == 0, "".join(server.lines[-50:])
            assert not any("Traceback" in line for line in server.lines), "".join(server.lines[-50:])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
