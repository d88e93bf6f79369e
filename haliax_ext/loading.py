"""`load`: a `LoadPlan` and a source → arrays in their final shards.

The path of a weight: `read_scheduler` groups what a host reads into `ReadBatch`es, each of `ReadPlan`s, each of
`ReadRequest`s; `HostReader`'s threads carry out the requests and fill `Block`s; the calling thread hands full blocks to
the devices, in the order of the plan's steps, and runs the plan's reshard Programs, on all hosts in the same order.
Blocks that are not yet on a device stay within a memory budget, except that the oldest batch always makes progress.
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

from haliax_ext.host_reader import HostReader, Readers
from haliax_ext.load_plan import LoadPlan, LoadStep
from haliax_ext.load_plan import default_memory_bytes as default_memory_bytes
from haliax_ext.load_progress import LoadProgress, LoadReport, MemoryWatch
from haliax_ext.load_strategy import plan_loading as plan_loading
from haliax_ext.meshspec import Device, MeshSpec
from haliax_ext.nonfinite import NotFinite
from haliax_ext.planner import ShardingPlan
from haliax_ext.program import Jit, Program
from haliax_ext.read_plan import ReadPlan
from haliax_ext.read_scheduler import ReadBatch, read_all, read_batches
from haliax_ext.reshard import seconds_program
from haliax_ext.sources import RemoteAccess, TensorSource, remote_access

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


def device_hosts(mesh: Mesh) -> np.ndarray:
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
        load_plan: how; made for the hosts of `mesh` (`device_hosts`).
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
    remote = remote_access(source)
    # A load that was interrupted before leaves the source interrupted.
    if remote is not None:
        remote.resume()
    readers = Readers.of(remote, budget, threads=threads, read_bytes=read_bytes)
    began = time.perf_counter()
    with MemoryWatch() as memory, HostReader(source, readers) as reader:
        job = _Job(
            plan=load_plan, mesh=mesh, host=host, reader=reader, remote=remote, jit=jit, progress=progress, began=began
        )
        # The readers' buffers come out of the same budget as the blocks.
        arrays = job.run(budget - readers.held_bytes, ahead=readers.ahead_bytes)
        # Inside the reader's context: a checkpoint that changed while it was read fails the load before arrays are
        # returned.
        if remote is not None:
            remote.settle()
        bytes_read, not_finite = reader.bytes_done, reader.not_finite
    seconds = time.perf_counter() - began
    report = LoadReport(
        bytes_read=bytes_read,
        seconds=seconds,
        peak_rss_bytes=memory.peak_bytes,
        bytes_per_device=load_plan.bytes_per_device,
        seconds_by_host=_seconds_by_host(load_plan, mesh, seconds, jit),
        not_finite=_in_plan_order(load_plan, not_finite),
        network="" if remote is None else str(remote),
    )
    return LoadedArrays(arrays, report)


def _in_plan_order(plan: LoadPlan, not_finite: Mapping[tuple[str, str], NotFinite]) -> tuple[NotFinite, ...]:
    """The records of (leaf, tensor) in the order of the plan's leaves, and of each leaf's source tensors."""
    loads = (load for step in plan.steps for load in step.loads)
    numbered = {load.path: (number, load.sources) for number, load in enumerate(loads)}

    def position(key: tuple[str, str]) -> tuple[int, int]:
        number, sources = numbered[key[0]]
        return number, list(sources).index(key[1])

    return tuple(not_finite[key] for key in sorted(not_finite, key=position))


def _this_host(plan: LoadPlan, mesh: Mesh) -> int:
    if MeshSpec.from_mesh(mesh).axes != plan.sharding.mesh.axes:
        raise ValueError(f"the load plan is for mesh {plan.sharding.mesh}, not for {MeshSpec.from_mesh(mesh)}")
    hosts = device_hosts(mesh).reshape(-1).tolist()
    if hosts != list(plan.hosts):
        raise ValueError(
            f"the load plan is for {plan.num_hosts} hosts, or for a different order of hosts: this mesh has "
            f"{max(hosts) + 1}; make it with plan_loading(…, hosts=device_hosts(mesh))"
        )
    process = jax.process_index()
    local_hosts = {n for n, device in zip(hosts, _flat_devices(mesh), strict=True) if device.process_index == process}
    if len(local_hosts) != 1:
        raise ValueError(f"process {process} has no device in mesh {MeshSpec.from_mesh(mesh)}")
    return local_hosts.pop()


def _seconds_by_host(plan: LoadPlan, mesh: Mesh, seconds: float, jit: Jit) -> tuple[float, ...]:
    if plan.num_hosts == 1:
        return (seconds,)
    program = seconds_program(plan.sharding.mesh)
    # Every device holds its host's seconds; the Program is a collective, so all hosts run it.
    by_device = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    value = jax.make_array_from_callback((mesh.size,), by_device, lambda _: np.full(1, seconds, np.float32))
    gathered = jit(program, mesh)(hax.NamedArray(value, (hax.Axis("device", mesh.size),)))
    seconds_by_device = np.asarray(gathered.array.addressable_data(0))
    return tuple(float(seconds_by_device[plan.host_devices(host)[0]]) for host in range(plan.num_hosts))


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
        self._progress, self._began, self._reported = progress, began, -math.inf
        self._bytes_total, self._job_bytes = plan.bytes_by_host[host], sum(plan.bytes_by_host)
        self._local = plan.host_devices(host)
        all_devices = _flat_devices(mesh)
        self._devices: list[Device] = [all_devices[n] for n in self._local.tolist()]
        self._arrays: dict[str, jax.Array] = {}
        self._shards: dict[str, dict[int, jax.Array]] = {}
        self._arriving: dict[str, Mapping[str, hax.NamedArray]] = {}

    def run(self, budget: int, *, ahead: int) -> dict[str, jax.Array]:
        # Programs run in the same order on all hosts: initialization first, then the steps.
        if self._plan.initial:
            initial = self._jit(self._plan.initialize_program, self._mesh)()
            self._arrays |= {path: named.array for path, named in initial.items()}
        batches = read_batches(self._plan, self._local, together=self._remote is not None)
        read_all(batches, self._reader, self._finish, budget=budget, nbytes=self._bytes_total, ahead=ahead)
        self._report()
        in_order = [leaf_plan.leaf.path for leaf_plan in self._plan.sharding.leaves]
        return {path: self._arrays[path] for path in in_order if path in self._arrays}

    def _finish(self, batch: ReadBatch) -> None:
        """Waits for a batch and hands its blocks to the devices."""
        # Waiting in short intervals lets this thread report progress between them.
        while not self._reader.wait(batch.futures, PROGRESS_SECONDS):
            self._report_if_due()
        self._report_if_due()
        batch.futures.clear()
        if batch.is_resharded:
            for step in batch.steps:
                self._reshard(step, batch.plans)
        else:
            self._assemble_batch(batch)

    def _put(self, plans: list[ReadPlan]) -> dict[int, jax.Array]:
        """Blocks → single-device arrays, by position among this host's devices."""
        shards: dict[int, jax.Array] = {}
        for plan in plans:
            for block in plan.blocks:
                for position in block.devices:
                    shards[position] = jax.device_put(block.memory, self._devices[position])
                # The devices have copied the memory, or adopted it (CPU): in either case it is no longer ours.
                block.memory = None
        # Only now the transfers are complete, and the host memory of the next batch may be allocated.
        jax.block_until_ready(list(shards.values()))
        return shards

    def _assemble(self, shape: tuple[int, ...], spec: PartitionSpec, shards: dict[int, jax.Array]) -> jax.Array:
        # The order of this host's devices in the mesh, as JAX expects of the arrays it assembles.
        in_order = [shards[position] for position in range(len(self._devices))]
        return jax.make_array_from_single_device_arrays(shape, NamedSharding(self._mesh, spec), in_order)

    def _assemble_batch(self, batch: ReadBatch) -> None:
        for plan in batch.plans:
            self._shards.setdefault(plan.load.path, {}).update(self._put([plan]))
        # The blocks of a leaf may come in several batches; its array is assembled with the last.
        if not batch.completes:
            return
        for load in (load for step in batch.steps for load in step.loads):
            shards = self._shards.pop(load.path)
            self._arrays[load.path] = self._assemble(load.leaf.shape, load.spec, shards)

    def _reshard(self, step: LoadStep, plans: list[ReadPlan]) -> None:
        """Runs a step's Programs: slabs in, arrays in their final shards out."""
        piece = step.piece or (0, 0)
        slabs: list[hax.NamedArray] = []
        for leaf_load in step.loads:
            reshard = leaf_load.reshard
            assert reshard is not None
            shards = self._put([plan for plan in plans if plan.load is leaf_load])
            spec = reshard.read_mapping.spec(leaf_load.leaf.names)
            array = self._assemble(reshard.slab_shape(piece), spec, shards)
            slabs.append(hax.NamedArray(array, reshard.slab_value(piece).axes))
            # The Program's input must be the only reference, so that its buffer is free as soon as it was used.
            del shards, array
        programs = self._plan.step_programs(step)
        is_derived = step.loads[0].derived is not None
        if step.piece is None:
            (whole,) = programs
            outputs = self._jit(whole, self._mesh)(*slabs)
            paths = {declared.name: load.path for declared, load in zip(whole.inputs, step.loads, strict=True)}
        else:
            # The leaf is allocated when its first piece arrives and donated from piece to piece.
            begin, put = programs
            path = step.loads[0].path
            so_far = self._arriving.pop(path, None) or self._jit(begin, self._mesh)()
            replicated = NamedSharding(self._mesh, PartitionSpec())
            start = jax.make_array_from_callback((), replicated, lambda _: np.asarray(piece[0], np.int32))
            outputs = self._jit(put, self._mesh)(so_far, slabs[0], start)
            if step.piece != step.loads[0].pieces[-1]:
                self._arriving[path] = outputs
            paths = dict.fromkeys(outputs, step.loads[0].path)
        # Steps of equal reshards share one Program, whose outputs have the paths of the first step's leaves; outputs of
        # a load transform have their own paths.
        named = outputs if is_derived else {paths[path]: array for path, array in outputs.items()}
        # One reshard at a time, so that no more than one transient is on the devices.
        self._arrays |= {path: jax.block_until_ready(array.array) for path, array in named.items()}

    def _report_if_due(self) -> None:
        if time.perf_counter() - self._reported >= PROGRESS_SECONDS:
            self._report()

    def _report(self) -> None:
        self._reported = time.perf_counter()
        if self._progress is not None:
            path, layer = self._reader.position
            self._progress(
                LoadProgress(
                    bytes_done=self._reader.bytes_done,
                    bytes_total=self._bytes_total,
                    job_bytes=self._job_bytes,
                    seconds=self._reported - self._began,
                    path=path,
                    layer=layer,
                    network="" if self._remote is None else str(self._remote),
                )
            )
