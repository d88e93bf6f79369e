"""N local processes of one command: started and ended together, each line prefixed with its process number."""

import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence

from levanter.infra.console import Console
from levanter.infra.errors import INTERRUPTED, LaunchError
from levanter.infra.restart_policy import Outcome

COORDINATOR, NUM_PROCESSES, PROCESS_ID = "LEVANTER_COORDINATOR", "LEVANTER_NUM_PROCESSES", "LEVANTER_PROCESS_ID"


def place(coordinator: str, processes: int, index: int) -> dict[str, str]:
    """The variables that tell process `index` of `processes` its index; `coordinator` is `host:port` of process 0."""
    return {COORDINATOR: coordinator, NUM_PROCESSES: str(processes), PROCESS_ID: str(index)}


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago, of those that the kernel gives to no outgoing connection meanwhile.

    Args:
        host: the address to listen on; "" for all.
    """
    dice = random.SystemRandom()
    # Linux hands out 32768 and up; Ray's workers listen below 20000, and Kubernetes' nodes from 30000 on.
    for port in (*(dice.randrange(20_000, 30_000) for _ in range(200)), 0):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise LaunchError(f"{host or 'this machine'} has no free port")


class Processes:
    """The processes of one attempt.

    Args:
        command: the arguments of each.
        count: the number of processes.
        environment: variables of all; each also gets its index.
        console: shows their lines.
        grace: seconds from SIGTERM to SIGKILL.
    """

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        *,
        environment: Mapping[str, str],
        console: Console,
        grace: float = 10.0,
    ):
        self._command, self._count, self._environment = tuple(command), count, dict(environment)
        self._console, self._grace = console, grace
        self._running: list[subprocess.Popen] = []
        self._readers: list[threading.Thread] = []

    def run(self) -> Outcome:
        """Starts all, waits until all have exited with 0 or one has not, and ends the others.

        Returns:
            The first one that did not exit with 0; else process 0.

        Raises:
            LaunchError: there is no such program.
            KeyboardInterrupt: passed on to the processes, after they have ended.
        """
        try:
            self._start()
            return self._watch()
        except KeyboardInterrupt:
            self._end(signal.SIGINT)
            raise
        finally:
            # Readers end when all writers of their pipes have, so the processes
            # are ended before the readers are joined.
            self._end(signal.SIGTERM)
            for reader in self._readers:
                reader.join()

    def _start(self) -> None:
        coordinator = f"127.0.0.1:{free_port()}"
        # Prefixes of equal width keep the lines of all processes aligned.
        width = len(str(self._count - 1))
        for index in range(self._count):
            environment = {**self._environment, **place(coordinator, self._count, index), "PYTHONUNBUFFERED": "1"}
            try:
                process = subprocess.Popen(
                    self._command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    # Ctrl-C in the terminal reaches only the launcher, which forwards it once.
                    start_new_session=True,
                )
            except OSError as error:
                raise LaunchError(f"{self._command[0]}: {error.strerror or error}") from error
            self._running.append(process)
            reader = threading.Thread(target=self._show, args=(process, f"[{index:>{width}}] "), daemon=True)
            reader.start()
            self._readers.append(reader)

    def _show(self, process: subprocess.Popen, prefix: str) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self._console.show(line.rstrip("\n"), prefix=prefix)

    def _watch(self) -> Outcome:
        running = set(range(self._count))
        while running:
            for index in sorted(running):
                code = self._running[index].poll()
                if code is None:
                    continue
                running.discard(index)
                # The first process that fails is reported: the others fail because of it, and are ended.
                if code != 0:
                    first = Outcome(process=index, code=code)
                    self._console.say(f"{first}" + (f"; ending the other {len(running)}" if running else ""))
                    return first
            time.sleep(0.05)
        return Outcome(process=0, code=0)

    def _end(self, friendly: signal.Signals) -> None:
        """Ends what is still running, children included: SIGTERM first, SIGKILL after the grace period."""
        self._signal(friendly)
        deadline = time.monotonic() + self._grace
        while any(process.poll() is None for process in self._running) and time.monotonic() < deadline:
            time.sleep(0.05)
        # Sent to those that outlived the grace period; `_signal` skips the ones that have exited.
        self._signal(signal.SIGKILL)
        for process in self._running:
            process.wait()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._running:
            if process.poll() is None:
                try:
                    # Each process leads a session, so its pid is the id of its
                    # group: children get the signal too.
                    os.killpg(process.pid, number)
                except ProcessLookupError:
                    continue


def exit_code(outcome: Outcome) -> int:
    """The launcher's exit code for it: signals as a shell reports them."""
    if outcome.signal is not None:
        return 128 + outcome.signal
    return INTERRUPTED if outcome.code is None else outcome.code
