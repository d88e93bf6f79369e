"""The compile worker process: `python -m levanter.plan.compile_worker REQUEST.json`, started by `levanter.plan.aot`.

Compiling for absent devices loads their compiler (`levanter.plan.compilers`) and turns this process's JAX into one that
knows a pod which does not exist, so it is done here and never in the caller; nor does the caller open the devices of
this machine, which the worker may need. The
request names a function; the worker calls it with the request's payload and the `Target`, and compiles what it returns:
anything with a `mesh` (a `MeshSpec`) and `programs` that have a `name` and a `lower(mesh)`, such as a `RunPlan`.
Programs are thus described twice from one config, once by the caller and once here, and never pickled. A request
without a function reports the devices alone. Each step is reported as one line of JSON on the file descriptor that the
request names.

The parent sets the environment before Python starts: compilers read it when they are loaded.
"""

import hashlib
import importlib
import importlib.util
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from haliax_ext.compiler_options import translate_option_errors
from haliax_ext.meshspec import MeshSpec
from levanter.hardware import Accelerator, parse_accelerator
from levanter.plan.compile_cache import CachedOutcome, CompileCache
from levanter.plan.compile_pool import mesh_to_json
from levanter.plan.compilers import compiler_for, compiler_identity
from levanter.plan.fingerprint import compiler_environment, fingerprint, lowered_digest
from levanter.plan.preflight.state import raised_in_library

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from jax.stages import Compiled as Executable
    from jax.stages import Lowered


_DUMP = "xla_dump_to"
_HEAP = re.compile(r"Memory Space: default \(color=0\)\s+Total bytes: (\d+)")
"""In a memory report; on-chip memory and that of the host have lists of their own."""


class Lowerable(Protocol):
    """The part of `Program` that the worker uses."""

    @property
    def name(self) -> str:
        """The name in events and messages."""
        ...

    def lower(self, mesh: "Mesh") -> "Lowered":
        """The program lowered for `mesh`, ready to be compiled."""
        ...


class Describes(Protocol):
    """The result of the named function, such as a `RunPlan`."""

    @property
    def mesh(self) -> MeshSpec:
        """The mesh that the programs are for."""
        ...

    @property
    def programs(self) -> Sequence[Lowerable]:
        """The Programs, in the order in which they are compiled."""
        ...


class BadFunction(ValueError):
    """The request names no function that can be imported."""


def load_function(spec: str) -> Callable[..., Any]:
    """Imports `package.module:function`, or `path/to/file.py:function`.

    Raises:
        BadFunction: there is no such module or function.
    """
    module_name, _, function = spec.rpartition(":")
    if module_name.endswith(".py"):
        path = Path(module_name)
        spec_ = importlib.util.spec_from_file_location(path.stem, path)
        if spec_ is None or spec_.loader is None or not path.is_file():
            raise BadFunction(f"{spec!r}: there is no file {module_name}")
        module = importlib.util.module_from_spec(spec_)
        # Registered before it runs: dataclasses and pickles of the module look
        # it up by name while it is executed.
        sys.modules[path.stem] = module
        spec_.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise BadFunction(f"{spec!r}: {error}; expected 'package.module:function' or 'file.py:function'") from error
    if not callable(getattr(module, function, None)):
        raise BadFunction(f"{spec!r}: {module_name} has no function {function!r}")
    return getattr(module, function)


def topology_devices(accelerator: Accelerator) -> list[Any]:
    """Devices of a pod without the pod: they can be placed on a mesh and compiled for, and nothing else."""
    devices = compiler_for(accelerator).devices(accelerator)
    # The compiler and our table of accelerators must agree, or bytes per device would be wrong without notice.
    assert len(devices) == accelerator.devices, f"{accelerator}: the compiler reports {len(devices)} devices"
    return devices


def _coordinates(mesh: "Mesh") -> list[list[int]] | None:
    """Where each device of the mesh sits, in row-major mesh order: slice, torus coordinates, core; None off TPUs."""
    rows = []
    for device in mesh.devices.flat:
        # Devices of the GPU compiler have coordinates too: slice, host and position in the host, which are no torus.
        coords = getattr(device, "coords", None) if device.platform == "tpu" else None
        if coords is None:
            return None
        rows.append([getattr(device, "slice_index", None) or 0, *coords, device.core_on_chip])
    return rows


@contextmanager
def without_source_locations() -> Iterator[None]:
    """Lowers without source locations.

    A lowered Program holds a TPU kernel as bytes that include the source locations of the kernel and of its callers, so
    a line that moves in any of these files, or another folder, would make it another Program for the cache.
    """
    import jax

    # The number of stack frames in a location; 0 leaves the names of operations, by which figures are grouped.
    name = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, name)
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, before)


@dataclass(frozen=True, kw_only=True)
class CompilerSession:
    """Compiles Programs for one set of devices.

    Attributes:
        devices: that the Programs are compiled for.
        accelerator: their pod; None for the devices of this machine.
        options: compiler options in addition to each Program's.
        folder: where the compiler's texts are written.
        kept: the cache of results for pods; None to compile every Program.
    """

    devices: Sequence[Any]
    accelerator: Accelerator | None
    options: Mapping[str, str]
    folder: Path
    kept: CompileCache | None

    def outcome(self, program: Lowerable, described: Describes) -> dict[str, Any]:
        """The compiler's result for one Program, cached or new, as plain values; its text is written to a file."""
        import jax

        mesh, started = described.mesh, time.monotonic()
        jax_mesh = mesh.build(self.devices, slices=self._slices)
        with without_source_locations():
            lowered = program.lower(jax_mesh)
        lower_seconds, started = time.monotonic() - started, time.monotonic()
        identity = {"name": program.name, "mesh": mesh_to_json(mesh)}
        key = digest = None
        if self.kept is not None:
            key = self._key(program, lowered, described.mesh, _coordinates(jax_mesh))
            # Added options are part of the key but not of the fingerprint, so such a result has no way to it.
            digest = None if self.options else fingerprint(program, described)
            if (answer := self.kept.find(key)) is not None:
                # The text was the same though the fingerprint was not (an edit that changes no
                # trace): the next lookup skips lowering.
                if digest is not None:
                    self.kept.lead(digest, key)
                return {
                    **answer.report,
                    **identity,
                    **self._written(program, answer.text),
                    "kept_since": answer.compiled_at,
                }
        report: dict[str, Any] = {"lower_seconds": lower_seconds}
        text = None
        program_options: Mapping[str, str] = getattr(program, "compiler_options", {})
        try:
            # `lowered` carries the Program's options already; those passed here override them.
            with (
                translate_option_errors(program.name, {**program_options, **self.options}),
                self._memory_report() as (dump_options, heap_bytes),
            ):
                compiled = lowered.compile(compiler_options={**self._compile_options, **dump_options} or None)
                heap = heap_bytes()
        except jax.errors.JaxRuntimeError as error:
            # A Program that does not fit is a result, cached like any other; every
            # other error is the compiler's failure.
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            report |= {"refused": str(error), "compile_seconds": time.monotonic() - started}
        else:
            report["compile_seconds"] = time.monotonic() - started
            facts, text = _read(compiled)
            # Beside JAX's figures: versions that share the cache take `memory` as JAX's figures and nothing else.
            report |= {**facts, "heap_bytes": heap, "coordinates": _coordinates(jax_mesh)}
        if self.kept is not None and key is not None:
            self.kept.keep(key, CachedOutcome(report=report, text=text, compiled_at=time.time()), way=digest)
        # The name and mesh are not part of the cached report: another Program with the same text reads it too.
        return {**report, **identity, **self._written(program, text)}

    @property
    def _compile_options(self) -> dict[str, str | bool]:
        """Options in addition to the Program's: those that the compiler needs without a device, and the request's."""
        needed = {} if self.accelerator is None else compiler_for(self.accelerator).options()
        return {**needed, **self.options}

    @contextmanager
    def _memory_report(self) -> Iterator[tuple[dict[str, str], Callable[[], int | None]]]:
        """Options that let the TPU compiler write its memory report, and a function that reads the heap from it.

        Of a Program that fits, nothing else states the bytes by which the compiler decides. The options are no part of
        the cache key: they change nothing that is compiled.
        """
        # A user who lets XLA write its files already gets them where they were wanted.
        if (
            self.accelerator is None
            or self.accelerator.generation.platform != "tpu"
            or _DUMP in os.environ.get("XLA_FLAGS", "")
        ):
            yield {}, lambda: None
            return
        with tempfile.TemporaryDirectory() as folder:
            # The folder gets some texts of the Program, a few MB, and no file for a single pass of the compiler. It is
            # removed once the report has been read.
            yield {_DUMP: folder, "xla_dump_hlo_pass_re": "NONE"}, lambda: reported_heap(Path(folder))

    @property
    def _slices(self) -> list[int] | None:
        """The slice of each device, where the devices do not state it."""
        pod = self.accelerator
        if pod is None or pod.generation.platform != "gpu":
            return None
        return [number // pod.chips_per_slice for number in range(pod.devices)]

    def _key(
        self, program: Lowerable, lowered: "Lowered", mesh: MeshSpec, coordinates: list[list[int]] | None
    ) -> dict[str, Any]:
        """The cache key: everything that the result depends on, as plain values."""
        assert self.accelerator is not None
        # The order of the devices decides which links a collective uses; a pod
        # has thousands, so their digest is enough.
        coordinates_digest = hashlib.sha256(json.dumps(coordinates).encode()).hexdigest()
        return {
            "lowered": lowered_digest(lowered.as_text(debug_info=True)),
            "topology": [self.accelerator.name, self.accelerator.topology_name, self.accelerator.slices],
            "mesh": [mesh_to_json(mesh), coordinates_digest],
            "compiler": compiler_identity(self.accelerator),
            "options": [dict(getattr(program, "compiler_options", {})), self._compile_options, compiler_environment()],
        }

    def _written(self, program: Lowerable, text: str | None) -> dict[str, str]:
        if text is None:
            return {}
        path = self.folder / f"{program.name}.hlo.txt"
        path.write_text(text)
        return {"text": str(path)}


def reported_heap(folder: Path) -> int | None:
    """Bytes of the heap of HBM in the memory report that the TPU compiler wrote; None where there is none."""
    # The compiler writes the report before it decides, so there is one of a Program that it refuses, too; the text of
    # the refusal has the same number with two decimals.
    for path in sorted(folder.glob("*memory-usage-report.txt")):
        if (total := _HEAP.search(path.read_text())) is not None:
            return int(total[1])
    return None


def _read(compiled: "Executable") -> tuple[dict[str, Any], str | None]:
    """The memory of a compiled Program as plain values, and its text, or the error where the text fails."""
    import jax

    analysis = compiled.memory_analysis()
    fields = ("argument", "output", "alias", "temp", "generated_code")
    memory = {name: getattr(analysis, f"{name}_size_in_bytes") for name in fields}
    memory["peak"] = getattr(analysis, "peak_memory_in_bytes", None) or None
    try:
        return {"memory": memory}, compiled.as_text() or ""
    except jax.errors.JaxRuntimeError as error:
        # Seen with a libtpu newer than this JAX supports: `as_text` fails while the memory analysis is valid.
        return {"memory": memory, "text_error": str(error)}, None


def run(request: Mapping[str, Any], emit: Callable[[Mapping[str, Any]], None]) -> None:
    """Serves one request."""
    import jax

    from levanter.plan.target_from_name import device_target, pod_target

    sys.path[:0] = request["import_paths"]
    accelerator = parse_accelerator(request["target"]) if request["target"] != "local" else None
    devices = jax.devices() if accelerator is None else topology_devices(accelerator)
    target = device_target(devices) if accelerator is None else pod_target(accelerator)
    facts = {
        name: getattr(target, name)
        for name in ("platform", "kind", "devices", "granules", "hosts", "hbm_bytes", "host_bytes")
    }
    emit({"event": "devices", **facts})
    if request["function"] is None:
        emit({"event": "done"})
        return
    described: Describes = load_function(request["function"])(request["payload"], target)
    by_name = {program.name: program for program in described.programs}
    chosen = [by_name[name] for name in request["programs"] or by_name if name in by_name]
    emit({"event": "described", "programs": [p.name for p in chosen], "mesh": mesh_to_json(described.mesh)})
    kept = request["kept"]
    session = CompilerSession(
        devices=devices,
        accelerator=accelerator,
        options=request["compiler_options"],
        folder=Path(request["folder"]),
        kept=None if kept is None else CompileCache(folder=Path(kept["folder"]), max_bytes=kept["bytes"]),
    )
    for number, program in enumerate(chosen):
        # Every worker walks the same list and compiles what it claims first, so
        # a slow Program holds up nobody else.
        if not _claimed(Path(request["claims"]) / str(number)):
            continue
        emit({"event": "compiling", "program": program.name})
        emit({"event": "outcome", **session.outcome(program, described)})
    emit({"event": "done"})


def _claimed(path: Path) -> bool:
    """Claims a Program by creating a file: True for the first worker of a request that tries."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _end_with(parent: int) -> None:
    """Ends this process when `parent` is gone, since nobody would read its events."""
    while os.getppid() == parent:
        time.sleep(1)
    # A compile in C++ holds the main thread for minutes: only an exit without cleanup ends it at once.
    os._exit(1)


def main(argv: Sequence[str]) -> int:
    """Serves the request in the file that `argv` names, writes events as JSON lines, and returns the exit status."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    request = json.loads(Path(argv[0]).read_text())
    with os.fdopen(request["events_fd"], "w") as events:

        def emit(event: Mapping[str, Any]) -> None:
            events.write(json.dumps(event) + "\n")
            events.flush()

        try:
            run(request, emit)
        except ValueError as error:
            # A `ValueError` of our packages is bad input; one raised inside JAX or NumPy is a bug, and its traceback
            # goes to stderr for the parent to show.
            if raised_in_library(error):
                raise
            emit({"event": "bad_input", "kind": type(error).__name__, "message": str(error)})
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
