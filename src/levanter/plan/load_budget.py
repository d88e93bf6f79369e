"""Memory and time of loading on a pod, by arithmetic: device and host peaks, bytes by host, bandwidth bounds.

All of it follows from the `LoadPlan`, step by step in the order of loading. *Beyond the shards*: bytes of a leaf on a
device that are not part of the leaf's final shard. A leaf that is read directly has nothing there: its blocks are the
shards. A leaf that is exchanged has slabs, and what the reshard makes of them.
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
"""Gigabytes a second that a store is assumed to give one host.

Published rates of single hosts lie on both sides: 3.1 GB/s (Run:ai streamer, 15 GB from S3), 8.7 GiB/s (125 GiB to
eight GPUs), 0.16 GB/s (range requests of another loader, v6e).
"""
CPU_SECONDS = 1.9
"""Of all threads, for a gigabyte: `benchmarks/loading_remote.py --unlimited --tls --drop` (bf16 in its place) on two
cores of a busy virtual machine; a host's cores are others."""
INTERPRETER_SECONDS = 0.5
"""Of those, with the interpreter's lock, of which a process has one, however many cores there are; counted there."""
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
    """How fast a host could load if only this bound it.

    Attributes:
        name: of the resource.
        gigabytes_per_second: its ceiling.
        basis: how far the number can be trusted; empty for one that is published.
    """

    name: str
    gigabytes_per_second: float
    basis: Literal["", "assumed", "counted elsewhere", "not verified"] = ""

    def __str__(self) -> str:
        return self.name + (f" ({self.basis})" if self.basis else "")


@dataclass(frozen=True, kw_only=True)
class LoadBudget:
    """Loading, from the LoadPlan.

    Attributes:
        source_bytes: of the checkpoint, as far as it is used.
        bytes_by_host: what each host reads.
        amplification: bytes read over `source_bytes`.
        device_transient: the most a device holds beyond the final shards, and for which leaf.
        device_peak: with the shards that are there at that moment.
        host_peak: host memory of one host (buffers; the shards themselves are on the devices).
        host_unit: the leaf, and its bytes, that are read at one time although that is more than the budget; None where
            nothing is.
        gigabytes_per_second: the rate of one host that `seconds` assumes.
        seconds: reading time of the host that reads most.
        ceilings: what would bind it from an object store, the lowest first; none where the hosts are not known.
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
        gigabytes_per_second: 10⁹ bytes that one host reads a second; all hosts read at a time.
        memory_bytes: the host-memory budget of the run; by default the one that `load` chooses.
        ceilings: what would bind it from an object store.
    """
    assert gigabytes_per_second > 0, gigabytes_per_second
    shards = {load.path: shard_bytes(plan, load) for load in plan.loads}
    allocated, extra = plan.initial_bytes, plan.initial_transient_bytes
    beyond, peak = ("leaves that are initialized" if extra else "", extra), allocated + extra
    for step in plan.steps:
        extra = beyond_shards(plan, step)
        if extra > beyond[1]:
            others = len(step.loads) - 1
            beyond = (step.loads[0].path + (f" and {others} more" if others else ""), extra)
        # A leaf that arrives in pieces has all its room from the first one on.
        if step.piece is None or step.piece[0] == 0:
            allocated += sum(shards[load.path] for load in step.loads)
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
    # Of `hardware.generations`, which names its sources; the network of v6e and v5p (100 and 50 Gb/s a chip) agrees
    # with a second one, the others were not looked up again.
    if generation.host_link_bandwidth is not None:
        rate = generation.host_link_bandwidth / 1e9 * pod.chips_per_host
        ceilings.append(LoadCeiling(name="PCIe", gigabytes_per_second=rate, basis="not verified"))
    if generation.dcn_host_bandwidth is not None:
        checked = generation.name in ("v5p", "v6e")
        rate = generation.dcn_host_bandwidth / 1e9
        ceilings.append(LoadCeiling(name="network", gigabytes_per_second=rate, basis="" if checked else "not verified"))
    return tuple(sorted(ceilings, key=lambda one: one.gigabytes_per_second))


def loading_coresident_bytes(plan: LoadPlan) -> dict[str, int]:
    """By Program of loading, the most bytes on a device that are allocated while it runs and are none of its inputs."""
    by_program: dict[str, int] = {}
    allocated = plan.initial_bytes
    for step in plan.steps:
        step_bytes = sum(shard_bytes(plan, load) for load in step.loads)
        if step.piece is None or step.piece[0] == 0:
            allocated += step_bytes
        for program in plan.step_programs(step):
            # The leaf that arrives in pieces is an input of what puts them into it.
            by_program[program.name] = max(by_program.get(program.name, 0), allocated - step_bytes)
    return by_program


def beyond_shards(plan: LoadPlan, step: LoadStep) -> int:
    """Bytes on a device that a step needs beyond the final shards of its leaves, by arithmetic."""
    if step.piece is not None:
        return step.loads[0].transient_device_bytes
    # The result of a reshard in one piece is the shard.
    return sum(max(load.transient_device_bytes - shard_bytes(plan, load), 0) for load in step.loads)


def shard_bytes(plan: LoadPlan, load: LeafLoad) -> int:
    """Bytes on one device of what loading a leaf gives: its final shard, in the dtype it is loaded in."""
    return load.shard_bytes(plan.sharding.mesh)


def _host_memory(plan: LoadPlan, host: int, memory_bytes: int | None) -> "_HostMemory":
    """At most: the budget, or what is always admitted if that is more; and the readers' own buffers."""
    budget = default_memory_bytes(plan.local_bytes(host)) if memory_bytes is None else memory_bytes
    devices = plan.hosts.count(host)
    largest, everything = ("", 0), 0
    for step in plan.steps:
        buffered = sum(load.transient_host_bytes for load in step.loads)
        largest = max(largest, (step.loads[0].path, buffered), key=lambda one: one[1])
        on_a_device = sum(shard_bytes(plan, load) for load in step.loads)
        everything += buffered if step.loads[0].reshard is not None else devices * on_a_device
    # A source on another machine is read by many, whose buffers are a part of the budget.
    read_buffers, ahead = 0, 0
    if plan.remote is not None:
        readers = Readers.of(plan.remote, budget, threads=None, read_bytes=None)
        read_buffers, ahead = readers.held_bytes, readers.ahead_bytes
    blocks, buffers = budget - read_buffers, READERS * READ_BYTES if plan.remote is None else read_buffers
    is_over = largest[1] > blocks
    most = largest[1] + ahead if is_over else blocks
    return _HostMemory(peak=min(everything, most) + buffers, unit=largest if is_over else None)


@dataclass(frozen=True, kw_only=True)
class _HostMemory:
    peak: int
    unit: tuple[str, int] | None
