"""Ray: real local clusters of several nodes, whose TPUs are numbers in Ray's books.

A test starts its own cluster (Ray nodes are processes here) and gives it slices: the first node of one has
`TPU-v4-16-head`, all have `TPU: 4` and the slice's label, as Ray's own detection gives them on TPU VMs.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from helpers.tiny_runs import make_inputs

ray = pytest.importorskip("ray", reason="the `ray` extra is not installed")

from levanter.hardware import parse_accelerator  # noqa: E402
from levanter.infra.console import Console  # noqa: E402
from levanter.infra.errors import LaunchError  # noqa: E402
from levanter.infra.ray_cluster import RayCluster  # noqa: E402
from levanter.infra.ray_run import main  # noqa: E402

MEMORY = 80 * 2**20
QUICK = ("--plan_first=false", "--grace_seconds", "1", "--settle_seconds", "5", "--wait_seconds", "120")


class Slices:
    """A Ray cluster; its head node has no chips, or is the first host of `slice-a`.

    Args:
        head_hosts: how many hosts that slice has; 0: there is none yet.
    """

    def __init__(self, head_hosts: int = 0):
        from ray.cluster_utils import Cluster

        chips = self._host("slice-a", 0, head_hosts) if head_hosts else {"num_cpus": 1}
        arguments = {**chips, "include_dashboard": False, "object_store_memory": MEMORY}
        self._cluster = Cluster(initialize_head=True, head_node_args=arguments)
        self.address = self._cluster.address

    def add(self, name: str, hosts: int) -> list:
        """A slice of v4 with so many hosts."""
        nodes = [self.add_host(name, worker, hosts) for worker in range(hosts)]
        self._cluster.wait_for_nodes()
        return nodes

    def add_host(self, name: str, worker: int, hosts: int, *, wait: bool = False):
        host = self._host(name, worker, hosts)
        return self._cluster.add_node(wait=wait, object_store_memory=MEMORY, **host)

    @staticmethod
    def _host(name: str, worker: int, hosts: int) -> dict:
        head = {f"TPU-v4-{hosts * 8}-head": 1} if worker == 0 else {}
        labels = {"ray.io/tpu-slice-name": name, "ray.io/tpu-worker-id": str(worker)}
        return {"num_cpus": 1, "resources": {"TPU": 4, **head}, "labels": labels}

    def kill(self, node) -> None:
        """Ends a node without warning."""
        self._cluster.remove_node(node, allow_graceful=False)

    @property
    def logs(self) -> Path:
        """What Ray writes about all of its nodes."""
        return Path(self._cluster.head_node.get_logs_dir_path())

    def close(self) -> None:
        self._cluster.shutdown()


@pytest.fixture
def slices(monkeypatch, request):
    monkeypatch.setenv("PATH", f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    # Ray gives its workers the niceness 15: on a busy machine they get no turn.
    monkeypatch.setenv("RAY_worker_niceness", "0")
    made = Slices(**getattr(request, "param", {}))
    yield made
    made.close()


def ray_run(cluster: Slices, tpu: str, *flags: str, run: str) -> int:
    return main(["--address", cluster.address, "--tpu", tpu, *QUICK, *flags, "--", "python", "-c", run])


def when(path: Path, act: Callable[[], object]) -> threading.Thread:
    """Does something as soon as a file has text."""

    def watch() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if path.exists() and path.read_text():
                act()
                return
            time.sleep(0.05)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def attempts(folder: Path, then: str) -> str:
    """A process that notes its number for each attempt, `ATTEMPT-PROCESS`, and then goes on."""
    return (
        "import os, sys, time, pathlib\n"
        f"me, folder = os.environ['LEVANTER_PROCESS_ID'], pathlib.Path({str(folder)!r})\n"
        "attempt = 1 + len([p for p in folder.iterdir() if p.name.endswith(f'-{me}')])\n"
        "(folder / f'{attempt}-{me}').write_text(str(os.getpid()))\n"
        f"{then}\n"
    )


@pytest.mark.parametrize("slices", [{"head_hosts": 2}], indirect=True)
def test_a_gang_of_two_and_an_error_of_the_user(slices, capfd):
    """Two runs: all processes have their place and the secret; an error ends all, once, with its traceback."""
    slices.add_host("slice-a", 1, 2, wait=True)
    names = ("LEVANTER_NUM_PROCESSES", "LEVANTER_PROCESS_ID", "RUN_ID", "MY_TOKEN")
    code = f"import os; print('place', *(os.environ[n] for n in {names}))"
    assert ray_run(slices, "v4-16", "--run_id", "r", "-e", "MY_TOKEN=very-secret", run=code) == 0
    shown = capfd.readouterr()
    places = sorted(line for line in shown.out.splitlines() if "place" in line)
    assert places == ["[0] place 2 0 r ***", "[1] place 2 1 r ***"]
    written = [path for path in slices.logs.rglob("*") if path.is_file()]
    assert written and not any(b"very-secret" in path.read_bytes() for path in written), "Ray's own logs"

    code = (
        "import os, time\nif os.environ['LEVANTER_PROCESS_ID'] == '1': raise KeyError('no such book')\ntime.sleep(100)"
    )
    assert ray_run(slices, "v4-16", "--settle_seconds", "1", run=code) == 1
    shown = capfd.readouterr()
    assert "attempt 2" not in shown.err and "failed: process 1" in shown.err
    assert "KeyError: 'no such book'" in shown.err and "Traceback" in shown.err


def eval_on_four_hosts(slices: Slices, command: list[str]) -> int:
    cpu = ["-e", "JAX_PLATFORMS=cpu", "-e", "XLA_FLAGS=--xla_force_host_platform_device_count=2"]
    flags = ["--address", slices.address, "--tpu", "v4-32", *QUICK, *cpu, "--settle_seconds", "30"]
    return main([*flags, "--", "python", "-m", *command])


def losses(path: Path) -> dict[str, float]:
    return {name: each["loss"] for name, each in json.loads(path.read_text())["sets"].items()}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_hosts_evaluate_as_one_process_does(slices, capfd, tmp_path):
    """A real evaluation, in which the loss is summed over all processes; and one whose input is bad."""
    slices.add("slice-a", 4)
    inputs = make_inputs(tmp_path)
    alone = inputs.eval_lm(tmp_path / "alone")
    assert subprocess.run([sys.executable, "-m", *alone]).returncode == 0
    assert eval_on_four_hosts(slices, inputs.eval_lm(tmp_path / "four")) == 0
    assert losses(tmp_path / "four" / "out.json") == pytest.approx(losses(tmp_path / "alone" / "out.json"), abs=1e-6)
    assert "8 devices (cpu), 4 hosts" in capfd.readouterr().out

    assert eval_on_four_hosts(slices, [*inputs.eval_lm(tmp_path / "bad"), "--hf_checkpoint", "/nowhere/model"]) == 2
    shown = capfd.readouterr()
    assert "attempt 2" not in shown.err and "exit code 2 (bad input or configuration)" in shown.err
    assert "/nowhere/model" in shown.err.split("its last output")[1]


@pytest.mark.slow
def test_a_killed_worker_restarts_the_gang_once(slices, capfd, tmp_path):
    slices.add("slice-a", 2)
    # The process is killed, and with it nothing of Ray's.
    when(tmp_path / "1-1", lambda: os.kill(int((tmp_path / "1-1").read_text()), signal.SIGKILL))
    assert ray_run(slices, "v4-16", run=attempts(tmp_path, "time.sleep(100 if attempt == 1 else 0)")) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-0", "1-1", "2-0", "2-1"]
    assert "lost: process 1" in capfd.readouterr().err
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "1-0").read_text()), 0)


@pytest.mark.slow
def test_a_killed_actor_takes_its_process_along_and_restarts_the_gang(slices, capfd, tmp_path):
    slices.add("slice-a", 2)
    # The process' parent is its guard, and the guard's is Ray's worker.
    then = "open(folder.parent / f'actor-{me}-{attempt}', 'w').write(parent(parent(os.getpid())))"
    code = "def parent(pid): return open(f'/proc/{pid}/stat').read().rsplit(')', 1)[1].split()[1]\n" + attempts(
        tmp_path / "attempts", f"{then}\ntime.sleep(100 if attempt == 1 else 0)"
    )
    (tmp_path / "attempts").mkdir()
    actor = tmp_path / "actor-1-1"
    when(actor, lambda: os.kill(int(actor.read_text()), signal.SIGKILL))
    assert ray_run(slices, "v4-16", run=code) == 0
    assert "the host is gone" in capfd.readouterr().err
    deadline = time.monotonic() + 20
    orphan = int((tmp_path / "attempts" / "1-1").read_text())
    while Path(f"/proc/{orphan}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{orphan}").exists(), "a process that stays behind would hold the chips"


@pytest.mark.slow
def test_a_killed_node_restarts_the_gang_on_another_slice(slices, tmp_path):
    nodes = slices.add("slice-a", 2)
    (tmp_path / "attempts").mkdir()
    code = attempts(tmp_path / "attempts", "time.sleep(100 if attempt == 1 else 0)")
    # Ray starts nodes in a main thread only, which is this one; the run is a program of its own.
    words = [sys.executable, "-m", "levanter.infra.ray_run", "--address", slices.address, "--tpu", "v4-16", *QUICK]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen([*words, "--", "python", "-c", code], stderr=said)
        when(tmp_path / "attempts" / "1-1", lambda: None).join()
        slices.kill(nodes[1])
        slices.kill(nodes[0])
        slices.add("slice-b", 2)
        assert process.wait(timeout=200) == 0, (tmp_path / "said").read_text()
    assert sorted(path.name for path in (tmp_path / "attempts").iterdir()) == ["1-0", "1-1", "2-0", "2-1"]
    assert "the host is gone; restarting" in (tmp_path / "said").read_text()


def test_a_host_that_is_gone_as_it_is_taken_is_not_the_end(monkeypatch, capsys):
    """Ray offers a killed host until it has missed heartbeats; the actor then dies before it has begun."""
    gone = ray.exceptions.RayActorError()
    answers = iter([gone, ["host-b (192.0.2.3)", "node-b"], gone])
    cluster = RayCluster(parse_accelerator("v4-8"), Console(), wait=60.0, sleep=lambda _: None)

    class FakeRay:
        exceptions = ray.exceptions
        wait = staticmethod(lambda refs, timeout: (refs, []))
        cluster_resources = staticmethod(lambda: {"TPU-v4-8-head": 1.0})

        @staticmethod
        def get(_):
            if isinstance(answer := next(answers), Exception):
                raise answer
            return answer

    monkeypatch.setattr(cluster, "_ray", FakeRay())
    monkeypatch.setattr(cluster, "_actor", lambda **_: MagicMock())
    host = cluster._head(0, time.monotonic() + 60)
    assert (host.where, host.node) == ("host-b (192.0.2.3)", "node-b")
    assert "a host was lost while it was being reserved; looking for another" in capsys.readouterr().err
    with pytest.raises(LaunchError, match="no v4-8 slice was free within 60 s"):
        cluster._head(0, time.monotonic())


@pytest.mark.slow
def test_beyond_the_bound_it_ends_with_a_verdict(slices, capfd, tmp_path):
    slices.add("slice-a", 2)
    for attempt in (1, 2):
        path = tmp_path / f"{attempt}-0"
        when(path, lambda path=path: os.kill(int(path.read_text()), signal.SIGKILL))
    assert ray_run(slices, "v4-16", "--restarts", "1", run=attempts(tmp_path, "time.sleep(100)")) == 5
    said = capfd.readouterr().err
    assert "attempt 2: lost: process 0" in said and "giving up, 1 restarts were allowed" in said


@pytest.mark.slow
def test_no_such_slice_and_half_a_slice(slices, capfd):
    slices.add_host("slice-a", 0, 2)
    assert ray_run(slices, "v4-32", "--wait_seconds", "6", run="pass") == 5
    assert "no v4-32 slice was free within 6 s" in capfd.readouterr().err
    assert ray_run(slices, "v4-16", "--wait_seconds", "9", "--intact_seconds", "2", run="pass") == 5
    assert "slice-a has 1 of 2 hosts" in capfd.readouterr().err


def test_bad_command_lines(capsys, monkeypatch):
    assert main(["--tpu", "v4-250", "--", "true"]) == 2
    assert "does not come in size 250" in capsys.readouterr().err
    assert main([]) == 2
    error = capsys.readouterr().err
    assert "--tpu is missing" in error and "after `--`" in error
    assert main(["--help"]) == 0
    assert "--restarts" in capsys.readouterr().out


def test_without_ray_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["--tpu", "v4-16", "--", "true"]) == 2
    assert "pip install 'levanter-fork[ray]'" in capsys.readouterr().err


@pytest.mark.slow
def test_what_cannot_fit_reaches_no_cluster(capfd, monkeypatch):
    """The published 405B configuration, with an address at which nothing is."""
    monkeypatch.chdir(Path(__file__).resolve().parents[3])
    command = ["python", "-m", "levanter.main.eval_lm", "--config_path", "config/eval/llama3.1_405b_as_published.yaml"]
    assert main(["--address", "127.0.0.1:1", "--tpu", "v4-256", "--", *command]) == 3
    shown = capfd.readouterr()
    assert "DOES NOT FIT" in shown.out and "nothing was contacted" in shown.err
