"""Gangs of real processes, on hosts that are this machine: what Ray does with them comes in `test_ray_run`."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from levanter.infra.console import Console
from levanter.infra.host import Host
from levanter.infra.worker_group import GangRun, HostGone, run_worker_group


class HostHere(Host):
    """A host whose place in a slice is made up; it can be taken away."""

    def __init__(self, index: int, slice: int):
        super().__init__("127.0.0.1")
        self.slice, self.where, self.gone = slice, f"host {index}", False

    def news(self):
        if self.gone:
            raise HostGone(self.where)
        return super().news()


class Here:
    """Gives `hosts` hosts of `slices` slices, and does something once they run."""

    def __init__(self, hosts: int, *, slices: int = 1, then=lambda _: None):
        self._hosts, self._slices, self._then = hosts, slices, then
        self.acquired, self.members = 0, []

    def acquire(self) -> Sequence[HostHere]:
        self.acquired += 1
        self.members = [HostHere(index, index * self._slices // self._hosts) for index in range(self._hosts)]
        return self.members

    def release(self, members) -> None:
        for member in members:
            member.stop()
            member._process.wait(timeout=200)

    def sleep(self, seconds: float) -> None:
        """What the gang waits with: the time in which something happens."""
        self._then(self)
        time.sleep(min(seconds, 0.05))


def run(code: str, cluster: Here, **keywords):
    words = GangRun(command=("python", "-c", code), **{"settle": 100.0, "grace": 0.3, **keywords})
    return run_worker_group(words, cluster, Console(["hf_s3cr3t"]), sleep=cluster.sleep)


ME = "import os, sys, time, pathlib; me = int(os.environ['LEVANTER_PROCESS_ID'])\n"


def test_each_has_its_place_and_slice(capsys):
    names = ("LEVANTER_NUM_PROCESSES", "LEVANTER_PROCESS_ID", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "A")
    cluster = Here(4, slices=2)
    assert run(f"{ME}print(*(os.environ[n] for n in {names}))", cluster, environment={"A": "hf_s3cr3t"}).kind == "done"
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines == [f"[{n}] 4 {n} 2 {n // 2} ***" for n in range(4)]


def test_an_error_of_one_is_shown_and_ends_the_rest(capsys, tmp_path):
    cluster = Here(3)
    code = f"{ME}(pathlib.Path({str(tmp_path)!r}) / str(me)).write_text(str(os.getpid()))\n"
    judgement = run(f"{code}if me == 1: raise KeyError('no such book')\ntime.sleep(100)", cluster, settle=0.5)
    assert (judgement.kind, judgement.exit_code, cluster.acquired) == ("failed", 1, 1)
    assert judgement.cause is not None and judgement.cause.process == 1
    shown = capsys.readouterr().err
    assert "process 1 on host 1: exit code 1 (internal error); its last output" in shown
    assert "Traceback (most recent call last)" in shown and "KeyError: 'no such book'" in shown
    assert_ended(tmp_path)


def assert_ended(folder: Path) -> None:
    """The processes whose numbers are in the files of a folder are no more, or wait to be collected."""
    deadline = time.monotonic() + 100
    # Who was ended in the middle of writing its number has ended.
    written = {file.name: text for file in folder.iterdir() if (text := file.read_text())}
    left = {name: Path("/proc") / number / "stat" for name, number in written.items()}
    while left and time.monotonic() < deadline:
        left = {name: path for name, path in left.items() if _runs(path)}
        time.sleep(0.05)
    assert not left


def _runs(stat: Path) -> bool:
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def killing(folder: Path, *, times: int):
    """Kills process 1 as soon as all of them run, in the first `times` attempts."""
    killed = set()

    def then(cluster: Here) -> None:
        pids = [folder / f"{cluster.acquired}-{index}" for index in range(len(cluster.members))]
        if (
            cluster.acquired <= times
            and pids[1] not in killed
            and all(pid.exists() and pid.read_text() for pid in pids)
        ):
            killed.add(pids[1])
            os.kill(int(pids[1].read_text()), signal.SIGKILL)

    return then


def surviving(folder: Path, *, needed: int) -> str:
    """A process of which number 1 is killed in the first attempts; the others then miss it, as in a collective."""
    return (
        f"{ME}folder = pathlib.Path({str(folder)!r})\n"
        "attempt = 1 + len([p for p in folder.iterdir() if p.name.endswith(f'-{me}')])\n"
        "(folder / f'{attempt}-{me}').write_text(str(os.getpid()))\n"
        f"if attempt >= {needed}: sys.exit(0)\n"
        "if me == 1: time.sleep(1000)\n"
        "other = folder / f'{attempt}-1'\n"
        "while not (other.exists() and other.read_text()): time.sleep(0.01)\n"
        "stat = pathlib.Path('/proc') / other.read_text() / 'stat'\n"
        "while stat.exists() and stat.read_text().rsplit(')', 1)[1].split()[0] != 'Z': time.sleep(0.01)\n"
        "raise RuntimeError('connection closed by peer')\n"
    )


def test_a_killed_process_restarts_all_once(capsys, tmp_path):
    cluster = Here(3, then=killing(tmp_path, times=1))
    assert run(surviving(tmp_path, needed=2), cluster).kind == "done"
    assert cluster.acquired == 2 and len(list(tmp_path.iterdir())) == 6
    said = capsys.readouterr().err
    assert "attempt 1: lost: process 1 on host 1: killed by SIGKILL; restarting, 3 attempts left" in said
    assert_ended(tmp_path)


def test_beyond_the_bound_it_ends_with_a_verdict(capsys, tmp_path):
    cluster = Here(2, then=killing(tmp_path, times=9))
    judgement = run(surviving(tmp_path, needed=9), cluster, restarts=1)
    assert (judgement.kind, judgement.exit_code, cluster.acquired) == ("lost", 5, 2)
    assert "attempt 2: lost: process 1 on host 1: killed by SIGKILL; giving up, 1 restarts" in capsys.readouterr().err


def test_a_host_that_is_gone_restarts_all(capsys, tmp_path):
    def take(cluster: Here) -> None:
        if cluster.acquired == 1:
            cluster.members[1].gone = True
            (tmp_path / "gone").touch()

    cluster = Here(2, then=take)
    code = f"{ME}while not pathlib.Path({str(tmp_path / 'gone')!r}).exists(): time.sleep(0.01)"
    assert run(code, cluster).kind == "done"
    assert cluster.acquired == 2 and "process 1 on host 1: the host is gone" in capsys.readouterr().err


def test_whoever_lets_go_of_a_process_ends_all_it_started(tmp_path):
    """Also when it was killed: its end of the pipe closes."""
    host = HostHere(0, 0)
    child = f"import os, time; open({str(tmp_path / 'child')!r}, 'w').write(str(os.getpid())); time.sleep(100)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    host.start(["python", "-c", parent], {}, grace=100.0)
    deadline = time.monotonic() + 100
    while not ((tmp_path / "child").exists() and (tmp_path / "child").read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    host.stop()
    while host.news().code is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert host.news().code == 143
    assert_ended(tmp_path)
