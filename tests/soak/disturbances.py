"""What happens to the soak's runs: each takes a process that runs, and the exit codes that are promised for it."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from helpers.processes import free_port

from soak.work import Work

SLOW_DISK = Path(__file__).parent / "slow_disk"
DISK_BYTES = 64 << 20
SECONDS = 300


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """How one attempt at a run ended.

    Attributes:
        disturbance: what happened to it.
        codes: of its processes.
        promised: whether these were promised.
        text: what they printed.
        too_late_after: seconds that the run took, where it was over before anything could happen to it.
    """

    disturbance: str
    codes: tuple[int, ...]
    promised: bool
    text: str
    too_late_after: float | None = None


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a run is made to suffer.

    Attributes:
        folder: of the run, on a small disk of its own where one can be mounted.
        small: whether it is one.
        environment: of every process.
        typical: seconds that an undisturbed run takes.
    """

    folder: Path
    small: bool
    environment: dict[str, str]
    typical: float


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mounts a disk of 64 MiB at a folder, where that is allowed; else says no."""
    folder.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "soak", str(folder)], capture_output=True, check=False
    )
    try:
        yield mounted.returncode == 0
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], check=False)
        shutil.rmtree(folder, ignore_errors=True)


class Running:
    """The processes of one attempt."""

    def __init__(self, work: Work, place: Place, *, more: dict[str, str] | None = None):
        command = work.command(place.folder)
        port = free_port()
        self.outputs = [place.folder.parent / f"said.{number}.txt" for number in range(work.processes)]
        self.processes = []
        for number, output in enumerate(self.outputs):
            told = {}
            if work.processes > 1:
                told = {
                    "LEVANTER_COORDINATOR": f"localhost:{port}",
                    "LEVANTER_NUM_PROCESSES": str(work.processes),
                    "LEVANTER_PROCESS_ID": str(number),
                }
            devices = f"--xla_force_host_platform_device_count={8 // work.processes}"
            environment = {**place.environment, **told, "XLA_FLAGS": devices, **(more or {})}
            with output.open("wb") as out:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-u", "-m", *command],
                        env=environment,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        cwd=place.folder,
                    )
                )

    def wait(self, seconds: float) -> bool:
        """Whether all have ended within so many seconds."""
        end = time.monotonic() + seconds
        while any(process.poll() is None for process in self.processes):
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True

    def send(self, number: int) -> None:
        """Sends a signal to all that are still there."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    def ended(self) -> tuple[tuple[int, ...], str]:
        """Exit codes and output, after all have ended; a hang ends the soak."""
        if not self.wait(SECONDS):
            self.send(signal.SIGKILL)
            text = "".join(path.read_text(errors="replace") for path in self.outputs)
            raise TimeoutError(f"still running after {SECONDS} s:\n{text[-3000:]}")
        codes = tuple(process.returncode for process in self.processes)
        return codes, "".join(path.read_text(errors="replace") for path in self.outputs)


def kinds(work: Work, place: Place) -> list[str]:
    """The disturbances that a kind of run can meet."""
    if work.processes > 1:
        return ["lost peer", "SIGTERM", "SIGKILL"]
    found = ["SIGTERM", "SIGKILL", "slow disk", "stalls"]
    found += ["full disk"] if place.small else []
    if work.name == "train_lm":
        found += ["second run"]
        # Where nothing has been saved, nothing can be damaged.
        found += ["damaged checkpoint"] if _checkpoints(place.folder) else []
    return found


def disturb(kind: str, work: Work, place: Place, chance: random.Random) -> Attempt:
    """Starts a run, does to it what `kind` says, and waits for its end."""
    if kind == "damaged checkpoint" and (damaged := _damage(place.folder, chance)) is None:
        kind = "nothing"
    more = {}
    if kind == "slow disk":
        path = os.pathsep.join((str(SLOW_DISK), place.environment["PYTHONPATH"]))
        more = {"SOAK_SLOW_SECONDS": "0.2", "PYTHONPATH": path}
    began = time.monotonic()
    running = Running(work, place, more=more)
    over = running.wait(chance.uniform(0.2, 0.95) * place.typical)
    took = time.monotonic() - began if over else None
    if over and kind not in ("slow disk", "damaged checkpoint"):
        kind = "nothing"
    filler = place.folder / "filler"
    second: Running | None = None
    if not over:
        if kind in ("SIGTERM", "SIGKILL"):
            running.send(getattr(signal, kind))
        elif kind == "lost peer":
            chance.choice(running.processes).kill()
        elif kind == "stalls":
            for _ in range(3):
                running.send(signal.SIGSTOP)
                time.sleep(chance.uniform(0.2, 2.0))
                running.send(signal.SIGCONT)
                time.sleep(chance.uniform(0.1, 0.5))
        elif kind == "full disk":
            _fill(filler, leave=chance.choice((0, 4096, 200_000)))
        elif kind == "second run":
            running.outputs = [path.rename(path.with_name(f"first.{path.name}")) for path in running.outputs]
            second = Running(work, place)
    codes, text = running.ended()
    filler.unlink(missing_ok=True)
    allowed = {
        "nothing": {0}, "slow disk": {0}, "stalls": {0}, "SIGTERM": {0, *work.preempted}, "SIGKILL": {0, -9},
        "full disk": {0, 2}, "damaged checkpoint": {0, 2}, "lost peer": {0, 5, -9}, "second run": {0},
    }[kind]  # fmt: skip
    promised = set(codes) <= allowed
    if second is not None:
        others, more_text = second.ended()
        codes, text = (*codes, *others), text + more_text
        told = others != (2,) or "another process is writing here" in more_text
        promised = promised and set(others) <= {0, 2} and told
    if kind == "damaged checkpoint" and codes == (2,):
        # What the message tells a user to do.
        promised = promised and damaged is not None and damaged.name in text
        shutil.rmtree(damaged or place.folder / "none", ignore_errors=True)
    promised = promised and (kind == "SIGKILL" or "Traceback (most recent call last)" not in text)
    return Attempt(disturbance=kind, codes=codes, promised=promised, text=text, too_late_after=took)


def _fill(path: Path, *, leave: int) -> None:
    """Fills the disk but for some bytes."""
    free = os.statvfs(path.parent)
    with contextlib.suppress(OSError), path.open("wb") as file:
        for _ in range(max(free.f_bavail * free.f_frsize - leave, 0) // 4096 + bool(not leave)):
            file.write(bytes(4096))


def _damage(folder: Path, chance: random.Random) -> Path | None:
    """Flips a bit of the newest checkpoint, or cuts one of its files; returns its folder."""
    steps = _checkpoints(folder)
    if not steps:
        return None
    newest = steps[-1]
    path = chance.choice(sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size))
    content = bytearray(path.read_bytes())
    if chance.random() < 0.5:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    else:
        del content[chance.randrange(len(content)) :]
    path.write_bytes(content)
    return newest


def _checkpoints(folder: Path) -> list[Path]:
    """The folders of a run's complete checkpoints, the newest last."""
    found = sorted((folder / "checkpoints/run").glob("step-*/metadata.json"), key=lambda path: path.stat().st_mtime)
    return [path.parent for path in found]
