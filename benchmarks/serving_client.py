"""A client of `/v1/completions` that costs little and notes when each token came; for benchmarks of servers.

It speaks HTTP/1.1 by itself, over a connection of its own for each request, and reads a stream's events as bytes.
"""

import asyncio
import gc
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

READY = re.compile(r"ready: (http://\S+)")
PAGE = resource.getpagesize()


@dataclass
class Streamed:
    """A streamed answer.

    Attributes:
        sent: when it was asked for.
        times: when each of its events came.
        tokens: how many the server says there were.
        status: of the answer; 0 where the connection ended without one.
        ended: whether it came to its end.
    """

    sent: float
    times: list[float] = field(default_factory=list)
    tokens: int = 0
    status: int = 0
    ended: bool = False

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.sent

    @property
    def seconds(self) -> float:
        """Seconds to the last one."""
        return self.times[-1] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between one event and the next."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


def head(url: str, path: str, length: int, *, method: str = "POST", more: Sequence[str] = ()) -> bytes:
    """The head of a request that has a connection of its own."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {urlsplit(url).netloc}", "Content-Type: application/json", *more]
    return "\r\n".join([*lines, f"Content-Length: {length}", "Connection: close", "", ""]).encode()


async def stream(url: str, body: Mapping[str, object]) -> Streamed:
    """Asks for a stream and reads all of it.

    Args:
        url: of the server.
        body: the request; what makes it a stream is added.
    """
    parts = urlsplit(url)
    raw = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)
    found = Streamed(sent=time.perf_counter())
    try:
        writer.write(head(url, "/v1/completions", len(raw)) + raw)
        found.status = int((await reader.readuntil(b"\r\n\r\n")).split()[1])
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue
            now = time.perf_counter()
            if line.startswith(b"data: [DONE]"):
                found.ended = True
            elif b'"usage":{' in line:
                said = json.loads(line[6:])
                found.tokens = said["usage"]["completion_tokens"]
                # Some say it with their last token, others behind it.
                if said["choices"] and said["choices"][0]["text"]:
                    found.times.append(now)
            else:
                found.times.append(now)
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()
    return found


async def asked(url: str, path: str) -> bytes:
    """The body of what is read at a path."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(head(url, path, 0, method="GET"))
    answer = await reader.read()
    writer.close()
    return answer.partition(b"\r\n\r\n")[2]


def resident(pid: int) -> int:
    """Bytes of memory that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def cpu_seconds(pid: int) -> float:
    """Seconds that a process has had of processors."""
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def stand_first() -> str:
    """Has this process run when it is woken, before others; says how."""
    gc.disable()
    try:
        # Nobody that it starts inherits that.
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except (AttributeError, PermissionError):
        return "clients compete with the server for processors"
    return "clients have their processor before the server"


def load() -> str:
    """How busy the machine is."""
    return " ".join(f"{value:.1f}" for value in os.getloadavg())


@contextmanager
def ours(words: Sequence[str]) -> Iterator[tuple[str, int]]:
    """A server of ours with a command line: its address and its process."""
    command = [sys.executable, "-m", "levanter.main.serve", *words, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            lines = []
            for line in process.stdout or ():
                lines.append(line)
                if (found := READY.search(line)) is not None:
                    yield found[1], process.pid
                    break
            else:
                raise SystemExit("".join(lines[-20:]))
        finally:
            process.terminate()
            process.communicate()
