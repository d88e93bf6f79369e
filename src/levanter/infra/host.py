"""One host of a gang: starts a process there, forwards its output, and ends it. Ray makes it an actor."""

import collections
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from levanter.infra.parent_watch import GRACE
from levanter.infra.processes import free_port

_MOST_LINES = 20_000


@dataclass(frozen=True, kw_only=True)
class ProcessStatus:
    """The output and exit code of a process since the last poll.

    Attributes:
        lines: its output.
        code: its exit code, once it has ended and all its lines have been reported.
    """

    lines: tuple[str, ...]
    code: int | None


class Host:
    """A host with at most one process.

    Args:
        address: the address at which the others reach the host.
    """

    def __init__(self, address: str):
        self._address = address
        self._process: subprocess.Popen | None = None
        # Bounded: a process that prints without end while nobody polls must not fill the memory of the actor.
        self._lines: collections.deque[str] = collections.deque(maxlen=_MOST_LINES)
        self._reader: threading.Thread | None = None

    def coordinator(self) -> str:
        """An address at which process 0 of a gang can listen if it runs on this host."""
        return f"{self._address}:{free_port('')}"

    def name(self) -> str:
        """The host's name and address, for messages."""
        return f"{socket.gethostname()} ({self._address})"

    def start(self, command: Sequence[str], environment: Mapping[str, str], *, grace: float) -> None:
        """Starts the process; `python` is the one that runs here."""
        assert self._process is None, "one process per host"
        # `python` on the PATH of a worker may be another interpreter than the one that has the packages.
        words = [sys.executable, *command[1:]] if command[0] in ("python", "python3") else list(command)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "levanter.infra.parent_watch", *words],
            env={**os.environ, **environment, GRACE: str(grace), "PYTHONUNBUFFERED": "1"},
            # The guard watches this pipe: it closes when this process ends, even by SIGKILL.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()

    def _read(self, process: subprocess.Popen) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self._lines.append(line.rstrip("\n"))

    def news(self) -> ProcessStatus:
        """The output and exit code since the last poll."""
        process, reader = self._process, self._reader
        assert process is not None and reader is not None, "polled before it was started"
        # Polled before the lines are taken, so that a reported exit code comes with all lines of the process.
        code = process.poll()
        if code is not None:
            # A leftover child may hold its output open; we do not wait for it.
            reader.join(timeout=2.0)
            self.stop()
        lines = []
        # The reader thread may append meanwhile, so the deque is emptied one by
        # one instead of copied and cleared.
        while self._lines:
            lines.append(self._lines.popleft())
        return ProcessStatus(lines=tuple(lines), code=code)

    def stop(self) -> None:
        """Releases the process, which its guard then ends."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
