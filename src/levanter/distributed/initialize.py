"""How a process finds its place among the processes of its run, and joins them.

A place is configured in `trainer.distributed`, or set by our launchers in the environment (`LEVANTER_COORDINATOR`,
`LEVANTER_NUM_PROCESSES`, `LEVANTER_PROCESS_ID`; local, Ray and Slurm scripts do), or known from Slurm or from the
machines of a TPU pod, in this order. Configured fields win, one by one, over detected ones.

`join` waits for all processes. `start_jax` then starts `jax.distributed`, whose own errors abort a process with a C++
stack trace: its timeouts are far longer than ours, so that an error that names the missing processes comes first.
"""

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta

from levanter.config.validators import Count, PositiveDuration, PositiveInt, Ranged
from levanter.distributed.peers import Peers, Timeouts
from levanter.distributed.rendezvous import ProcessPlace, connect_peers

COORDINATOR, PROCESSES, PROCESS = "LEVANTER_COORDINATOR", "LEVANTER_NUM_PROCESSES", "LEVANTER_PROCESS_ID"
LOCAL_DEVICES = "LEVANTER_LOCAL_DEVICE_IDS"
MAX_PROCESSES = 1 << 20
"""The largest number of processes: more than any machine has, and few enough to be listed by number."""
_JAX_PATIENCE = 3
"""`jax.distributed` waits this many times as long as we do."""


class PlaceError(ValueError):
    """The place of a process in its run is not known completely, or not valid."""


@dataclass(frozen=True, kw_only=True)
class DistributedConfig(Ranged):
    """How the processes of one job find each other; on TPU pods, under Slurm and our launchers it is detected.

    Attributes:
        coordinator_address: `host:port` of process 0.
        num_processes: how many processes the job has.
        process_id: the index of this one.
        local_device_ids: the devices this process may use; null for all.
        initialize_jax_distributed: whether the processes are connected at all.
        init_timeout: how long processes wait for each other at startup.
        barrier_timeout: how long a process waits for the others at each barrier: before loading, saving, the first step
            and the end.
        heartbeat_timeout: how long a process may be silent before it is considered dead.
    """

    coordinator_address: str | None = None
    num_processes: PositiveInt | None = None
    process_id: Count | None = None
    local_device_ids: Count | list[Count] | None = None
    initialize_jax_distributed: bool = True
    init_timeout: PositiveDuration = timedelta(minutes=5)
    barrier_timeout: PositiveDuration = timedelta(minutes=30)
    heartbeat_timeout: PositiveDuration = timedelta(seconds=100)

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = list(self._problems())
        if problems:
            raise ValueError("\n".join(problems))

    def _problems(self) -> Iterable[str]:
        if self.process_id is not None and self.num_processes is None:
            yield "process_id: needs num_processes beside it"
        elif self.process_id is not None and self.num_processes is not None and self.process_id >= self.num_processes:
            yield f"process_id: must be from 0 to {self.num_processes - 1}, got {self.process_id}"
        if self.coordinator_address is not None and not _is_address(self.coordinator_address):
            yield f"coordinator_address: must be host:port, got {self.coordinator_address!r}"
        for name in ("init_timeout", "barrier_timeout", "heartbeat_timeout"):
            if getattr(self, name) < timedelta(seconds=1):
                yield f"{name}: must be at least 1s, got {getattr(self, name)}"

    @property
    def timeouts(self) -> Timeouts:
        """The timeouts in seconds."""
        return Timeouts(
            roll=self.init_timeout.total_seconds(),
            barrier=self.barrier_timeout.total_seconds(),
            heartbeat=self.heartbeat_timeout.total_seconds(),
        )


@dataclass(frozen=True, kw_only=True)
class PlaceHints:
    """What one source knows of a process's place; None for what it does not state."""

    source: str
    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    local_devices: tuple[int, ...] | None = None


def find_process_place(
    config: DistributedConfig, environment: Mapping[str, str], pod: Callable[[], PlaceHints | None] = lambda: None
) -> ProcessPlace | None:
    """The place of this process; None where it is alone.

    Args:
        config: the configured place.
        environment: the environment variables that launchers and schedulers set.
        pod: asks the machine whether it is part of a TPU pod; called only where nothing else is known.

    Raises:
        PlaceError: a part of it is known and a part is not, or a value is not valid.
    """
    if not config.initialize_jax_distributed:
        return None
    device_ids = config.local_device_ids
    if isinstance(device_ids, int):
        device_ids = [device_ids]
    written = PlaceHints(
        source="trainer.distributed",
        coordinator=config.coordinator_address,
        processes=config.num_processes,
        process=config.process_id,
        local_devices=None
        if device_ids is None
        else (device_ids,)
        if isinstance(device_ids, int)
        else tuple(device_ids),
    )
    sources = [written]
    # Launchers, Slurm and the pod are queried only for missing values; the pod's metadata takes network requests.
    if written.processes != 1 and None in (written.coordinator, written.processes, written.process):
        sources += [
            hints for hints in (launcher_hints(environment) or slurm_hints(environment) or pod(),) if hints is not None
        ]
    coordinator = next((hints.coordinator for hints in sources if hints.coordinator is not None), None)
    processes = next((hints.processes for hints in sources if hints.processes is not None), None)
    process = next((hints.process for hints in sources if hints.process is not None), None)
    # Before anything else: a run of one process ignores its number, and lists of processes have an entry for each.
    _check_numbers(processes, process)
    # One process, or no sign of several: a run of one process needs no coordinator.
    if processes == 1 or (coordinator is None and processes is None and process is None):
        return None
    if coordinator is None or processes is None or process is None:
        lacking = {
            "coordinator_address": coordinator is None,
            "num_processes": processes is None,
            "process_id": process is None,
        }
        missing = ", ".join(f"trainer.distributed.{name}" for name, absent in lacking.items() if absent)
        raise PlaceError(
            f"several processes were requested, but {missing} is not known: give it, or start every process "
            f"with {COORDINATOR}, {PROCESSES} and {PROCESS} set (docs/multihost.md), with srun, or on a TPU pod"
        )
    return ProcessPlace(
        coordinator=coordinator,
        processes=processes,
        process=process,
        local_devices=next((hints.local_devices for hints in sources if hints.local_devices is not None), None),
        source=sources[-1].source,
    )


def _check_numbers(processes: int | None, process: int | None) -> None:
    """Refuses a number of processes, or a number of this one, that no run can have."""
    problems: list[str] = []
    if processes is not None and not 1 <= processes <= MAX_PROCESSES:
        problems.append(
            f"a run of {processes:,} processes: their number ({PROCESSES}, or trainer.distributed.num_processes) must "
            f"be from 1 to {MAX_PROCESSES:,}"
        )
    elif process is not None and process < 0:
        problems.append(f"process number {process}: numbers ({PROCESS}) begin with 0")
    elif processes is not None and process is not None and process >= processes:
        problems.append(
            f"process number {process} of {processes}: numbers ({PROCESS}, or trainer.distributed.process_id) go from "
            f"0 to {processes - 1}"
        )
    if problems:
        raise PlaceError("\n".join(problems))


def launcher_hints(environment: Mapping[str, str]) -> PlaceHints | None:
    """The place that our launchers set in the environment.

    Raises:
        PlaceError: only some of the variables are set, or they are not numbers.
    """
    names = (COORDINATOR, PROCESSES, PROCESS)
    present = [name for name in names if environment.get(name)]
    if not present:
        return None
    if len(present) < len(names):
        absent = ", ".join(name for name in names if name not in present)
        raise PlaceError(f"{', '.join(present)} is set, but {absent} is not; a launcher sets all three")
    if not _is_address(environment[COORDINATOR]):
        raise PlaceError(f"{COORDINATOR}: must be host:port, got {environment[COORDINATOR]!r}")
    devices = environment.get(LOCAL_DEVICES)
    return PlaceHints(
        source="the environment",
        coordinator=environment[COORDINATOR],
        processes=_number(environment, PROCESSES),
        process=_number(environment, PROCESS),
        local_devices=tuple(_integer(LOCAL_DEVICES, number) for number in devices.split(",")) if devices else None,
    )


def slurm_hints(environment: Mapping[str, str]) -> PlaceHints | None:
    """The place that `srun` sets for this task; None outside of a step, or in one of a single task."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID")
    count = next((n for n in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if environment.get(n)), None)
    if count is None or not all(environment.get(name) for name in names):
        return None
    tasks = _number(environment, count)
    if tasks == 1:
        return None
    # All tasks of a job know its number, so all choose the same port; two jobs on a node rarely choose one port.
    port = 61440 + _number(environment, "SLURM_JOB_ID") % 4096
    return PlaceHints(
        source="Slurm",
        coordinator=f"{first_host(environment['SLURM_STEP_NODELIST'])}:{port}",
        processes=tasks,
        process=_number(environment, "SLURM_PROCID"),
        local_devices=_share_of_gpus(environment),
    )


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list, such as `node[003-007,9],login`."""
    # The prefix, the first number of a bracketed list of ranges, and what follows the bracket: `node[003-007,9]` is
    # `node003`.
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    if match is None:
        raise PlaceError(f"SLURM_STEP_NODELIST: no host in {nodes!r}")
    prefix, number, suffix = match.groups()
    return prefix + (number or "") + (suffix or "")


def _share_of_gpus(environment: Mapping[str, str]) -> tuple[int, ...] | None:
    """This task's GPUs where several tasks of a node see the same ones; None leaves it to Slurm's own binding."""
    visible = [device for device in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    local = environment.get("SLURM_LOCALID")
    # `4` or `4(x2),3`: tasks on each node, this one's being the first where all are alike.
    tasks = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", "")))
    if not visible or local is None or tasks is None:
        return None
    count = int(tasks[0])
    share = len(visible) // count
    # GPUs that do not divide evenly among the tasks are left to Slurm's binding.
    if count < 2 or share < 1 or len(visible) % count:
        return None
    first = _integer("SLURM_LOCALID", local) * share
    return tuple(range(first, first + share))


def platforms() -> str:
    """`JAX_PLATFORMS`, or what was set in its place."""
    import jax

    return getattr(jax.config, "jax_platforms", None) or ""


def tpu_pod_hints(jax_platforms: str) -> PlaceHints | None:
    """The place in the TPU pod that this machine is part of; None where it is part of none, or the pod has one host.

    Args:
        jax_platforms: as `platforms`; without TPUs in it, one host of a pod may work alone.
    """
    if jax_platforms and "tpu" not in jax_platforms.split(","):
        return None
    # JAX knows the metadata of Google's machines, and has no public API for it that does not join at once.
    from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster, GkeTpuCluster

    for cluster in (GkeTpuCluster, GceTpuCluster):
        if cluster.is_env_present():
            count = cluster.get_process_count()
            # A pod with one host needs no coordinator.
            if count == 1:
                return None
            return PlaceHints(
                source="the TPU pod",
                coordinator=cluster.get_coordinator_address(timeout_secs=300, override_coordinator_port=None),
                processes=count,
                process=cluster.get_process_id(),
            )
    return None


def join(config: DistributedConfig, place: ProcessPlace) -> Peers:
    """Waits for all processes of the run; `start_jax` comes next.

    Raises:
        RendezvousError: not all processes came in time.
    """
    return connect_peers(place, versions=versions(), timeouts=config.timeouts)


def start_jax(config: DistributedConfig, place: ProcessPlace) -> None:
    """Starts `jax.distributed` after all processes have joined; call it before anything asks JAX for devices."""
    import jax

    # In the order of the fields of `Timeouts`: roll, barrier, heartbeat.
    seconds = [math.ceil(_JAX_PATIENCE * timeout) for timeout in vars(config.timeouts).values()]
    # Processes agree on preemption by `Peers.request_stop`; JAX's service would swallow SIGTERM in runs that do not
    # poll it.
    jax.config.update("jax_enable_preemption_service", False)
    # Without an implementation of collectives, processes on CPUs cannot compute together.
    if platforms() in ("", "cpu"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        place.coordinator,
        place.processes,
        place.process,
        local_device_ids=place.local_devices,
        # The place is known: detecting a cluster again could find another one.
        cluster_detection_method="deactivate",
        initialization_timeout=seconds[0],
        heartbeat_timeout_seconds=seconds[2],
        shutdown_timeout_seconds=60,
    )


def versions() -> dict[str, str]:
    """The versions that must be the same on all processes."""
    import jax

    # Processes with other versions may compile other programs, and would wait for each other in different collectives.
    return {"Python": f"{sys.version_info[0]}.{sys.version_info[1]}", "jax": jax.__version__}


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdigit() and 0 < int(port) < 65536


def _number(environment: Mapping[str, str], name: str) -> int:
    return _integer(name, environment[name])


def _integer(name: str, text: str) -> int:
    # `int` alone also takes `1_000` and digits of other scripts, and refuses long numbers with an error of its own.
    if not re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", text):
        shown = text if len(text) <= 40 else f"{text[:40]}…"
        raise PlaceError(f"{name}: expected a whole number, got {shown!r}")
    return int(text)
