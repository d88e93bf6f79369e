"""Replicas behind Ray Serve, on a real local cluster; the servers are stand-ins, or ours."""

import asyncio
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.tiny_runs import make_inputs

pytestmark = pytest.mark.quick

ray = pytest.importorskip("ray", reason="the `ray` extra is not installed")
pytest.importorskip("ray.serve", reason="the `ray` extra is not installed")

from levanter.commands.serve.config import ServeConfig  # noqa: E402
from levanter.config import load_written  # noqa: E402
from levanter.infra.processes import free_port  # noqa: E402
from levanter.infra.ray_serve import main, make_parser, server_command  # noqa: E402

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


@pytest.mark.parametrize(
    ("flags", "insecure", "key"),
    [([], False, None), (["--insecure"], True, None), (["--api_key", "/etc/key", "--insecure"], True, "/etc/key")],
)
def test_a_server_reads_whom_it_answers(flags, insecure, key):
    """What the launcher adds to the command is what `serve` understands."""
    asked = make_parser().parse_args(["--host", "0.0.0.0", *flags])
    words = server_command(asked, ["python", "-m", "levanter.main.serve", "--hf_checkpoint", "a/b"])
    config = load_written(ServeConfig, words[3:]).config
    assert (config.insecure, config.api_key, config.hf_checkpoint) == (insecure, key, "a/b")


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
    """Who asks an address all the time; `answered` and `failed` say how it went.

    Args:
        body: of the request.
        which: a path whose answer names the process behind it; None where there is none.
    """

    def __init__(self, port: int, body: dict, which: str | None = None):
        self.url, self.answered, self.failed = f"http://127.0.0.1:{port}", 0, []
        self.processes, self.texts = set(), set()
        self._body, self._which = body, which

    async def go_on(self, until: asyncio.Event) -> None:
        import aiohttp

        async with aiohttp.ClientSession(self.url) as session:
            while not until.is_set():
                try:
                    if self._which is not None:
                        async with session.get(self._which) as answer:
                            answer.raise_for_status()
                            self.processes.add(await answer.text())
                    async with session.post("/v1/completions", json=self._body) as answer:
                        answer.raise_for_status()
                        self.texts.add(_without_ids(await answer.text()))
                    self.answered += 1
                except aiohttp.ClientError as error:
                    self.failed.append(repr(error))

    async def while_replaced(self, replace: Callable[[], int]) -> None:
        """Eight of them ask before, during and after."""
        until = asyncio.Event()
        running = [asyncio.create_task(self.go_on(until)) for _ in range(8)]
        await self._more(16)
        assert await asyncio.to_thread(replace) == 0
        await self._more(16)
        until.set()
        await asyncio.gather(*running)

    async def _more(self, count: int) -> None:
        after = self.answered + count
        while self.answered < after and not self.failed:
            await asyncio.sleep(0.1)


def _without_ids(text: str) -> str:
    """An answer without what differs from one to the next."""
    return re.sub(r'"(id|created|seed)":[^,]+,', "", text)


@pytest.mark.slow
def test_replicas_are_replaced_without_a_failed_request(cluster, capfd):
    """Two replicas, eight clients that never stop: started, replaced, ended."""
    port = free_port()
    flags = ["--address", cluster, "--replicas", "2", "--port", str(port), "--drain_seconds", "30"]

    def deploy() -> int:
        return main([*flags, "--", "python", str(STAND_IN)])

    assert deploy() == 0
    clients = Clients(port, {"n": 20}, "/pid")
    asyncio.run(clients.while_replaced(deploy))
    assert not clients.failed and len(clients.processes) == 4, "two before, two after"
    assert clients.texts == {"".join(f"data: {n} \n\n" for n in range(20))}
    assert main(["--address", cluster, "--delete", "--name", "levnter"]) == 2
    assert "it has levanter" in capfd.readouterr().err
    assert main(["--address", cluster, "--delete"]) == 0


@pytest.mark.slow
def test_a_server_that_does_not_start_says_why(cluster, capfd):
    code = "import sys; print('no such checkpoint'); sys.exit(2)"
    flags = ["--address", cluster, "--port", str(free_port())]
    assert main([*flags, "--", "python", "-c", code]) == 2
    said = capfd.readouterr().err
    assert "the server ended with exit code 2" in said and "no such checkpoint" in said


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_our_servers_are_replaced_without_a_failed_request(cluster, tmp_path):
    """The same with a tiny model: all replicas, before and after, stream the same answer."""
    pytest.importorskip("uvicorn", reason="the `serve` extra is not installed")
    port = free_port()
    command = ["python", "-m", *make_inputs(tmp_path / "inputs").serve(tmp_path / "run")]
    flags = ["--address", cluster, "--replicas", "2", "--port", str(port), "--drain_seconds", "60"]
    flags += ["-e", "JAX_PLATFORMS=cpu", "-e", "XLA_FLAGS=--xla_force_host_platform_device_count=8"]

    def deploy() -> int:
        return main([*flags, "--", *command])

    assert deploy() == 0
    asked = {"prompt": "the cat sat", "max_tokens": 20, "temperature": 0, "stream": True, "ignore_eos": True}
    clients = Clients(port, asked)
    asyncio.run(clients.while_replaced(deploy))
    assert not clients.failed
    (text,) = clients.texts
    assert text.endswith("data: [DONE]\n\n")
    assert main(["--address", cluster, "--delete"]) == 0
