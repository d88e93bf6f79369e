"""Clients that leave, send rubbish or ask for too much, beside those who want their answer."""

import asyncio
import importlib.util
import json
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.served import listening
from helpers.server_process import server_process

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "serving_soak.py"


def loaded_benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("serving_soak", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_gaps_are_between_tokens_of_the_same_choice():
    def event(index: int, *tokens: str) -> bytes:
        found = {"index": index, "text": "", "logprobs": {"tokens": list(tokens)} if tokens else None}
        return b"4f\r\ndata: " + json.dumps({"choices": [found]}).encode() + b"\n\n\r\n"

    second = event(0, "b") + event(1, "c")
    parts = [
        (1.0, event(0, "a")),
        # An event in two pieces came when its end did; two events came together.
        (2.0, second[:20]),
        (3.0, second[20:]),
        (7.0, event(1, "d")),
        (8.0, event(0)),  # Why it ended, without a token.
        (9.0, b"data: [DONE]\n\n"),
    ]
    assert loaded_benchmark().gaps_of(parts) == [2.0, 4.0]


@pytest.mark.parametrize("requests", [120, pytest.param(3000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_everybody_who_waits_is_answered(model, requests):
    with listening(model, max_queued_tokens=64) as server:
        seen, account = asyncio.run(loaded_benchmark().soak(server.url, requests=requests, clients=24, seed=requests))
        assert seen.wrong == []
        # All kinds came, and requests that name a seed were compared.
        assert set(seen.kinds) == {"leave", "broken", "too long", "answered"}
        assert seen.statuses[200] == seen.kinds["answered"] > len(seen.texts)
        assert account["load"]["pages_free"] == account["load"]["pages"]
        # Who sent a request and left at once may be heard only now.
        deadline = time.monotonic() + 200
        while server.service._pending and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.service.healthy and not server.service._pending


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_process_holds_no_more_memory_at_the_end_and_drains(tmp_path):
    soak = loaded_benchmark().soak
    with server_process(tmp_path, max_queued_tokens=64, drain_seconds=120.0) as server:
        pid = server.process.pid
        seen, account = asyncio.run(soak(server.url, requests=3000, clients=24, pid=pid))
        assert seen.wrong == [] and seen.statuses[429] > 0
        assert account["load"]["pages_free"] == account["load"]["pages"]
        # What a process needs at all, it has needed after a fifth of the requests.
        later = seen.resident[len(seen.resident) // 5 :]
        cuts = statistics.quantiles(seen.gaps, n=100)
        sys.stdout.write(
            f"{dict(seen.kinds)} {dict(seen.statuses)}\n"
            f"gaps: median {1e3 * cuts[49]:.2f} ms, p99 {1e3 * cuts[98]:.2f} ms\n"
            f"memory {later[0] / 2**20:.1f} MiB, at most {max(later) / 2**20:.1f} later\n"
        )
        assert max(later) <= 1.02 * later[0], [round(each / 2**20, 1) for each in seen.resident]
        body = {"prompt": [5, 6], "max_tokens": 150, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=None, trust_env=False) as answer:
            events = (line[6:] for line in answer.iter_lines() if line.startswith("data: "))
            next(events)
            server.process.send_signal(signal.SIGTERM)
            *rest, end = events
        assert end == "[DONE]"
        assert json.loads(rest[-1])["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(300) == 0, "".join(server.lines[-50:])
