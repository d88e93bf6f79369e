"""Several real processes of one run on this machine, with virtual devices: started, watched, killed, always reaped.

with Run(tmp_path, 2, ["levanter.main.eval_lm", "--config_path", path], devices=4) as run:
    run.wait_for(1, "loading")
    run.kill(1)
    ended = run.wait()
"""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

TESTS = Path(__file__).resolve().parent.parent
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""These programs compile for longer than they run."""


def free_port() -> int:
    """A port that nothing listens on, of those that the kernel gives to no connection meanwhile."""
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        first = 32768
    dice = random.SystemRandom()
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("", dice.randrange(first // 2, first)))
            except OSError:
                continue
            return probe.getsockname()[1]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended.

    Attributes:
        code: its exit code.
        output: what it printed, errors included.
        at: when, on the monotonic clock.
    """

    code: int
    output: str
    at: float


class Run:
    """Processes of one run; leaving the context kills what is left.

    Args:
        folder: for what they print.
        count: how many.
        command: a module of ours (or a script) and its arguments.
        devices: virtual devices of each.
        cache: a folder of compiled programs that several runs share.
        told: how many processes they are told there are.
        absent: numbers that are not started.
    """

    def __init__(
        self,
        folder: Path,
        count: int,
        command: Sequence[str],
        *,
        devices: int = 4,
        cache: Path | None = None,
        told: int | None = None,
        absent: Sequence[int] = (),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self._port = free_port()
        self._files = [folder / f"output.{number}.txt" for number in range(count)]
        self._running: list[subprocess.Popen | None] = []
        self._killed: dict[int, float] = {}
        program = [str(TESTS / "helpers" / "end_with_parent.py"), *command]
        for number in range(count):
            if number in absent:
                self._running.append(None)
                continue
            with self._files[number].open("wb") as out:
                self._running.append(
                    subprocess.Popen(
                        [sys.executable, "-u", *program],
                        env={
                            **os.environ,
                            "JAX_PLATFORMS": "cpu",
                            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {QUICK}",
                            "PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS.parent, TESTS.parent / "src"))),
                            "LEVANTER_COORDINATOR": f"localhost:{self._port}",
                            "LEVANTER_NUM_PROCESSES": str(count if told is None else told),
                            "LEVANTER_PROCESS_ID": str(number),
                            "STARTED_BY": str(os.getpid()),
                            **({} if cache is None else _cached(cache)),
                        },
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                    )
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for process in self._running:
            if process is not None and process.poll() is None:
                process.kill()
        for process in self._running:
            if process is not None:
                process.wait()
        if error is not None:
            for number, file in enumerate(self._files):
                if file.exists():
                    sys.stderr.write(f"\n===== process {number}\n{self.output(number)[-6000:]}\n")

    def output(self, number: int) -> str:
        """What a process has printed so far."""
        return self._files[number].read_text(errors="replace")

    def wait_for(self, number: int, text: str, *, seconds: float = 400.0) -> None:
        """Waits until a process has printed something."""
        process = self._running[number]
        assert process is not None
        deadline = time.monotonic() + seconds
        while text not in self.output(number):
            assert process.poll() is None, f"process {number} ended with {process.returncode} before {text!r}"
            assert time.monotonic() < deadline, f"process {number} did not print {text!r} in {seconds} s"
            time.sleep(0.02)

    def kill(self, number: int, how: int = signal.SIGKILL) -> float:
        """Sends a process a signal; when, on the monotonic clock."""
        process = self._running[number]
        assert process is not None
        process.send_signal(how)
        self._killed[number] = time.monotonic()
        return self._killed[number]

    def wait(self, *, seconds: float = 400.0) -> list[Ended]:
        """Waits until all have ended; those that were not started have code -1."""
        deadline = time.monotonic() + seconds
        at: dict[int, float] = {}
        while len(at) < sum(process is not None for process in self._running):
            for number, process in enumerate(self._running):
                if process is not None and number not in at and process.poll() is not None:
                    at[number] = time.monotonic()
            assert time.monotonic() < deadline, f"still running after {seconds} s: {self.still_running()}"
            time.sleep(0.02)
        return [
            Ended(code=-1, output="", at=0.0)
            if process is None
            else Ended(code=process.returncode, output=self.output(number), at=at[number])
            for number, process in enumerate(self._running)
        ]

    def still_running(self) -> list[int]:
        """The numbers of those that have not ended."""
        return [n for n, process in enumerate(self._running) if process is not None and process.poll() is None]


def check_named(ended: Sequence[Ended], victim: int) -> None:
    """Everybody but the victim ended with code 5, and named it and what it was doing itself."""
    for number, each in enumerate(ended):
        if number != victim:
            assert each.code == 5, (number, each.code, each.output[-4000:])
            said = f"process {victim} of {len(ended)} is missing; noticed by process {number} "
            assert said in each.output, each.output[-4000:]


def _cached(folder: Path) -> dict[str, str]:
    """What makes JAX keep every compiled program, however small, in a folder."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def run_together(
    folder: Path, count: int, command: Sequence[str], *, devices: int = 4, code: int = 0, **more
) -> list[str]:
    """Runs processes to their end; what each printed. All must end with `code`."""
    with Run(folder, count, command, devices=devices, **more) as run:
        ended = run.wait()
        assert [each.code for each in ended] == [code] * count, [each.code for each in ended]
    return [each.output for each in ended]
