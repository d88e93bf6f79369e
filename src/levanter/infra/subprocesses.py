"""Calls programs for a launcher: captured, or with their lines shown as they come."""

import collections
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from levanter.infra.console import Console
from levanter.infra.errors import LaunchError

_KEPT_LINES = 400


@dataclass(frozen=True, kw_only=True)
class Called:
    """The outcome of a program.

    Attributes:
        code: its exit code.
        text: its output, standard error included (captured: all of it; shown: the last lines).
    """

    code: int
    text: str


class Caller:
    """Starts programs found on PATH.

    Args:
        console: where lines are shown.
        hints: program → what to print if it is not installed.
    """

    def __init__(self, console: Console, hints: dict[str, str] | None = None):
        self.console = console
        self._hints = {} if hints is None else hints
        self._running: list[subprocess.Popen] = []
        self._lock = threading.Lock()

    def capture(self, command: Sequence[str]) -> Called:
        """Runs a program to completion without showing anything."""
        with self._started(command) as process:
            text, _ = process.communicate()
        return Called(code=process.returncode, text=text)

    def show(self, command: Sequence[str], *, prefix: str = "", hide: tuple[str, ...] = ()) -> Called:
        """Runs a program and shows its lines as they come.

        Args:
            prefix: put before each line.
            hide: prefixes of lines that are not shown.
        """
        # Enough for the error at the end of a program's output, without keeping a run of days in memory.
        last_lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        with self._started(command) as process:
            assert process.stdout is not None
            for line in process.stdout:
                last_lines.append(line)
                if not line.startswith(hide):
                    self.console.show(line.rstrip("\n"), prefix=prefix)
            process.wait()
        return Called(code=process.returncode, text="".join(last_lines))

    def stop(self) -> None:
        """Terminates what is running."""
        with self._lock:
            # A copy: processes that end meanwhile remove themselves from the list.
            running = list(self._running)
        for process in running:
            if process.poll() is None:
                process.terminate()

    def _started(self, command: Sequence[str]) -> "_Running":
        try:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        except FileNotFoundError as error:
            hint = self._hints.get(command[0])
            raise LaunchError(f"{command[0]} is not on PATH" + (f": {hint}" if hint else "")) from error
        return _Running(process, self)

    def _enter(self, process: subprocess.Popen) -> None:
        with self._lock:
            self._running.append(process)

    def _exit(self, process: subprocess.Popen) -> None:
        with self._lock:
            self._running.remove(process)


class _Running:
    """A process that is terminated when its block is left early."""

    def __init__(self, process: subprocess.Popen, caller: Caller):
        self._process, self._caller = process, caller

    def __enter__(self) -> subprocess.Popen:
        self._caller._enter(self._process)
        return self._process

    def __exit__(self, *raised: object) -> None:
        # Left by an error or Ctrl-C: the program must not run on without its reader.
        if raised[0] is not None and self._process.poll() is None:
            self._process.terminate()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._caller._exit(self._process)
