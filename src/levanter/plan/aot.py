"""Ahead-of-time compilation of a run's Programs for a pod that is not attached.

`compile_programs("levanter.main.plan:describe", payload, target="v4-256")` starts a worker process that describes the
run again from the same config, compiles each Program with the real compiler of the target, and reports. A program
that does not fit is a value here (`Refused`), not an exception. These are exceptions: a compiler that crashes
(`CompileCrash`, exit code 4), a compiler that is not installed (`CompilerMissing`), bad input that the worker finds
(`WorkerBadInput`), and Ctrl-C, which also ends the worker and removes its files. Results for pods are cached on disk
(`kept`): a Program that was compiled before is read from the cache. `compile_ahead` compiles the Programs of several
runs (the candidates of a search) in parallel before `compile_programs` reads them.

A *worker* is the process that compiles (`levanter.plan.compile_worker` documents its request). The target *local* is
the devices of this machine.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from haliax_ext.hlo import CompiledFigures, MemoryFigures, OutOfMemory, read_figures, read_out_of_memory
from haliax_ext.meshspec import MeshSpec
from levanter.hardware import Accelerator, parse_accelerator
from levanter.plan.compile_cache import CompileCache
from levanter.plan.compile_pool import CompileCrash as CompileCrash
from levanter.plan.compile_pool import WorkerBadInput as WorkerBadInput
from levanter.plan.compile_pool import (
    mesh_to_json,
    num_workers,
    run_requests,
    run_workers,
    scratch_folder,
    worker_environment,
)
from levanter.plan.compilers import CompilerMissing as CompilerMissing
from levanter.plan.compilers import compiler_for, compiler_identity
from levanter.plan.fingerprint import fingerprint
from levanter.plan.gpu_kernel_time import kernel_estimate
from levanter.runplan import RunPlan, Target

logger = logging.getLogger(__name__)

_EMPTY: Mapping[str, Any] = {
    "function": None,
    "payload": {},
    "programs": [],
    "compiler_options": {},
    "import_paths": [],
    "kept": None,
    "decisive": None,
}


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A program that fits.

    Attributes:
        name: of the Program.
        mesh: the mesh that it was compiled for.
        memory: on one device.
        figures: cycles and collectives; `None` where the compiler returned no text (`text_error` says why).
        coordinates: of each device in row-major mesh order: slice, torus coordinates, core; `None` off TPUs.
        lower_seconds: time to trace and lower.
        compile_seconds: time in the compiler.
        kept_since: when it was compiled, in seconds since the epoch; `None` where it was compiled now, not cached.
    """

    name: str
    mesh: MeshSpec
    memory: MemoryFigures
    figures: CompiledFigures | None
    text_error: str | None
    coordinates: tuple[tuple[int, ...], ...] | None
    lower_seconds: float
    compile_seconds: float
    kept_since: float | None = None

    @property
    def peak_bytes(self) -> int:
        """Bytes on a device that count against its memory.

        On a TPU the heap, by which its compiler refuses a Program; the compiler's peak, which is less, where its report
        has no heap. Elsewhere the stated peak leaves out the temporaries, which are one allocation in
        addition to inputs and results, so the total counts.
        """
        stated = self.memory.heap or self.memory.peak if self.coordinates is not None else None
        # Of a GPU also what cuDNN will ask for on the device.
        workspace = 0 if self.figures is None else self.figures.workspace_bytes
        return stated or self.memory.total + workspace

    @property
    def result_bytes(self) -> int:
        """Bytes of results that are not written over donated inputs."""
        return self.memory.output - self.memory.alias

    @property
    def temporary_bytes(self) -> int:
        """The rest of `peak_bytes` beside inputs and new results.

        On TPUs the compiler's own figure of temporaries counts arrays that are never in memory together.
        """
        # Results may share memory with temporaries that end before, so the difference is what the temporaries take in
        # addition. Of a GPU it has the code and cuDNN's workspace, since its total counts them.
        return max(0, self.peak_bytes - self.memory.argument - self.result_bytes)


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A program that the compiler refuses because it does not fit the device."""

    name: str
    mesh: MeshSpec
    refusal: OutOfMemory
    lower_seconds: float
    compile_seconds: float
    kept_since: float | None = None


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
    kept: CompileCache | None = None,
    plan: RunPlan | None = None,
    decisive: str | None = None,
) -> tuple[Outcome, ...]:
    """Compiles the Programs of the run that `function` describes.

    Args:
        function: `package.module:name` or `file.py:name`; called in the worker with (payload, `Target`), returns a
            `RunPlan` or anything else with a `mesh` and `programs`.
        payload: plain JSON values.
        target: an accelerator, or `local`.
        programs: names of those to compile, in the order in which workers take them; all if empty.
        compiler_options: added to each Program's options. The run does not have them, so these are for experiments.
        import_paths: prepended to the worker's import path.
        keep_text: a folder in which the compiler's text of each program is written and stays.
        on_event: called with each line of the worker's report as it comes (`devices`, `described`, `compiling`,
            `outcome`).
        kept: the cache of results for pods; None to compile every Program.
        plan: the description, where the caller has it already: with it a cached result is found without a worker.
        decisive: a Program whose refusal ends the compilation of all others, which then have no outcome; None for none.

    Raises:
        AcceleratorError: an unknown target.
        CompilerMissing: the target's compiler is not installed.
        WorkerBadInput: describing the run failed on its input.
        CompileCrash: the compiler died.
    """
    pod = None if target == "local" else parse_accelerator(target) if isinstance(target, str) else target
    name = "local" if pod is None else pod.name
    if pod is not None:
        compiler_for(pod).require(name)
    with scratch_folder() as scratch:
        folder = scratch if keep_text is None else keep_text
        folder.mkdir(parents=True, exist_ok=True)
        outcomes: dict[str, Outcome] = {}
        # The fingerprint covers a Program's options but not those added here, so with added options only the
        # worker can look in the cache, by the lowered text.
        if pod is not None and kept is not None and plan is not None and not compiler_options:
            outcomes = dict(_cached_outcomes(plan, pod, programs, kept, keep_text))
        # With no names given, which Programs exist is known only to the worker:
        # an empty list in the request means all.
        missing = [name_ for name_ in programs if name_ not in outcomes]
        if isinstance(outcomes.get(decisive or ""), Refused):
            missing = []
        if programs and not missing:
            return tuple(outcomes[name_] for name_ in programs if name_ in outcomes)
        request = {
            **_EMPTY,
            "function": function,
            "payload": dict(payload),
            "target": name,
            "programs": missing,
            "compiler_options": dict(compiler_options or {}),
            "import_paths": list(import_paths),
            "folder": str(folder),
            "decisive": decisive,
            # Results for local devices are never cached: the key has a pod's topology, which they lack.
            "kept": None if kept is None or pod is None else {"folder": str(kept.folder), "bytes": kept.max_bytes},
        }
        events = _compiled(request, worker_environment(pod), scratch, on_event)
        outcomes |= {event["name"]: _outcome(event, pod) for event in events if event["event"] == "outcome"}
        # `run_workers` passes on one `described` event even where several workers describe the run.
        (described,) = (event["programs"] for event in events if event["event"] == "described")
        # A worker skips names that its plan does not have; so a requested Program may have no outcome.
        return tuple(outcomes[name_] for name_ in programs or described if name_ in outcomes)


@dataclass(frozen=True, kw_only=True)
class CompileRequest:
    """A run of which Programs will be compiled.

    Attributes:
        payload: the argument with which the worker's function describes it.
        plan: the description.
    """

    payload: Mapping[str, Any]
    plan: RunPlan


def compile_ahead(
    function: str,
    runs: Sequence[CompileRequest],
    *,
    target: Accelerator,
    programs: Sequence[str],
    kept: CompileCache,
    on_event: Callable[[Mapping[str, Any]], None] | None = None,
) -> None:
    """Compiles Programs of several runs in parallel and caches the results, where memory allows several workers.

    Failures are logged only: `compile_programs` compiles those runs again and raises the error.

    Args:
        function: see `compile_programs`.
        runs: the runs, in the order in which they will be compiled.
        target: the pod.
        programs: names of Programs, the same for each run.
        kept: the cache of results; `compile_programs` has to be given the same.
        on_event: called with each line of the workers' reports as it comes.
    """
    # `compile_programs` raises the error with its explanation; here it would end a search before its first row.
    try:
        compiler_for(target).require(target.name)
    except CompilerMissing:
        return
    new = [
        run
        for run in runs
        if {name for name, _ in _cached_outcomes(run.plan, target, programs, kept, None)} != {*programs}
    ]
    workers = num_workers(len(new))
    # One worker saves nothing: `compile_programs` compiles one run after another as fast.
    if workers < 2:
        return
    with scratch_folder() as scratch:
        requests = []
        for number, run in enumerate(new):
            folder = scratch / f"run-{number}"
            folder.mkdir()
            requests.append(
                {
                    **_EMPTY,
                    "function": function,
                    "payload": dict(run.payload),
                    "target": target.name,
                    "programs": list(programs),
                    "folder": str(folder),
                    "kept": {"folder": str(kept.folder), "bytes": kept.max_bytes},
                }
            )
        errors = run_requests(
            requests, environment=worker_environment(target), scratch=scratch, workers=workers, on_event=on_event
        )
    for run, error in zip(new, errors, strict=True):
        if error is not None:
            logger.info("not compiled ahead: %s: %s", run.payload, str(error).splitlines()[0])


def _cached_outcomes(
    plan: RunPlan, pod: Accelerator, programs: Sequence[str], kept: CompileCache, keep_text: Path | None
) -> Iterator[tuple[str, Outcome]]:
    """Cached results that are found by fingerprint, without lowering anything."""
    by_name, compiler = {program.name: program for program in plan.programs}, compiler_identity(pod)
    for name in programs:
        digest = fingerprint(by_name[name], plan) if name in by_name else None
        answer = None if digest is None else kept.follow(digest, compiler)
        if answer is None:
            continue
        if keep_text is not None and answer.text is not None:
            (keep_text / f"{name}.hlo.txt").write_text(answer.text)
        # Cached reports leave out name and mesh, since Programs of several names may share an entry.
        event = {**answer.report, "name": name, "mesh": mesh_to_json(plan.mesh), "kept_since": answer.compiled_at}
        yield name, _outcome(event, pod, answer.text)


def _compiled(
    request: Mapping[str, Any],
    environment: Mapping[str, str],
    scratch: Path,
    on_event: Callable[[Mapping[str, Any]], None] | None,
) -> list[dict[str, Any]]:
    """The events of several workers; of a single one where several ran out of host memory."""
    # A second worker could not open the devices of this machine, which the first one holds.
    workers = 1 if request["target"] == "local" else num_workers(len(request["programs"]))
    options: dict[str, Any] = {"environment": environment, "scratch": scratch, "on_event": on_event}
    try:
        return run_workers(request, workers=workers, **options)
    # A worker killed by SIGKILL is taken for one that the kernel ended for want of memory. Programs that were
    # compiled before that are in the cache, so the second attempt compiles the rest.
    except CompileCrash as error:
        if workers == 1 or not error.out_of_memory:
            raise
        logger.warning("%s; compiling one program at a time now", str(error).splitlines()[0])
        return run_workers(request, workers=1, **options)


def devices_here() -> Target:
    """The devices of this machine as a `Target`, counted by a worker so that this process does not take them.

    Raises:
        CompileCrash: JAX finds no device, or dies on the way.
    """
    with scratch_folder() as scratch:
        request = {**_EMPTY, "target": "local", "folder": str(scratch)}
        events = run_workers(request, environment=worker_environment(None), scratch=scratch)
    event = next(event for event in events if event["event"] == "devices")
    return Target(name="local", **{key: value for key, value in event.items() if key != "event"})


def _outcome(event: Mapping[str, Any], pod: Accelerator | None, text: str | None = None) -> Outcome:
    """Builds the outcome from a worker's report.

    Args:
        event: the report.
        pod: the target; None for the devices of this machine.
        text: of the compiler; by default read from the file that the report names.
    """
    spec = event["mesh"]
    mesh = MeshSpec(
        axes=tuple((name, size) for name, size in spec["axes"]), dcn=tuple(spec["dcn"]), granule=spec["granule"]
    )
    times = {name: event[name] for name in ("lower_seconds", "compile_seconds")}
    times["kept_since"] = event.get("kept_since")
    if text is None and "text" in event:
        text = Path(event["text"]).read_text()
    if "refused" in event:
        # RESOURCE_EXHAUSTED without HBM figures is some other resource (host memory,
        # scalar memory): not a verdict on the run.
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
        memory=MemoryFigures(**event["memory"], heap=event.get("heap_bytes")),
        figures=None if text is None else read_figures(text, mesh, estimate=kernel_estimate(pod)),
        text_error=event.get("text_error"),
        coordinates=tuple(map(tuple, coordinates)) if coordinates else None,
        **times,
    )
