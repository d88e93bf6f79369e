"""Memory and time of loading on a pod, by arithmetic: device and host peaks, bytes by host, bandwidth bounds.

All of it follows from the `LoadPlan`, step by step in the order of loading. *Beyond the shards*: bytes of a leaf on a
device that are not part of the leaf's final shard. A leaf that is read directly has none: its blocks are the shards. A
leaf that is exchanged has slabs and the temporaries of the reshard.
"""

from dataclasses import dataclass
from typing import Literal

from haliax_ext.host_reader import READ_BYTES, Readers
from haliax_ext.load_plan import LeafLoad, LoadPlan, LoadStep
from haliax_ext.loading import default_memory_bytes
from levanter.hardware import Accelerator

READERS = 16
"""Reading threads of a host, at most; each has a buffer of one read."""
STORE_RATE = 2.0
"""Gigabytes a second that one host is assumed to read from an object store.

Published rates of single hosts lie on both sides: 3.1 GB/s (Run:ai streamer, 15 GB from S3), 8.7 GiB/s (125 GiB to
eight GPUs), 0.16 GB/s (range requests of another loader, v6e).
"""
CPU_SECONDS = 1.9
"""CPU seconds of all threads for a gigabyte: `benchmarks/loading_remote.py --unlimited --tls --drop` (bf16, read in
place) on two cores of a busy virtual machine; the cores of a TPU host differ."""
INTERPRETER_SECONDS = 0.5
"""The part of those with the interpreter's lock held, which bounds a process whatever its cores; counted there too."""
PROCESSORS = {
    ("v4", 4): 240,
    ("v5litepod", 1): 24,
    ("v5litepod", 4): 112,
    ("v5litepod", 8): 224,
    ("v5p", 4): 208,
    ("v6e", 1): 44,
    ("v6e", 4): 180,
    ("v6e", 8): 180,
}
"""Virtual processors of a host, by generation and chips: the machine types in Cloud TPU's documentation, written down
from memory and not verified."""


@dataclass(frozen=True, kw_only=True)
class LoadCeiling:
    """The loading rate of a host if one resource alone bounded it.

    Attributes:
        name: of the resource.
        gigabytes_per_second: the rate.
        basis: the source of the number; empty where it is published.
    """

    name: str
    gigabytes_per_second: float
    basis: Literal["", "assumed", "counted elsewhere", "not verified"] = ""

    def __str__(self) -> str:
        return self.name + (f" ({self.basis})" if self.basis else "")


@dataclass(frozen=True, kw_only=True)
class LoadBudget:
    """Memory and time of loading.

    Attributes:
        source_bytes: of the checkpoint's tensors that the run uses.
        bytes_by_host: bytes that each host reads.
        amplification: bytes read over `source_bytes`.
        device_transient: the leaf with the most bytes on a device beyond the final shards, and these bytes.
        device_peak: the most bytes on a device, including the shards that are loaded at that moment.
        host_peak: host memory of one host (buffers; the shards themselves are on the devices).
        host_unit: a leaf whose read exceeds the memory budget alone, and its bytes; None where there is none.
        gigabytes_per_second: the rate of one host that `seconds` assumes.
        seconds: reading time of the host that reads most.
        ceilings: bounds of the rate from an object store, the lowest first; none where the hosts are not known.
    """

    source_bytes: int
    bytes_by_host: tuple[int, ...]
    amplification: float
    device_transient: tuple[str, int]
    device_peak: int
    host_peak: int
    gigabytes_per_second: float
    seconds: float
    ceilings: tuple[LoadCeiling, ...] = ()
    host_unit: tuple[str, int] | None = None

    @property
    def store_seconds(self) -> float:
        """Reading time from an object store, at the lowest ceiling."""
        return max(self.bytes_by_host, default=0) / (self.ceilings[0].gigabytes_per_second * 1e9)


def load_budget(
    plan: LoadPlan,
    *,
    gigabytes_per_second: float = 1.0,
    memory_bytes: int | None = None,
    ceilings: tuple[LoadCeiling, ...] = (),
) -> LoadBudget:
    """The budget of a LoadPlan.

    Args:
        plan: how every leaf is loaded.
        gigabytes_per_second: 10⁹ bytes that one host reads a second; all hosts read at the same time.
        memory_bytes: the host-memory budget of the run; by default the one that `load` chooses.
        ceilings: bounds of the rate from an object store.
    """
    assert gigabytes_per_second > 0, gigabytes_per_second
    shards = {load.path: shard_bytes(plan, load) for load in plan.loads}
    # Leaves that no checkpoint has are initialized before the first read, so
    # their shards are on the device throughout.
    allocated, extra = plan.initial_bytes, plan.initial_transient_bytes
    beyond, peak = ("leaves that are initialized" if extra else "", extra), allocated + extra
    for step in plan.steps:
        extra = beyond_shards(plan, step)
        if extra > beyond[1]:
            others = len(step.loads) - 1
            beyond = (step.loads[0].path + (f" and {others} more" if others else ""), extra)
        # The whole shard of a leaf that arrives in pieces is allocated with the first piece.
        if step.piece is None or step.piece[0] == 0:
            allocated += sum(shards[load.path] for load in step.loads)
        # `extra` is in addition to the shards of this step, which `allocated` has already.
        peak = max(peak, allocated + extra)
    by_host = plan.bytes_by_host
    hosts = [_host_memory(plan, host, memory_bytes) for host in range(plan.num_hosts)]
    fullest = max(hosts, key=lambda one: one.peak)
    return LoadBudget(
        source_bytes=plan.source_bytes,
        bytes_by_host=by_host,
        amplification=plan.amplification,
        device_transient=beyond,
        device_peak=peak,
        host_peak=fullest.peak,
        host_unit=fullest.unit,
        gigabytes_per_second=gigabytes_per_second,
        seconds=max(by_host, default=0) / (gigabytes_per_second * 1e9),
        ceilings=ceilings,
    )


def load_ceilings(pod: Accelerator) -> tuple[LoadCeiling, ...]:
    """The ceilings of one host of a pod, the lowest first; none where its hosts are not known."""
    generation = pod.generation
    processors = PROCESSORS.get((generation.name, pod.chips_per_host))
    if processors is None:
        return ()
    ceilings = [
        LoadCeiling(name="store", gigabytes_per_second=STORE_RATE, basis="assumed"),
        LoadCeiling(name="interpreter", gigabytes_per_second=1 / INTERPRETER_SECONDS, basis="counted elsewhere"),
        LoadCeiling(name="processors", gigabytes_per_second=processors / CPU_SECONDS, basis="not verified"),
    ]
    # From `hardware.generations`, which names its sources. The network of v6e and v5p (100 and 50 Gb/s a chip) agrees
    # with a second source; the others were not verified.
    if generation.host_link_bandwidth is not None:
        rate = generation.host_link_bandwidth / 1e9 * pod.chips_per_host
        ceilings.append(LoadCeiling(name="PCIe", gigabytes_per_second=rate, basis="not verified"))
    if generation.dcn_host_bandwidth is not None:
        checked = generation.name in ("v5p", "v6e")
        rate = generation.dcn_host_bandwidth / 1e9
        ceilings.append(LoadCeiling(name="network", gigabytes_per_second=rate, basis="" if checked else "not verified"))
    return tuple(sorted(ceilings, key=lambda one: one.gigabytes_per_second))


def loading_coresident_bytes(plan: LoadPlan) -> dict[str, int]:
    """By Program of loading, the most bytes on a device that are allocated while it runs and are not its inputs."""
    by_program: dict[str, int] = {}
    allocated = plan.initial_bytes
    for step in plan.steps:
        step_bytes = sum(shard_bytes(plan, load) for load in step.loads)
        if step.piece is None or step.piece[0] == 0:
            allocated += step_bytes
        for program in plan.step_programs(step):
            # The leaf that arrives in pieces is a donated input of the Program that writes a piece into it.
            by_program[program.name] = max(by_program.get(program.name, 0), allocated - step_bytes)
    return by_program


def beyond_shards(plan: LoadPlan, step: LoadStep) -> int:
    """Bytes on a device that a step needs beyond the final shards of its leaves, by arithmetic."""
    if step.piece is not None:
        return step.loads[0].transient_device_bytes
    # The result of a reshard in one piece is the shard, which counts as loaded and not as transient.
    return sum(max(load.transient_device_bytes - shard_bytes(plan, load), 0) for load in step.loads)


def shard_bytes(plan: LoadPlan, load: LeafLoad) -> int:
    """Bytes on one device of a leaf's final shard, in the dtype in which it is loaded."""
    return load.shard_bytes(plan.sharding.mesh)


def _host_memory(plan: LoadPlan, host: int, memory_bytes: int | None) -> "_HostMemory":
    """Peak memory of a host: the budget, or the largest single read if that is more, and the readers' buffers."""
    budget = default_memory_bytes(plan.local_bytes(host)) if memory_bytes is None else memory_bytes
    devices = plan.hosts.count(host)
    largest, everything = ("", 0), 0
    for step in plan.steps:
        buffered = sum(load.transient_host_bytes for load in step.loads)
        largest = max(largest, (step.loads[0].path, buffered), key=lambda one: one[1])
        on_a_device = sum(shard_bytes(plan, load) for load in step.loads)
        everything += buffered if step.loads[0].reshard is not None else devices * on_a_device
    # A remote source has many readers, whose buffers are part of the budget.
    read_buffers, ahead = 0, 0
    if plan.remote is not None:
        readers = Readers.of(plan.remote, budget, threads=None, read_bytes=None)
        read_buffers, ahead = readers.held_bytes, readers.ahead_bytes
    blocks, buffers = budget - read_buffers, READERS * READ_BYTES if plan.remote is None else read_buffers
    # A leaf larger than the budget is admitted alone, because it could never be read otherwise.
    is_over = largest[1] > blocks
    most = largest[1] + ahead if is_over else blocks
    return _HostMemory(peak=min(everything, most) + buffers, unit=largest if is_over else None)


@dataclass(frozen=True, kw_only=True)
class _HostMemory:
    peak: int
    unit: tuple[str, int] | None
