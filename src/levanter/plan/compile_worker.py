"""The compile worker process: `python -m levanter.plan.compile_worker REQUEST.json`, started by `levanter.plan.aot`.

Compiling for a TPU loads libtpu and turns this process's JAX into one that knows a pod which does not exist, so it is
done here and never in the caller; nor does the caller take the devices of this machine, which the worker may need. The
request names a function; it is called with the request's payload and the `Target`, and returns what is to be compiled:
anything with a `mesh` (a `MeshSpec`) and `programs` that have a `name` and a `lower(mesh)`, such as a `RunPlan`.
Programs are thus described twice from one config, once by the caller and once here, and never pickled. A request
without a function asks for the devices alone. Each step is reported as one line of JSON on the file descriptor the
request names.

The environment is set by the parent, before Python starts: libtpu reads it when it is loaded.
"""

import hashlib
import importlib
import importlib.util
import json
import os
import sys
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
from levanter.plan.compile_cache import CachedOutcome, CompileCache, installed_compiler
from levanter.plan.compile_pool import mesh_to_json
from levanter.plan.fingerprint import compiler_environment, fingerprint, lowered_digest
from levanter.plan.preflight.state import raised_in_library

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from jax.stages import Compiled as Executable
    from jax.stages import Lowered


class Lowerable(Protocol):
    """What `Program` is to this process."""

    @property
    def name(self) -> str:
        """How events and messages call it."""
        ...

    def lower(self, mesh: "Mesh") -> "Lowered":
        """The program lowered for `mesh`, ready to be compiled."""
        ...


class Describes(Protocol):
    """What the named function returns; a `RunPlan` is one."""

    @property
    def mesh(self) -> MeshSpec:
        """The mesh that the programs are for."""
        ...

    @property
    def programs(self) -> Sequence[Lowerable]:
        """What is compiled, in order."""
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
    """Devices of a pod that is not there: they can be meshed and compiled for, and nothing else."""
    from jax.experimental import topologies

    arguments: dict[str, Any] = {"chips_per_host_bounds": accelerator.chips_per_host_bounds}
    if accelerator.generation.chip_config_name:
        arguments["chip_config_name"] = accelerator.generation.chip_config_name
    if accelerator.slices > 1:
        arguments["num_slices"] = accelerator.slices
    topology = topologies.get_topology_desc(platform="tpu", topology_name=accelerator.topology_name, **arguments)
    devices = list(topology.devices)
    assert len(devices) == accelerator.devices, f"{accelerator}: libtpu reports {len(devices)} devices"
    return devices


def _coordinates(mesh: "Mesh") -> list[list[int]] | None:
    """Where each device of the mesh sits, in row-major mesh order: slice, torus coordinates, core."""
    rows = []
    for device in mesh.devices.flat:
        coords = getattr(device, "coords", None)
        if coords is None:
            return None
        rows.append([getattr(device, "slice_index", None) or 0, *coords, device.core_on_chip])
    return rows


@contextmanager
def without_source_locations() -> Iterator[None]:
    """Lowers without saying from which files and lines.

    A TPU kernel is in a lowered Program as bytes, its own places among them with every caller's; so a line that moved
    anywhere on the way to it, or another folder, would make it another Program.
    """
    import jax

    name = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, name)
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, before)


@dataclass(frozen=True, kw_only=True)
class CompilerSession:
    """Where Programs are compiled.

    Attributes:
        devices: for which.
        accelerator: their pod; None for the devices here.
        options: over the Programs' own.
        folder: where texts go.
        kept: answers of pods' compilers; None for compiling everything anew.
    """

    devices: Sequence[Any]
    accelerator: Accelerator | None
    options: Mapping[str, str]
    folder: Path
    kept: CompileCache | None

    def outcome(self, program: Lowerable, described: Describes) -> dict[str, Any]:
        """What the compiler says of one Program, or said before, as plain values; its text in a file."""
        import jax

        mesh, started = described.mesh, time.monotonic()
        jax_mesh = mesh.build(self.devices)
        with without_source_locations():
            lowered = program.lower(jax_mesh)
        lower_seconds, started = time.monotonic() - started, time.monotonic()
        identity = {"name": program.name, "mesh": mesh_to_json(mesh)}
        key = way = None
        if self.kept is not None:
            key = self._key(program, lowered, described.mesh, _coordinates(jax_mesh))
            way = None if self.options else fingerprint(program, described)
            if (answer := self.kept.find(key)) is not None:
                if way is not None:
                    self.kept.lead(way, key)
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
            # The program's own options are in what was lowered; these come over them.
            with translate_option_errors(program.name, {**program_options, **self.options}):
                compiled = lowered.compile(compiler_options=dict(self.options) or None)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            report |= {"refused": str(error), "compile_seconds": time.monotonic() - started}
        else:
            report["compile_seconds"] = time.monotonic() - started
            facts, text = _read(compiled)
            report |= {**facts, "coordinates": _coordinates(jax_mesh)}
        if self.kept is not None and key is not None:
            self.kept.keep(key, CachedOutcome(report=report, text=text, compiled_at=time.time()), way=way)
        return {**report, **identity, **self._written(program, text)}

    def _key(
        self, program: Lowerable, lowered: "Lowered", mesh: MeshSpec, coordinates: list[list[int]] | None
    ) -> dict[str, Any]:
        """Everything that an answer depends on, as plain values."""
        assert self.accelerator is not None
        coordinates_digest = hashlib.sha256(json.dumps(coordinates).encode()).hexdigest()
        return {
            "lowered": lowered_digest(lowered.as_text(debug_info=True)),
            "topology": [self.accelerator.name, self.accelerator.topology_name, self.accelerator.slices],
            "mesh": [mesh_to_json(mesh), coordinates_digest],
            "compiler": installed_compiler(),
            "options": [dict(getattr(program, "compiler_options", {})), dict(self.options), compiler_environment()],
        }

    def _written(self, program: Lowerable, text: str | None) -> dict[str, str]:
        if text is None:
            return {}
        path = self.folder / f"{program.name}.hlo.txt"
        path.write_text(text)
        return {"text": str(path)}


def _read(compiled: "Executable") -> tuple[dict[str, Any], str | None]:
    """Memory of a compiled Program as plain values, and its text, or why there is none."""
    import jax

    analysis = compiled.memory_analysis()
    fields = ("argument", "output", "alias", "temp", "generated_code")
    memory = {name: getattr(analysis, f"{name}_size_in_bytes") for name in fields}
    memory["peak"] = getattr(analysis, "peak_memory_in_bytes", None) or None
    try:
        return {"memory": memory}, compiled.as_text() or ""
    except jax.errors.JaxRuntimeError as error:
        # Seen with libtpu newer than the one this JAX wants: the text fails, the memory stands.
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
        if not _claimed(Path(request["claims"]) / str(number)):
            continue
        emit({"event": "compiling", "program": program.name})
        emit({"event": "outcome", **session.outcome(program, described)})
    emit({"event": "done"})


def _claimed(path: Path) -> bool:
    """Whether this process is the first of those that serve a request to take a Program up."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _end_with(parent: int) -> None:
    """Ends this process when `parent` is gone, however it went: nobody would read what a compile says."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main(argv: Sequence[str]) -> int:
    """Serves the request in the file that `argv` names, telling events as JSON lines; returns the exit status."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    request = json.loads(Path(argv[0]).read_text())
    with os.fdopen(request["events_fd"], "w") as events:

        def emit(event: Mapping[str, Any]) -> None:
            events.write(json.dumps(event) + "\n")
            events.flush()

        try:
            run(request, emit)
        except ValueError as error:
            # Bad input, said by the rooms below; anything else is a traceback on stderr for the parent to show.
            if raised_in_library(error):
                raise
            emit({"event": "bad_input", "kind": type(error).__name__, "message": str(error)})
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
