"""One client that sends what could stop a server, beside others: each is refused or served, and the others go on.

`benchmarks/hostile_client.py` sends the same requests at full size and measures the gaps of the others' streams.
"""

import json
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from helpers.hostile_requests import SMALLEST, HostileRequest, hostile_requests
from helpers.served import listening

from levanter.commands.serve.serve import make_application
from levanter.serving.metrics import PATHS

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "hostile_client.py"
HONEST = {"prompt": [5, 6, 7], "max_tokens": 12, "ignore_eos": True, "seed": 1, "stream": True}
HANGS = 120.0


def status_of(port: int, request: HostileRequest) -> int | None:
    """The status of a request; None if its client left before there was one."""
    with socket.create_connection(("127.0.0.1", port), timeout=HANGS if request.refused else 0.3) as client:
        try:
            client.sendall(request.head + request.body)
            line = client.recv(4096)
        # A server that closes a connection whose bytes it does not read resets it.
        except (TimeoutError, ConnectionError):
            return None
        return int(line.split(b" ", 2)[1]) if line else None


def streamed_text(http: httpx.Client) -> str:
    with http.stream("POST", "/v1/completions", json=HONEST) as answer:
        assert answer.status_code == 200, answer.read()
        events = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def test_hostile_requests_are_refused_or_served_and_others_get_their_texts(model):
    with listening(model) as server, httpx.Client(base_url=server.url, trust_env=False, timeout=HANGS) as http:
        port = int(server.url.rpartition(":")[2])
        text = streamed_text(http)
        for request in hostile_requests(SMALLEST):
            # A client that leaves is part of the attack: what it leaves behind must end.
            statuses = [status_of(port, request) for _ in range(min(request.times, 3))]
            served = () if request.refused else (200,)
            allowed = (400, 404, 405, 413, 429, *served, None)
            assert all(status in allowed for status in statuses), (request.name, statuses)
        # The honest client waits for no more than what runs: its text is the same, and the queue is empty afterwards.
        assert streamed_text(http) == text
        load = http.get("/status").json()["load"]
        while load["running"] or load["waiting"]:
            load = http.get("/status").json()["load"]
        assert load["pages_free"] == load["pages"] and not server.service._pending


def test_known_paths_are_the_routes(model):
    """`metrics.PATHS`, the routes of requests that no route has seen, has every route without parameters."""
    application = make_application(model.plan, model.service())
    assert {route.path for route in application.routes if "{" not in route.path} == set(PATHS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_attack(tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, str(BENCHMARK), "--seconds", "10", "--report", str(report)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    summary = json.loads(report.read_text())
    assert not [row["name"] for row in summary["requests"] if " 500 " in row["status"]], ended.stdout
    assert summary["MiB after"] <= 1.1 * summary["MiB before"], ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr
    assert summary["hostile"]["failed"] == 0, ended.stdout
