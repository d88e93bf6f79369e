"""`load`: a `LoadPlan` and a source → arrays in their final shards.

`HostReader`'s threads fill blocks; the calling thread hands full blocks to the devices, in the order of the plan's
steps, and runs the plan's exchange Programs, on all hosts in the same order. What was read into blocks that are not yet
on a device stays within a budget, except that the oldest *unit* (blocks that are read together) always goes on
(`admissions`).
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import haliax as hax
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from haliax_ext.host_reader import HostReader, InflightUnit, Readers
from haliax_ext.load_plan import LoadPlan, LoadStep
from haliax_ext.load_plan import default_memory_bytes as default_memory_bytes
from haliax_ext.load_progress import LoadProgress, LoadReport, MemoryWatch
from haliax_ext.load_strategy import plan_loading as plan_loading
from haliax_ext.meshspec import Device, MeshSpec
from haliax_ext.nonfinite import NotFinite
from haliax_ext.planner import ShardingPlan
from haliax_ext.program import Jit, Program
from haliax_ext.read_scheduler import ReadBatch, admissions, read_all
from haliax_ext.reshard_programs import seconds_program
from haliax_ext.sources import RemoteAccess, TensorSource, remote_of

PROGRESS_SECONDS = 0.2
"""How often progress is reported."""


@dataclass(frozen=True)
class LoadedArrays(Mapping[str, jax.Array]):
    """The loaded arrays by path, and how it went."""

    arrays: Mapping[str, jax.Array]
    report: LoadReport

    def __getitem__(self, path: str) -> jax.Array:
        return self.arrays[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)


def hosts_of(mesh: Mesh) -> np.ndarray:
    """The host of each device of a mesh, of the mesh's shape: its processes, numbered from 0 without gaps."""
    processes = np.asarray([device.process_index for device in _flat_devices(mesh)], dtype=np.int64)
    return np.unique(processes, return_inverse=True)[1].reshape(mesh.devices.shape)


def _flat_devices(mesh: Mesh) -> list[Device]:
    """The devices of a mesh, in its row-major order."""
    return cast("list[Device]", mesh.devices.reshape(-1).tolist())


def load(
    load_plan: LoadPlan,
    sharding_plan: ShardingPlan,
    source: TensorSource,
    mesh: Mesh,
    *,
    memory_bytes: int | None = None,
    progress: Callable[[LoadProgress], None] | None = None,
    threads: int | None = None,
    read_bytes: int | None = None,
    jit: Jit = Program.jit,
) -> LoadedArrays:
    """Reads every leaf of a plan into its final shards on `mesh`.

    Args:
        load_plan: how; made for the hosts of `mesh` (`hosts_of`).
        sharding_plan: where; the one that `load_plan` was made from.
        source: what the plan was made for.
        mesh: the devices.
        memory_bytes: host memory beyond the arrays; by default a tenth of this host's arrays, at least 256 MiB and at
            most 4 GiB.
        progress: called from the calling thread, a few times a second and at the end.
        threads: reading threads; by default one for each core, at least 2 and at most 16, and as many as a source on
            another machine asks for.
        read_bytes: bytes of one read; by default what suits the source.
        jit: makes the plan's Programs callable.

    Returns:
        The arrays by path (a mapping), with the report.

    Raises:
        ValueError: the plan is for other hosts than `mesh` has.
    """
    assert load_plan.sharding.leaves == sharding_plan.leaves, "the load plan was made from a different sharding plan"
    host = _this_host(load_plan, mesh)
    budget = default_memory_bytes(load_plan.local_bytes(host)) if memory_bytes is None else memory_bytes
    remote = remote_of(source)
    if remote is not None:
        remote.resume()
    readers = Readers.of(remote, budget, threads=threads, read_bytes=read_bytes)
    began = time.perf_counter()
    with MemoryWatch() as memory, HostReader(source, readers) as reader:
        job = _Job(
            plan=load_plan, mesh=mesh, host=host, reader=reader, remote=remote, jit=jit, progress=progress, began=began
        )
        arrays = job.run(budget - readers.held_bytes, ahead=readers.ahead_bytes)
        if remote is not None:
            remote.settle()
        read, found = reader.bytes_done, reader.not_finite
    seconds = time.perf_counter() - began
    report = LoadReport(
        bytes_read=read,
        seconds=seconds,
        peak_rss_bytes=memory.peak_bytes,
        bytes_per_device=load_plan.bytes_per_device,
        seconds_by_host=_seconds_by_host(load_plan, mesh, seconds, jit),
        not_finite=_in_order(load_plan, found),
        network="" if remote is None else str(remote),
    )
    return LoadedArrays(arrays, report)


def _in_order(plan: LoadPlan, found: Mapping[tuple[str, str], NotFinite]) -> tuple[NotFinite, ...]:
    """What is not finite, as the plan has the leaves, and as each leaf has its source tensors."""
    places = {load.path: (n, load.sources) for n, load in enumerate(load for step in plan.steps for load in step.loads)}

    def place(key: tuple[str, str]) -> tuple[int, int]:
        number, sources = places[key[0]]
        return number, list(sources).index(key[1])

    return tuple(found[key] for key in sorted(found, key=place))


def _this_host(plan: LoadPlan, mesh: Mesh) -> int:
    if MeshSpec.from_mesh(mesh).axes != plan.sharding.mesh.axes:
        raise ValueError(f"the load plan is for mesh {plan.sharding.mesh}, not for {MeshSpec.from_mesh(mesh)}")
    found = hosts_of(mesh).reshape(-1).tolist()
    if found != list(plan.hosts):
        raise ValueError(
            f"the load plan is for {plan.num_hosts} hosts, or for a different order of hosts: this mesh has "
            f"{max(found) + 1}; make it with plan_loading(…, hosts=hosts_of(mesh))"
        )
    here = jax.process_index()
    mine = {n for n, device in zip(found, _flat_devices(mesh), strict=True) if device.process_index == here}
    if len(mine) != 1:
        raise ValueError(f"process {here} has no device in mesh {MeshSpec.from_mesh(mesh)}")
    return mine.pop()


def _seconds_by_host(plan: LoadPlan, mesh: Mesh, seconds: float, jit: Jit) -> tuple[float, ...]:
    if plan.num_hosts == 1:
        return (seconds,)
    program = seconds_program(plan.sharding.mesh)
    one_each = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    value = jax.make_array_from_callback((mesh.size,), one_each, lambda _: np.full(1, seconds, np.float32))
    everyone = jit(program, mesh)(hax.NamedArray(value, (hax.Axis("device", mesh.size),)))
    by_device = np.asarray(everyone.array.addressable_data(0))
    return tuple(float(by_device[plan.devices_of(host)[0]]) for host in range(plan.num_hosts))


class _Job:
    """The calling thread's part of a load."""

    def __init__(
        self,
        *,
        plan: LoadPlan,
        mesh: Mesh,
        host: int,
        reader: HostReader,
        remote: RemoteAccess | None,
        jit: Jit,
        progress: Callable[[LoadProgress], None] | None,
        began: float,
    ):
        self._plan, self._mesh, self._reader, self._jit = plan, mesh, reader, jit
        self._remote = remote
        self._progress, self._began, self._told = progress, began, -math.inf
        self._bytes_total, self._job_bytes = plan.bytes_by_host[host], sum(plan.bytes_by_host)
        self._local = plan.devices_of(host)
        everyone = _flat_devices(mesh)
        self._devices: list[Device] = [everyone[n] for n in self._local.tolist()]
        self._arrays: dict[str, jax.Array] = {}
        self._shards: dict[str, dict[int, jax.Array]] = {}
        self._arriving: dict[str, Mapping[str, hax.NamedArray]] = {}

    def run(self, budget: int, *, ahead: int) -> dict[str, jax.Array]:
        if self._plan.initial:
            made = self._jit(self._plan.initialize_program, self._mesh)()
            self._arrays |= {path: named.array for path, named in made.items()}
        found = admissions(self._plan, self._local, together=self._remote is not None)
        read_all(found, self._reader, self._finish, budget=budget, nbytes=self._bytes_total, ahead=ahead)
        self._tell()
        in_order = [leaf_plan.leaf.path for leaf_plan in self._plan.sharding.leaves]
        return {path: self._arrays[path] for path in in_order if path in self._arrays}

    def _finish(self, admission: ReadBatch) -> None:
        """Waits for an admission and places it."""
        while not self._reader.wait(admission.arrivals, PROGRESS_SECONDS):
            self._tell_now_and_then()
        self._tell_now_and_then()
        if admission.is_exchange:
            for step in admission.steps:
                self._exchange(
                    step, [each for each in admission.arrivals if any(each.load is load for load in step.loads)]
                )
        else:
            self._place(admission)

    def _put(self, arrivals: list[InflightUnit]) -> dict[int, jax.Array]:
        """Blocks → single-device arrays, by position among this host's devices."""
        found: dict[int, jax.Array] = {}
        for arrival in arrivals:
            for position, number in enumerate(arrival.which.tolist()):
                if number in arrival.blocks:
                    found[position] = jax.device_put(arrival.blocks[number], self._devices[position])
            arrival.blocks.clear()
            arrival.futures.clear()
        jax.block_until_ready(list(found.values()))
        return found

    def _assemble(self, shape: tuple[int, ...], spec: PartitionSpec, shards: dict[int, jax.Array]) -> jax.Array:
        in_order = [shards[position] for position in range(len(self._devices))]
        return jax.make_array_from_single_device_arrays(shape, NamedSharding(self._mesh, spec), in_order)

    def _place(self, admission: ReadBatch) -> None:
        for arrival in admission.arrivals:
            self._shards.setdefault(arrival.load.path, {}).update(self._put([arrival]))
        if not admission.completes:
            return
        for load in (load for step in admission.steps for load in step.loads):
            shards = self._shards.pop(load.path)
            self._arrays[load.path] = self._assemble(load.leaf.shape, load.spec, shards)

    def _exchange(self, step: LoadStep, arrivals: list[InflightUnit]) -> None:
        piece = step.piece or (0, 0)
        slabs: list[hax.NamedArray] = []
        for leaf_load in step.loads:
            exchange = leaf_load.exchange
            assert exchange is not None
            shards = self._put([arrival for arrival in arrivals if arrival.load is leaf_load])
            spec = exchange.read_mapping.spec(leaf_load.leaf.names)
            array = self._assemble(exchange.slab_shape(piece), spec, shards)
            slabs.append(hax.NamedArray(array, exchange.slab_value(piece).axes))
            del shards, array
        programs = self._plan.step_programs(step)
        is_derived = step.loads[0].derived is not None
        if step.piece is None:
            (whole,) = programs
            found = self._jit(whole, self._mesh)(*slabs)
            own = {theirs.name: load.path for theirs, load in zip(whole.inputs, step.loads, strict=True)}
        else:
            begin, put = programs
            path = step.loads[0].path
            so_far = self._arriving.pop(path, None) or self._jit(begin, self._mesh)()
            everywhere = NamedSharding(self._mesh, PartitionSpec())
            at = jax.make_array_from_callback((), everywhere, lambda _: np.asarray(piece[0], np.int32))
            found = self._jit(put, self._mesh)(so_far, slabs[0], at)
            if step.piece != step.loads[0].pieces[-1]:
                self._arriving[path] = found
            own = dict.fromkeys(found, step.loads[0].path)
        # A Program that another step's leaves share calls them by those leaves' paths; what is derived has its own.
        named = found if is_derived else {own[path]: array for path, array in found.items()}
        # One exchange at a time, so that no more than one transient is on the devices.
        self._arrays |= {path: jax.block_until_ready(array.array) for path, array in named.items()}

    def _tell_now_and_then(self) -> None:
        if time.perf_counter() - self._told >= PROGRESS_SECONDS:
            self._tell()

    def _tell(self) -> None:
        self._told = time.perf_counter()
        if self._progress is not None:
            path, layer = self._reader.at
            self._progress(
                LoadProgress(
                    bytes_done=self._reader.bytes_done,
                    bytes_total=self._bytes_total,
                    job_bytes=self._job_bytes,
                    seconds=self._told - self._began,
                    path=path,
                    layer=layer,
                    network="" if self._remote is None else str(self._remote),
                )
            )
