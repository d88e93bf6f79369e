"""Compiling a run's own Programs for devices that are not there.

`compile_programs("levanter.main.plan:describe", payload, target="v4-256")` starts a worker process that describes the
run again from the same config, compiles each Program with the real compiler of the target, and reports. A program
that does not fit is a value here (`Refused`), not an exception; so is everything else the compiler says. What is an
exception: a compiler that crashes (`CompileCrash`, exit code 4), libtpu that is not installed (`LibtpuMissing`), bad
input found by the worker (`WorkerBadInput`), and Ctrl-C, after which the worker and what it left behind are gone.

Words. *worker*: the process that compiles (`levanter.plan.worker` says how it is told what to). *local*: the devices of
this machine, compiled for in the same way.
"""

import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from haliax_ext.hlo import CompiledFigures, MemoryFigures, OutOfMemory, read_figures, read_out_of_memory
from haliax_ext.meshspec import MeshSpec
from levanter.hardware import Accelerator, parse_accelerator
from levanter.run import Target

INSTALL_LINE = "pip install 'levanter[plan]'"
# Where libtpu says that it is in use; a killed process leaves it behind.
LOCK_FILE = Path("/tmp/libtpu_lockfile")

_EMPTY: Mapping[str, Any] = {
    "function": None,
    "payload": {},
    "programs": [],
    "compiler_options": {},
    "import_paths": [],
}


class LibtpuMissing(ValueError):
    """The TPU compiler is not installed."""

    def __init__(self, target: str):
        super().__init__(
            f"compiling for {target} needs the TPU compiler, which is not installed here: {INSTALL_LINE} "
            "(a CPU machine is enough; without it, plan with --no-compile)"
        )


class WorkerBadInput(ValueError):
    """Describing the run failed on its input, in the worker; `kind` is the name of the error there."""

    def __init__(self, kind: str, message: str):
        self.kind = kind
        super().__init__(message)


class CompileCrash(RuntimeError):
    """The compiler died; `last_lines` is the end of what it printed."""

    exit_code = 4

    def __init__(self, target: str, program: str | None, how: str, last_lines: Sequence[str]):
        self.program = program
        self.last_lines = tuple(last_lines)
        what = f"program {program}" if program else "before any program"
        super().__init__(f"the compiler for {target} {how} ({what}):\n" + "\n".join(f"  {x}" for x in last_lines))


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A program that fits.

    Attributes:
        name: the Program's.
        mesh: what it was compiled for.
        memory: on one device.
        figures: cycles and collectives; `None` where the compiler's text could not be had (`text_error` says why).
        coordinates: of each device in row-major mesh order: slice, torus coordinates, core; `None` off TPUs.
        lower_seconds: time to trace and lower.
        compile_seconds: time in the compiler.
    """

    name: str
    mesh: MeshSpec
    memory: MemoryFigures
    figures: CompiledFigures | None
    text_error: str | None
    coordinates: tuple[tuple[int, ...], ...] | None
    lower_seconds: float
    compile_seconds: float

    @property
    def peak_bytes(self) -> int:
        """Bytes on a device that count against its memory.

        On a TPU the compiler's own peak. Elsewhere temporaries are one allocation beside inputs and results, which the
        peak that is stated there leaves out.
        """
        stated = self.memory.peak if self.coordinates is not None else None
        return stated or self.memory.total


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A program that the compiler says does not fit."""

    name: str
    mesh: MeshSpec
    refusal: OutOfMemory
    lower_seconds: float
    compile_seconds: float


Outcome = Compiled | Refused


def compile_programs(
    function: str,
    payload: Mapping[str, Any],
    *,
    target: Accelerator | str,
    programs: Sequence[str] = (),
    compiler_options: Mapping[str, str] | None = None,
    import_paths: Sequence[str] = (),
    keep_text: Path | None = None,
    on_event: Callable[[Mapping[str, Any]], None] | None = None,
) -> tuple[Outcome, ...]:
    """Compiles what `function` describes.

    Args:
        function: `package.module:name` or `file.py:name`; called in the worker with (payload, `Target`), returns a
            `RunPlan` or anything else with a `mesh` and `programs`.
        payload: plain JSON values.
        target: an accelerator, or `local`.
        programs: names of those to compile; all if empty.
        compiler_options: over each Program's own; what is compiled must be what runs, so these are for experiments.
        import_paths: prepended to the worker's import path.
        keep_text: a folder in which the compiler's text of each program stays.
        on_event: called with each line of the worker's report as it comes (`devices`, `described`, `compiling`,
            `outcome`).

    Raises:
        AcceleratorError: an unknown target, or one for which no compiler runs here.
        LibtpuMissing: the TPU compiler is not installed.
        WorkerBadInput: describing the run failed on its input.
        CompileCrash: the compiler died.
    """
    pod = None if target == "local" else parse_accelerator(target) if isinstance(target, str) else target
    name = "local" if pod is None else pod.name
    if pod is not None and not pod.can_compile:
        raise WorkerBadInput(
            "AcceleratorError",
            f"{name}: only TPU programs can be compiled without the device; a GPU program needs a GPU",
        )
    if pod is not None and importlib.util.find_spec("libtpu") is None:
        raise LibtpuMissing(name)
    with _scratch_folder() as scratch:
        folder = scratch if keep_text is None else keep_text
        folder.mkdir(parents=True, exist_ok=True)
        request = {
            **_EMPTY,
            "function": function,
            "payload": dict(payload),
            "target": name,
            "programs": list(programs),
            "compiler_options": dict(compiler_options or {}),
            "import_paths": list(import_paths),
            "folder": str(folder),
        }
        events = run_worker(request, environment=worker_environment(pod), scratch=scratch, on_event=on_event)
        return tuple(_outcome(event) for event in events if event["event"] == "outcome")


def devices_here() -> Target:
    """The devices of this machine as a `Target`, counted by a worker so that this process does not take them.

    Raises:
        CompileCrash: JAX finds no device, or dies on the way.
    """
    with _scratch_folder() as scratch:
        request = {**_EMPTY, "target": "local", "folder": str(scratch)}
        events = run_worker(request, environment=worker_environment(None), scratch=scratch)
    found = next(event for event in events if event["event"] == "devices")
    return Target(name="local", **{key: value for key, value in found.items() if key != "event"})


def worker_environment(pod: Accelerator | None) -> dict[str, str]:
    """Our environment and import path, and for a pod what libtpu must be told before it is loaded."""
    # The worker imports what we import, however we came to it.
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if pod is None:
        return environment
    return environment | {
        # No metadata server is asked what machine this is.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": pod.libtpu_accelerator_type,
        "TPU_WORKER_HOSTNAMES": "localhost",
        # Several plans at once, and no lock file.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_LOG_DIR": "disabled",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_STDERR_LOG_LEVEL": "3",
        # Whatever is installed here, nothing of it is to be used.
        "JAX_PLATFORMS": "cpu",
    }


def run_worker(
    request: dict[str, Any],
    *,
    environment: Mapping[str, str],
    scratch: Path,
    on_event: Callable[[Mapping[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Runs one worker to its end and returns its events.

    Raises:
        WorkerBadInput: the worker reports bad input.
        CompileCrash: it ended in any other way than by saying that it is done.
    """
    read_end, write_end = os.pipe()
    request = {**request, "events_fd": write_end}
    request_file, errors_file = scratch / "request.json", scratch / "stderr.txt"
    request_file.write_text(json.dumps(request))
    lock_was_there = LOCK_FILE.exists()
    events: list[dict[str, Any]] = []
    with errors_file.open("wb") as errors, os.fdopen(read_end) as reports:
        # Its own session: Ctrl-C reaches us alone, and we end the worker with whatever it started.
        worker = subprocess.Popen(
            [sys.executable, "-m", "levanter.plan.worker", str(request_file)],
            env=dict(environment),
            stdout=errors,
            stderr=errors,
            pass_fds=(write_end,),
            start_new_session=True,
        )
        os.close(write_end)
        with _ended(worker, lock_was_there=lock_was_there):
            for line in reports:
                event = json.loads(line)
                events.append(event)
                if on_event is not None:
                    on_event(event)
            status = worker.wait()
    last = events[-1] if events else {}
    if last.get("event") == "bad_input":
        raise WorkerBadInput(last["kind"], last["message"])
    if status != 0 or last.get("event") != "done":
        compiling = [e["program"] for e in events if e["event"] == "compiling"]
        raise CompileCrash(
            request["target"], compiling[-1] if compiling else None, _how_it_ended(status), _tail(errors_file)
        )
    return events


@contextmanager
def _scratch_folder() -> Iterator[Path]:
    """A folder of our own that is gone afterwards.

    `tempfile` names it only once it is there: an interrupt in between would leave it behind. This one is named first.
    """
    folder = Path(tempfile.gettempdir()) / f"levanter-plan-{secrets.token_hex(8)}"
    try:
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _ended(worker: subprocess.Popen[bytes], *, lock_was_there: bool) -> Iterator[None]:
    """Leaves nothing of the worker behind, whatever happens."""
    try:
        yield
    finally:
        if worker.poll() is None:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
        if not lock_was_there:
            LOCK_FILE.unlink(missing_ok=True)


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"failed with exit code {status}"
    name = signal.Signals(-status).name
    return f"was killed by {name}" + (" (out of host memory?)" if name == "SIGKILL" else "")


def _tail(path: Path, lines: int = 15) -> list[str]:
    """The end of what was printed, without addresses of machine code."""
    noise = re.compile(r"\s*(@ |PC: @|https?://symbolize)|\s*$")
    return [line for line in path.read_text(errors="replace").splitlines() if not noise.match(line)][-lines:]


def _outcome(event: Mapping[str, Any]) -> Outcome:
    spec = event["mesh"]
    mesh = MeshSpec(
        axes=tuple((name, size) for name, size in spec["axes"]), dcn=tuple(spec["dcn"]), granule=spec["granule"]
    )
    times = {"lower_seconds": event["lower_seconds"], "compile_seconds": event["compile_seconds"]}
    if "refused" in event:
        refusal = read_out_of_memory(event["refused"])
        if refusal is None:
            raise CompileCrash(
                "this target", event["name"], "ran out of a resource", event["refused"].splitlines()[:15]
            )
        return Refused(name=event["name"], mesh=mesh, refusal=refusal, **times)
    coordinates = event["coordinates"]
    return Compiled(
        name=event["name"],
        mesh=mesh,
        memory=MemoryFigures(**event["memory"]),
        figures=read_figures(Path(event["text"]).read_text(), mesh) if "text" in event else None,
        text_error=event.get("text_error"),
        coordinates=tuple(map(tuple, coordinates)) if coordinates else None,
        **times,
    )
