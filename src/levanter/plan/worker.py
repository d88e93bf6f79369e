"""The process that compiles: `python -m levanter.plan.worker REQUEST.json`, started by `levanter.plan.aot`.

Compiling for a TPU loads libtpu and turns this process's JAX into one that knows a pod which does not exist, so it is
done here and never in the caller; nor does the caller take the devices of this machine, which the worker may need. The
request names a function; it is called with the request's payload and the `Target`, and returns what is to be compiled:
anything with a `mesh` (a `MeshSpec`) and `programs` that have a `name` and a `lower(mesh)`, such as a `RunPlan`.
Programs are thus described twice from one config, once by the caller and once here, and never pickled. A request
without a function asks for the devices alone. Each step is reported as one line of JSON on the file descriptor the
request names.

The environment is set by the parent, before Python starts: libtpu reads it when it is loaded.
"""

import importlib
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from haliax_ext.meshspec import MeshSpec
from levanter.hardware import Accelerator, parse_accelerator
from levanter.plan.blame import raised_in_library

if TYPE_CHECKING:
    from jax.sharding import Mesh
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
        found = importlib.util.spec_from_file_location(path.stem, path)
        if found is None or found.loader is None or not path.is_file():
            raise BadFunction(f"{spec!r}: there is no file {module_name}")
        module = importlib.util.module_from_spec(found)
        sys.modules[path.stem] = module
        found.loader.exec_module(module)
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

    options: dict[str, Any] = {"chips_per_host_bounds": accelerator.chips_per_host_bounds}
    if accelerator.generation.chip_config_name:
        options["chip_config_name"] = accelerator.generation.chip_config_name
    if accelerator.slices > 1:
        options["num_slices"] = accelerator.slices
    found = topologies.get_topology_desc(platform="tpu", topology_name=accelerator.topology_name, **options)
    devices = list(found.devices)
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


def compile_program(
    program: Lowerable, mesh: MeshSpec, devices: Sequence[Any], options: Mapping[str, str], folder: Path
) -> dict[str, Any]:
    """Lowers and compiles one program; the outcome as plain values, its text in a file."""
    import jax

    started = time.monotonic()
    jax_mesh = mesh.build(devices)
    lowered = program.lower(jax_mesh)
    lower_seconds, started = time.monotonic() - started, time.monotonic()
    outcome: dict[str, Any] = {"name": program.name, "lower_seconds": lower_seconds, "mesh": _spec_of(mesh)}
    try:
        # The program's own options are in what was lowered; these come over them.
        compiled = lowered.compile(compiler_options=dict(options) or None)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {**outcome, "refused": str(error), "compile_seconds": time.monotonic() - started}
    outcome["compile_seconds"] = time.monotonic() - started
    analysis = compiled.memory_analysis()
    fields = ("argument", "output", "alias", "temp", "generated_code")
    outcome["memory"] = {name: getattr(analysis, f"{name}_size_in_bytes") for name in fields}
    outcome["memory"]["peak"] = getattr(analysis, "peak_memory_in_bytes", None) or None
    outcome["coordinates"] = _coordinates(jax_mesh)
    try:
        text = compiled.as_text() or ""
    except jax.errors.JaxRuntimeError as error:
        # Seen with libtpu newer than the one this JAX wants: the text fails, the memory stands.
        return {**outcome, "text_error": str(error)}
    path = folder / f"{program.name}.hlo.txt"
    path.write_text(text)
    return {**outcome, "text": str(path)}


def _spec_of(mesh: MeshSpec) -> dict[str, Any]:
    return {"axes": [list(axis) for axis in mesh.axes], "dcn": list(mesh.dcn), "granule": mesh.granule}


def run(request: Mapping[str, Any], emit: Callable[[Mapping[str, Any]], None]) -> None:
    """Serves one request."""
    import jax

    from levanter.plan.targets import target_of_devices, target_of_pod

    sys.path[:0] = request["import_paths"]
    accelerator = parse_accelerator(request["target"]) if request["target"] != "local" else None
    devices = jax.devices() if accelerator is None else topology_devices(accelerator)
    target = target_of_devices(devices) if accelerator is None else target_of_pod(accelerator)
    facts = {
        name: getattr(target, name)
        for name in ("platform", "kind", "devices", "granules", "hosts", "hbm_bytes", "host_bytes")
    }
    emit({"event": "devices", **facts})
    if request["function"] is None:
        emit({"event": "done"})
        return
    described: Describes = load_function(request["function"])(request["payload"], target)
    chosen = [p for p in described.programs if not request["programs"] or p.name in request["programs"]]
    emit({"event": "described", "programs": [p.name for p in chosen], "mesh": _spec_of(described.mesh)})
    for program in chosen:
        emit({"event": "compiling", "program": program.name})
        outcome = compile_program(
            program, described.mesh, devices, request["compiler_options"], Path(request["folder"])
        )
        emit({"event": "outcome", **outcome})
    emit({"event": "done"})


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
