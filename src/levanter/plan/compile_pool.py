"""Starts compile workers, reads their reports, and removes their processes and files.

A *worker* is a process that compiles (`levanter.plan.compile_worker`). Several may serve one request: each describes
the run and claims the next Program that no other worker has claimed. Processors and free memory limit their number.
"""

import json
import os
import re
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from haliax_ext.meshspec import MeshSpec
from levanter.hardware import Accelerator
from levanter.hardware.memory import free_memory
from levanter.plan.compilers import compiler_for

# libtpu creates this file while it is loaded. A killed process leaves it, and a later load of libtpu may refuse to
# start.
LOCK_FILE = Path("/tmp/libtpu_lockfile")
WORKER_BYTES = 5 << 30
"""The most host memory that a worker was seen to take; the compiler's memory grows with the Program's text."""

EventListener = Callable[[Mapping[str, Any]], None]


class WorkerBadInput(ValueError):
    """Describing the run failed on its input, in the worker; `kind` is the name of the error there."""

    def __init__(self, kind: str, message: str):
        self.kind = kind
        super().__init__(message)


class CompileCrash(RuntimeError):
    """The compiler died; `last_lines` is the end of what it printed."""

    exit_code = 4

    def __init__(
        self, target: str, program: str | None, how: str, last_lines: Sequence[str], *, out_of_memory: bool = False
    ):
        self.program = program
        self.last_lines = tuple(last_lines)
        self.out_of_memory = out_of_memory
        what = f"program {program}" if program else "before any program"
        super().__init__(f"the compiler for {target} {how} ({what}):\n" + "\n".join(f"  {x}" for x in last_lines))


def num_workers(programs: int) -> int:
    """The number of workers that the memory and processors of this machine allow.

    Args:
        programs: how many there are to compile.
    """
    free = free_memory()
    by_memory = programs if free is None else free // WORKER_BYTES
    return max(1, min(programs, len(os.sched_getaffinity(0)), by_memory))


def worker_environment(pod: Accelerator | None) -> dict[str, str]:
    """This process's environment and import path, and for a pod the variables that its compiler reads at its start."""
    # `sys.path` may differ from PYTHONPATH (an editable install, a script's folder): the worker must import the same
    # code.
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if pod is None:
        return environment
    # The worker compiles for a topology; it must not open an accelerator of this machine.
    return environment | compiler_for(pod).environment(pod) | {"JAX_PLATFORMS": "cpu"}


def mesh_to_json(mesh: MeshSpec) -> dict[str, Any]:
    """A mesh as plain values."""
    return {"axes": [list(axis) for axis in mesh.axes], "dcn": list(mesh.dcn), "granule": mesh.granule}


def run_workers(
    request: Mapping[str, Any],
    *,
    environment: Mapping[str, str],
    scratch: Path,
    workers: int = 1,
    on_event: EventListener | None = None,
) -> list[dict[str, Any]]:
    """Runs the workers of one request until they exit and returns their events in order of arrival.

    Args:
        request: what to compile; workers claim `programs` in this order. They are ended once `decisive` is refused.
        environment: of the workers.
        scratch: a folder for this request alone.
        workers: their number.
        on_event: called with each event as it arrives; events that every worker sends are passed on once.

    Raises:
        WorkerBadInput: a worker reports bad input.
        CompileCrash: a worker exited without reporting that it is done.
    """
    events: list[dict[str, Any]] = []
    seen: set[str] = set()

    def listener(event: Mapping[str, Any]) -> None:
        # Every worker of a request describes the same run, so these events repeat.
        once = event["event"] in ("devices", "described", "done")
        if once and event["event"] in seen:
            return
        seen.add(event["event"])
        events.append(dict(event))
        if on_event is not None:
            on_event(event)

    request = _with_claims(request, scratch)
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        # Callbacks run in reverse order: first every worker is ended, then the
        # lock file that they may leave is removed.
        stack.callback(_remove_lock, LOCK_FILE.exists())
        for number in range(workers):
            started = _Worker(request, environment=environment, scratch=scratch, number=number, listener=listener)
            stack.callback(started.end)
            selector.register(started.reports, selectors.EVENT_READ, started)
        # A worker's descriptor is unregistered at its end of file, so an empty map means that all have exited.
        while selector.get_map():
            for key, _ in selector.select():
                worker: _Worker = key.data
                if not worker.read():
                    selector.unregister(worker.reports)
                    worker.check_exit(request["target"])
            # What other workers compile takes minutes and would not change the answer: the stack ends them.
            if any(event["event"] == "outcome" and _decides(event, request) for event in events):
                break
    return events


def _decides(outcome: Mapping[str, Any], request: Mapping[str, Any]) -> bool:
    """Whether an outcome is the refusal of the Program by which the request is decided."""
    return outcome["name"] == request["decisive"] and "refused" in outcome


def run_requests(
    requests: Sequence[Mapping[str, Any]],
    *,
    environment: Mapping[str, str],
    scratch: Path,
    workers: int,
    on_event: EventListener | None = None,
) -> list[WorkerBadInput | CompileCrash | None]:
    """Runs one worker for each of several requests, and returns the error of each, or None.

    Args:
        requests: what the workers compile, in the order in which they are started.
        environment: of the workers.
        scratch: a folder for these requests alone.
        workers: the number that run at a time.
        on_event: called with each event of each worker as it arrives.
    """
    waiting = list(enumerate(requests))
    errors: list[WorkerBadInput | CompileCrash | None] = [None] * len(waiting)
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        stack.callback(_remove_lock, LOCK_FILE.exists())
        while waiting or selector.get_map():
            while waiting and len(selector.get_map()) < workers:
                number, request = waiting.pop(0)
                started = _Worker(
                    _with_claims(request, scratch),
                    environment=environment,
                    scratch=scratch,
                    number=number,
                    listener=on_event or (lambda _: None),
                )
                stack.callback(started.end)
                selector.register(started.reports, selectors.EVENT_READ, (number, started))
            for key, _ in selector.select():
                number, worker = key.data
                if not worker.read():
                    selector.unregister(worker.reports)
                    try:
                        worker.check_exit(requests[number]["target"])
                    except (WorkerBadInput, CompileCrash) as error:
                        errors[number] = error
    return errors


def _with_claims(request: Mapping[str, Any], scratch: Path) -> dict[str, Any]:
    """Adds to a request the folder in which its workers claim Programs, each by creating a file."""
    claims = scratch / f"claims-{secrets.token_hex(4)}"
    claims.mkdir()
    return {**request, "claims": str(claims)}


class _Worker:
    """One worker process and the events that it has sent so far."""

    def __init__(
        self,
        request: Mapping[str, Any],
        *,
        environment: Mapping[str, str],
        scratch: Path,
        number: int,
        listener: EventListener,
    ):
        self._on_event = listener
        self._rest = b""
        self._last: dict[str, Any] = {}
        self._compiling: str | None = None
        self._errors = scratch / f"stderr-{number}.txt"
        self.reports, write_end = os.pipe()
        request_file = scratch / f"request-{number}.json"
        request_file.write_text(json.dumps({**request, "events_fd": write_end}))
        # Output goes to a file, not a pipe: nobody reads it meanwhile, and a
        # full pipe would block the compiler.
        with self._errors.open("wb") as errors:
            # In a session of its own Ctrl-C does not reach the worker, and `end` kills its whole process group.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "levanter.plan.compile_worker", str(request_file)],
                env=dict(environment),
                stdout=errors,
                stderr=errors,
                pass_fds=(write_end,),
                start_new_session=True,
            )
        # The worker has the only write end now, so its exit, however it ends, is an end of file here.
        os.close(write_end)

    def read(self) -> bool:
        """Reads the events that have arrived; returns False at the end of file."""
        data = os.read(self.reports, 1 << 16)
        # A read may end within a line; the rest is kept for the next one.
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._last = json.loads(line)
            if self._last["event"] == "compiling":
                self._compiling = self._last["program"]
            self._on_event(self._last)
        return bool(data)

    def check_exit(self, target: str) -> None:
        """Waits for the exit and raises what went wrong.

        Raises:
            WorkerBadInput: the worker reported bad input.
            CompileCrash: the worker did not report that it was done.
        """
        status = self._process.wait()
        if self._last.get("event") == "bad_input":
            raise WorkerBadInput(self._last["kind"], self._last["message"])
        if status != 0 or self._last.get("event") != "done":
            # Only the kernel for want of memory, or a person, sends SIGKILL
            # while this process still reads the events.
            killed = status == -signal.SIGKILL
            raise CompileCrash(
                target, self._compiling, _how_it_ended(status), _tail(self._errors), out_of_memory=killed
            )

    def end(self) -> None:
        """Ends the process group and closes the pipe; safe to call in any state."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self.reports)


def _remove_lock(existed: bool) -> None:
    # A lock file that was here before belongs to a process that is not ours.
    if not existed:
        LOCK_FILE.unlink(missing_ok=True)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder that is removed afterwards.

    `tempfile` returns the name after the folder exists: an interrupt in between would leave it. Here the name comes
    first.
    """
    folder = Path(tempfile.gettempdir()) / f"levanter-plan-{secrets.token_hex(8)}"
    try:
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"failed with exit code {status}"
    name = signal.Signals(-status).name
    return f"was killed by {name}" + (" (out of host memory?)" if name == "SIGKILL" else "")


def _tail(path: Path, lines: int = 15) -> list[str]:
    """The last lines of the output, without the machine-code addresses of a C++ stack trace."""
    noise = re.compile(r"\s*(@ |PC: @|https?://symbolize)|\s*$")
    return [line for line in path.read_text(errors="replace").splitlines() if not noise.match(line)][-lines:]
