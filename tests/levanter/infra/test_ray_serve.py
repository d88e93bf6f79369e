"""Replicas behind Ray Serve, on a real local cluster; the servers are stand-ins, or ours."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="the `ray` extra is not installed")
pytest.importorskip("ray.serve", reason="the `ray` extra is not installed")

from levanter.infra.processes import free_port  # noqa: E402
from levanter.infra.ray_serve import main  # noqa: E402

STAND_IN = Path(__file__).parents[2] / "helpers" / "streaming_server.py"


def test_everything_that_is_wrong_is_listed(capsys):
    flags = ["--replicas", "0", "--port", "0", "--tpu", "v4-256", "--host", "0.0.0.0"]
    assert main([*flags, "--", "python", "-m", "levanter.main.serve", "--port=80"]) == 2
    said = capsys.readouterr().err
    for problem in (
        *(
            "--replicas 0: expected at least 1",
            "--port 0: expected 1 to 65535",
            "--tpu v4-256: 32 hosts, and a replica",
        ),
        *("--port=80: is this launcher's own", "--api_key FILE, or --host 127.0.0.1, or --insecure"),
    ):
        assert problem in said
    assert main(["--replicas", "1"]) == 2
    assert "what to run comes after `--`" in capsys.readouterr().err


@pytest.fixture
def cluster(monkeypatch):
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PATH", f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    arguments = {"num_cpus": 4, "include_dashboard": False, "object_store_memory": 80 * 2**20}
    made = Cluster(initialize_head=True, head_node_args=arguments)
    yield made.address
    made.shutdown()


class Clients:
    """Who streams from an address all the time; `answered` and `failed` say how it went."""

    def __init__(self, port: int):
        self.url, self.answered, self.failed, self.processes = f"http://127.0.0.1:{port}", 0, [], set()

    async def go_on(self, until: asyncio.Event) -> None:
        import aiohttp

        expected = "".join(f"data: {n} \n\n" for n in range(20))
        async with aiohttp.ClientSession(self.url) as session:
            while not until.is_set():
                try:
                    async with session.get("/pid") as answer:
                        answer.raise_for_status()
                        self.processes.add(await answer.text())
                    async with session.post("/v1/completions", json={"n": 20}) as answer:
                        answer.raise_for_status()
                        assert await answer.text() == expected
                    self.answered += 1
                except (aiohttp.ClientError, AssertionError) as error:
                    self.failed.append(repr(error))


@pytest.mark.slow
def test_replicas_are_replaced_without_a_failed_request(cluster, capfd):
    """Two replicas, eight clients that never stop: started, replaced, ended."""
    port = free_port()
    flags = ["--address", cluster, "--replicas", "2", "--port", str(port), "--drain_seconds", "30"]

    def deploy() -> int:
        return main([*flags, "--", "python", str(STAND_IN)])

    async def replace() -> Clients:
        clients, until = Clients(port), asyncio.Event()
        running = [asyncio.create_task(clients.go_on(until)) for _ in range(8)]
        while clients.answered < 16 and not clients.failed:
            await asyncio.sleep(0.1)
        assert await asyncio.to_thread(deploy) == 0
        after = clients.answered + 16
        while clients.answered < after and not clients.failed:
            await asyncio.sleep(0.1)
        until.set()
        await asyncio.gather(*running)
        return clients

    assert deploy() == 0
    clients = asyncio.run(replace())
    assert not clients.failed and len(clients.processes) == 4, "two before, two after"
    assert main(["--address", cluster, "--delete", "--name", "levnter"]) == 2
    assert "it has levanter" in capfd.readouterr().err
    assert main(["--address", cluster, "--delete"]) == 0
