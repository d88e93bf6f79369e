"""What loading takes on a pod: device and host memory, bytes by host, seconds at a stated rate.

All of it follows from the `LoadPlan`, step by step in the order of loading. *Beyond the shards*: what a device holds of
a leaf that is not the leaf's final shard. A leaf that is read directly has nothing there: its blocks are the shards. A
leaf that is exchanged has slabs, and what the reshard makes of them.
"""

from dataclasses import dataclass

from haliax_ext.host_reader import READ_BYTES, Readers
from haliax_ext.load_plan import LeafLoad, LoadPlan, LoadStep
from haliax_ext.loading import default_memory_bytes
from levanter.plan.load_ceilings import LoadCeiling

READERS = 16
"""Reading threads of a host, at most; each has a buffer of one read."""


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
    there, extra = plan.initial_bytes, plan.initial_transient_bytes
    beyond, peak = ("leaves that are initialized" if extra else "", extra), there + extra
    for step in plan.steps:
        extra = beyond_shards(plan, step)
        if extra > beyond[1]:
            others = len(step.loads) - 1
            beyond = (step.loads[0].path + (f" and {others} more" if others else ""), extra)
        # A leaf that arrives in pieces has all its room from the first one on.
        if step.piece is None or step.piece[0] == 0:
            there += sum(shards[load.path] for load in step.loads)
        peak = max(peak, there + extra)
    by_host = plan.bytes_by_host
    hosts = [_host_memory(plan, host, memory_bytes) for host in range(plan.num_hosts)]
    fullest = max(hosts, key=lambda each: each.peak)
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


def loading_coresident_bytes(plan: LoadPlan) -> dict[str, int]:
    """By Program of loading, the most bytes on a device that are allocated while it runs and are none of its inputs."""
    found: dict[str, int] = {}
    there = plan.initial_bytes
    for step in plan.steps:
        own = sum(shard_bytes(plan, load) for load in step.loads)
        if step.piece is None or step.piece[0] == 0:
            there += own
        for program in plan.step_programs(step):
            # The leaf that arrives in pieces is an input of what puts them into it.
            found[program.name] = max(found.get(program.name, 0), there - own)
    return found


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
        held = sum(load.transient_host_bytes for load in step.loads)
        largest = max(largest, (step.loads[0].path, held), key=lambda one: one[1])
        on_a_device = sum(shard_bytes(plan, load) for load in step.loads)
        everything += held if step.loads[0].reshard is not None else devices * on_a_device
    # A source on another machine is read by many, whose buffers are a part of the budget.
    own, ahead = 0, 0
    if plan.remote is not None:
        readers = Readers.of(plan.remote, budget, threads=None, read_bytes=None)
        own, ahead = readers.held_bytes, readers.ahead_bytes
    blocks, beside = budget - own, READERS * READ_BYTES if plan.remote is None else own
    is_over = largest[1] > blocks
    most = largest[1] + ahead if is_over else blocks
    return _HostMemory(peak=min(everything, most) + beside, unit=largest if is_over else None)


@dataclass(frozen=True, kw_only=True)
class _HostMemory:
    peak: int
    unit: tuple[str, int] | None
