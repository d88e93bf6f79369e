"""One hostile client beside three honest ones: the honest ones' gaps, the server's memory, and every status.

    python benchmarks/hostile_client.py [--seconds 20] [--only NAME] [--report FILE.json]

A tiny model in a server process of its own. Three clients stream one text after another. First nothing else happens
(*quiet*); then a fourth client sends each request of `tests/helpers/hostile_requests.py` in turn, and leaves. Reported:
p50, p99 and the largest of the honest clients' gaps between tokens, their times to the first token, the largest time of
a probe of `/health`, the server's memory, and every status that the hostile client got.

The exit code is 0 if p99 is at most three times that of the quiet time, memory is back within 10 %, and nothing was
answered with 500 or left a traceback in the log.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src"), str(ROOT)]

from helpers.hostile_requests import HostileRequest, hostile_requests  # noqa: E402
from helpers.server_process import server_process  # noqa: E402

HONEST = {"prompt": [5, 6, 7], "max_tokens": 48, "ignore_eos": True, "seed": 1, "stream": True}
MAX_RATIO, MEMORY = 3.0, 0.10


@dataclass
class Seen:
    """What the honest clients and the probes saw."""

    gaps: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    probes: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def percentile(values: list[float], share: float) -> float:
    """A percentile in milliseconds."""
    ordered = sorted(values)
    return round(1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1) if ordered else float("nan")


def resident(pid: int) -> float:
    """Resident memory in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


async def honest(port: int, seen: Seen, over: asyncio.Event) -> None:
    """Streams one text after another."""
    body = json.dumps(HONEST).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    while not over.is_set():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + body)
        last, first, status = time.perf_counter(), True, await reader.readline()
        if b" 200 " not in status:
            seen.failed.append(f"{status!r} {(await reader.read(2000))[-300:]!r}")
            writer.close()
            await asyncio.sleep(0.2)
            continue
        while line := await reader.readline():
            if line.startswith(b"data: "):
                now = time.perf_counter()
                (seen.firsts if first else seen.gaps).append(now - last)
                last, first = now, False
                if line.startswith(b"data: [DONE]"):
                    break
                if b'"error"' in line:
                    seen.failed.append(line.decode()[:300])
        writer.close()


async def probe(port: int, seen: Seen, over: asyncio.Event) -> None:
    """Asks for `/health` ten times a second."""
    while not over.is_set():
        began = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        await reader.read()
        seen.probes.append(time.perf_counter() - began)
        writer.close()
        await asyncio.sleep(0.1)


async def send(port: int, request: HostileRequest) -> str:
    """Sends a hostile request, waits for its answer as long as its client would, and leaves; the status line."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(request.seconds):
            writer.write(request.head + request.body)
            await writer.drain()
            status = await reader.readline()
            rest = await reader.read(600)
            return status.decode().strip() + " " + repr(rest.rpartition(b"\r\n\r\n")[2][:160])
    except TimeoutError:
        return "left"
    except OSError as error:
        return type(error).__name__
    finally:
        writer.transport.abort()


async def measure(port: int, pid: int, requests: list[HostileRequest], seconds: float) -> dict:
    """The quiet time, the hostile one, and the memory afterwards."""
    over, seen = asyncio.Event(), Seen()
    clients = [asyncio.ensure_future(honest(port, seen, over)) for _ in range(3)]
    clients.append(asyncio.ensure_future(probe(port, seen, over)))
    await asyncio.sleep(3.0)
    quiet = Seen()
    seen.__dict__.update(quiet.__dict__)
    await asyncio.sleep(seconds)
    quiet, before = Seen(**{name: list(values) for name, values in seen.__dict__.items()}), resident(pid)
    everything, rows = Seen(), []
    for request in requests:
        for values in seen.__dict__.values():
            values.clear()
        began = time.perf_counter()
        statuses = await asyncio.gather(*(send(port, request) for _ in range(request.times)))
        took = time.perf_counter() - began
        # What a request leaves behind (cancellations, freed memory) belongs to it.
        await asyncio.sleep(0.5)
        row = {
            "name": request.name,
            "status": statuses[0],
            "seconds": round(took, 2),
            "gap p99": percentile(seen.gaps, 0.99),
            "gap max": percentile(seen.gaps, 1.0),
            "first max": percentile(seen.firsts, 1.0),
            "health max": percentile(seen.probes, 1.0),
            "MiB": round(resident(pid)),
            "failed": len(seen.failed),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
        if seen.failed:
            print("    ", seen.failed[0][:300])
        for name, values in seen.__dict__.items():
            everything.__dict__[name] += values
    await asyncio.sleep(5.0)
    after = resident(pid)
    over.set()
    await asyncio.wait(clients, timeout=30)
    summary = {
        name: {
            "gap p50": percentile(one.gaps, 0.5),
            "gap p99": percentile(one.gaps, 0.99),
            "gap max": percentile(one.gaps, 1.0),
            "first p50": percentile(one.firsts, 0.5),
            "first p99": percentile(one.firsts, 0.99),
            "health max": percentile(one.probes, 1.0),
            "failed": len(one.failed),
        }
        for name, one in (("quiet", quiet), ("hostile", everything))
    }
    return {**summary, "MiB before": round(before), "MiB after": round(after), "requests": rows}


def main() -> int:
    """Measures, prints and judges."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--report")
    options = parser.parse_args()
    requests = [request for request in hostile_requests() if options.only in request.name]
    with tempfile.TemporaryDirectory() as folder, server_process(Path(folder)) as server:
        port = int(server.url.rpartition(":")[2])
        report = asyncio.run(measure(port, server.process.pid, requests, options.seconds))
        log = "".join(server.lines)
    if options.report:
        Path(options.report).write_text(json.dumps(report, indent=1))
    print(json.dumps({name: value for name, value in report.items() if name != "requests"}, indent=1))
    print(log[-2000:])
    slow = report["hostile"]["gap p99"] > MAX_RATIO * report["quiet"]["gap p99"]
    grown = report["MiB after"] > (1 + MEMORY) * report["MiB before"]
    broken = [row["name"] for row in report["requests"] if " 500 " in row["status"]]
    print({"slow": slow, "grown": grown, "500": broken, "traceback": "Traceback" in log})
    return bool(slow or grown or broken or "Traceback" in log)


if __name__ == "__main__":
    sys.exit(main())
