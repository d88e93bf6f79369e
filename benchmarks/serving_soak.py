"""A server under clients that leave, send rubbish and ask for too much, beside those who want their answer.

    python -m levanter.main.serve --config_path config/serve/demo.yaml --max_queued_tokens 256 &
    python benchmarks/serving_soak.py http://127.0.0.1:8000 --requests 3000 --pid $!

Of the requests 20 % leave before their answer has come, 10 % are broken, 5 % are longer than the context; so many are
asked at once that the queue overruns (429, asked again). Everybody else must get an answer, and a request that names a
seed the same one each time. At the end no row runs, nothing waits and every page is free.

Who is refused asks again 50 ms later, as no client does that heeds what the server says; with `--patient` after the
seconds of `Retry-After`, as OpenAI's does. Those take more `--clients` to overrun the queue throughout: the report says
in how many of the seconds somebody was refused.

Gaps are those between two tokens of the same choice of a streamed answer, by when the part came that brought each:
log-probabilities are asked for, so that a token which is no text by itself is an event too. As many others' prompts as
may be are computed in them. Run by itself, this process has its processor before the server.
"""

import argparse
import asyncio
import json
import random
import re
import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

LEAVE, BROKEN, TOO_LONG = 0.20, 0.10, 0.05
PROMPTS = (1, 5, 12, 20)
"""Tokens of a prompt."""
SHAPES = 40
"""Different requests that name a seed."""
PAGE = resource.getpagesize()


@dataclass
class Seen:
    """What came of it."""

    kinds: Counter = field(default_factory=Counter)
    statuses: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    refused: Counter = field(default_factory=Counter)
    """By second."""


@dataclass(frozen=True)
class Place:
    """Where the server is, and what it takes."""

    host: str
    port: int
    context: int
    pid: int | None = None
    prompts: Sequence[int] = PROMPTS


def request(path: str, body: bytes, *, method: str = "POST") -> bytes:
    """The bytes of a request of its own connection."""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def asked(rng: random.Random, *, tokens: int, prompts: Sequence[int] = PROMPTS) -> dict[str, object]:
    """A request that can be answered; of a few shapes, so that answers can be compared."""
    shape = random.Random(rng.randrange(SHAPES))
    return {
        "prompt": [shape.randrange(3, 200) for _ in range(shape.choice(prompts))],
        "max_tokens": shape.randint(1, tokens),
        "n": shape.choice([1, 1, 2]),
        "seed": shape.randrange(1000),
        "temperature": shape.choice([0, 0.7, 1.0]),
    }


def broken(rng: random.Random) -> bytes:
    """Bytes that are no request, or one for nothing that exists."""
    fine = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    return rng.choice(
        [
            request("/v1/completions", b"{"),
            request("/v1/completions", b"\xff\xfe{}"),
            request("/v1/completions", b'{"prompt": "a", "temperature": NaN}'),
            request("/v1/completions", b'{"prompt": "\\ud800"}'),
            request("/v1/completions", b'{"prompt": "a", "temprature": 1}'),
            request("/v1/completions", b"[" * 100_000),
            request("/v1/chat/completions", b'{"messages": 5}'),
            request("/v1/nothing", fine),
            request("/v1/completions", fine, method="DELETE"),
            b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
            b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + rng.randbytes(100),
            b"GET / HTTP/9.9\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nConnection: close\r\nHost: a\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
        ]
    )


Parts = list[tuple[float, bytes]]
"""Of an answer's body, and when each came."""


async def sent(place: Place, data: bytes) -> tuple[int, bytes]:
    """Sends a request and reads all of its answer: status and body."""
    status, _, parts = await exchanged(place, data)
    return status, b"".join(part for _, part in parts)


async def exchanged(place: Place, data: bytes) -> tuple[int, bytes, Parts]:
    """The status of an answer, its head, and the parts of its body."""
    reader, writer = await asyncio.open_connection(place.host, place.port)
    try:
        writer.write(data)
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        status, parts = int(head.split()[1]), []
        while part := await reader.read(1 << 16):
            parts.append((time.perf_counter(), part))
        return status, head, parts
    except (ConnectionError, asyncio.IncompleteReadError):
        return 0, b"", []
    finally:
        writer.close()


def gaps_of(parts: Parts) -> list[float]:
    """Seconds between one token and the next of the same choice."""
    seconds, came, rest = [], {}, b""
    for at, part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                if choice["logprobs"] and choice["logprobs"]["tokens"]:
                    index = choice["index"]
                    seconds += [at - came[index]] if index in came else []
                    came[index] = at
    return seconds


def text_of(body: bytes, *, streamed: bool) -> str | None:
    """The texts of an answer's choices and why they ended; None where one has not."""
    choices: dict[int, list[str]] = {}
    reasons: dict[int, str] = {}
    if streamed:
        # Chunked: sizes stand on lines of their own between the events.
        events = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
        if not events or events[-1] != "[DONE]":
            return None
        found = [json.loads(event) for event in events[:-1]]
    else:
        found = [json.loads(body)]
    for one in found:
        for choice in one["choices"]:
            choices.setdefault(choice["index"], []).append(choice["text"])
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
    if set(reasons) != set(choices):
        return None
    return json.dumps([["".join(choices[n]), reasons[n]] for n in sorted(choices)])


async def one(place: Place, rng: random.Random, seen: Seen, *, tokens: int, patient: bool = False) -> None:
    """One client."""
    kind = rng.random()
    if kind < LEAVE:
        seen.kinds["leave"] += 1
        await leave(place, rng, tokens=tokens)
    elif kind < LEAVE + BROKEN:
        seen.kinds["broken"] += 1
        status, _ = await sent(place, broken(rng))
        seen.statuses[status] += 1
        if status >= 500 or status == 200:
            seen.wrong.append(f"a broken request: {status}")
    elif kind < LEAVE + BROKEN + TOO_LONG:
        seen.kinds["too long"] += 1
        body = json.dumps({"prompt": [5] * (place.context + 1), "max_tokens": 1}).encode()
        status, answer = await sent(place, request("/v1/completions", body))
        seen.statuses[status] += 1
        if status != 400 or str(place.context).encode() not in answer.replace(b",", b""):
            seen.wrong.append(f"a prompt beyond the context: {status} {answer[:200]!r}")
    else:
        seen.kinds["answered"] += 1
        await answered(place, rng, seen, tokens=tokens, patient=patient)


async def leave(place: Place, rng: random.Random, *, tokens: int) -> None:
    """Asks, and is gone: at once, in the middle of the request, or of the answer."""
    body = {**asked(rng, tokens=tokens, prompts=place.prompts), "stream": rng.random() < 0.5, "max_tokens": tokens}
    data = request("/v1/completions", json.dumps(body).encode())
    _, writer = await asyncio.open_connection(place.host, place.port)
    writer.write(data[: rng.randrange(len(data))] if rng.random() < 0.2 else data)
    await asyncio.sleep(rng.choice([0, 0.002, 0.02, 0.1]))
    writer.transport.abort()


async def answered(place: Place, rng: random.Random, seen: Seen, *, tokens: int, patient: bool) -> None:
    """Asks until there is room, and compares the answer with that to the same request before."""
    body, streamed = asked(rng, tokens=tokens, prompts=place.prompts), rng.random() < 0.5
    more = {"stream": True, "logprobs": 0} if streamed else {}
    data = request("/v1/completions", json.dumps({**body, **more}).encode())
    while True:
        status, head, parts = await exchanged(place, data)
        seen.statuses[status] += 1
        if status != 429:
            break
        seen.refused[int(time.perf_counter())] += 1
        await asyncio.sleep(after(head) if patient else 0.05)
    answer = b"".join(part for _, part in parts)
    text = text_of(answer, streamed=streamed) if status == 200 else None
    if text is None:
        seen.wrong.append(f"{status}: {answer[:300]!r}")
        return
    key = json.dumps(body)
    if seen.texts.setdefault(key, text) != text:
        seen.wrong.append(f"{key} was answered by {seen.texts[key]}, and later by {text}")
    if streamed:
        seen.gaps += gaps_of(parts)


def after(head: bytes) -> float:
    """The seconds that an answer's head asks to wait."""
    found = re.search(rb"(?i)\r\nretry-after: (\d+)\r\n", head)
    assert found is not None, f"a refusal names no seconds: {head!r}"
    return float(found[1])


def resident(pid: int | None) -> int:
    """Bytes of memory that a process holds; 0 if nobody asks."""
    return 0 if pid is None else int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


async def soak(
    url: str,
    *,
    requests: int,
    clients: int,
    tokens: int = 24,
    seed: int = 0,
    pid: int | None = None,
    patient: bool = False,
    prompts: Sequence[int] = PROMPTS,
) -> tuple[Seen, dict]:
    """Runs all clients.

    Args:
        url: of the server.
        requests: how many.
        clients: of them at the same time.
        tokens: of an answer, at most.
        seed: of what they do.
        pid: the server's process, whose memory is watched.
        patient: whether who is refused heeds `Retry-After`.
        prompts: tokens of one.

    Returns:
        What was seen, and the server's own account at the end, once nothing runs.
    """
    parts = urlsplit(url)
    place = Place(parts.hostname or "127.0.0.1", parts.port or 80, 0, pid, prompts)
    place = replace(place, context=(await status_of(place))["context"])
    seen, rng = Seen(), random.Random(seed)
    turns = iter([random.Random(rng.random()) for _ in range(requests)])

    async def client() -> None:
        for turn in turns:
            await one(place, turn, seen, tokens=tokens, patient=patient)
            if seen.kinds.total() % 100 == 0:
                seen.resident.append(resident(pid))

    await asyncio.gather(*(client() for _ in range(clients)))
    while (account := await status_of(place))["load"]["running"] or account["load"]["waiting"]:
        await asyncio.sleep(0.05)
    load = account["load"]
    if load["pages_free"] != load["pages"]:
        seen.wrong.append(f"{load['pages'] - load['pages_free']} pages are held by nobody")
    return seen, account


async def status_of(place: Place) -> dict:
    """What the server says of itself."""
    status, body = await sent(place, request("/status", b"", method="GET"))
    assert status == 200, f"/status: {status}"
    return json.loads(body)


def main() -> int:
    """Runs the soak and says what came of it; 0 if nothing was wrong."""
    from serving_client import stand_first

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--prompts", type=int, nargs="+", default=PROMPTS, help="tokens of a prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pid", type=int, help="of the server")
    parser.add_argument("--patient", action="store_true", help="who is refused heeds Retry-After")
    options = parser.parse_args()
    print(stand_first())
    began = time.perf_counter()
    seen, account = asyncio.run(soak(**vars(options)))
    seconds = time.perf_counter() - began
    print(f"{seen.kinds.total():,} requests in {seconds:.0f} s: {dict(seen.kinds)}")
    print(f"statuses: {dict(sorted(seen.statuses.items()))} (0: a connection that ended without an answer)")
    print(f"refused by the full queue: {seen.refused.total():,}, in {len(seen.refused)} of {seconds:.0f} seconds")
    if len(seen.gaps) > 100:
        cuts = statistics.quantiles(seen.gaps, n=100)
        middle, high = 1e3 * cuts[49], 1e3 * cuts[98]
        print(f"between two tokens: median {middle:.1f} ms, p99 {high:.1f} ms ({high / middle:.2f} × median)")
    if options.pid is not None and len(seen.resident) > 2:
        first, last = seen.resident[len(seen.resident) // 10 + 1], seen.resident[-1]
        print(f"memory: {first / 2**20:.0f} MiB after a tenth, {last / 2**20:.0f} MiB at the end")
    print(f"at the end: {account['load']}")
    for line in seen.wrong[:20]:
        print(f"wrong: {line}")
    print(f"{len(seen.wrong)} wrong")
    return 1 if seen.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
