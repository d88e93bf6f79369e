"""A pod as a value: its slices, zone and kind of capacity. `gcloud` builds the commands for it."""

import re
from dataclasses import dataclass
from typing import Literal

from levanter.hardware import Accelerator, AcceleratorError, parse_accelerator
from levanter.infra.errors import UsageError

Capacity = Literal["on-demand", "spot", "preemptible", "reserved", "best-effort"]
CAPACITIES: tuple[Capacity, ...] = ("on-demand", "spot", "preemptible", "reserved", "best-effort")

RUNTIME_VERSIONS = {
    "v4": "tpu-ubuntu2204-base",
    "v5litepod": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}
"""The TPU software version for JAX, from Google's table of runtime versions."""

_NAME = re.compile(r"[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class Pod:
    """A request to Google for slices under one name.

    Attributes:
        name: of the TPU VM, or of the queued resource.
        accelerator: all the slices.
        zone: such as `us-central2-b`.
        project: None: gcloud's configured one.
        capacity: the kind of capacity.
        queued: whether through a queued resource, which waits for its turn.
        runtime_version: the TPU software on the hosts.
        network: None: the default one.
        subnetwork: None: the default one.
        service_account: None: the default one.
        internal_ips: hosts without external addresses (reached through IAP).
        valid_until: how long a queued request stays valid, such as `6h`; None: forever.
        labels: such as `team=memory,run=405b`.
    """

    name: str
    accelerator: Accelerator
    zone: str
    project: str | None = None
    capacity: Capacity = "on-demand"
    queued: bool = False
    runtime_version: str = ""
    network: str | None = None
    subnetwork: str | None = None
    service_account: str | None = None
    internal_ips: bool = False
    valid_until: str | None = None
    labels: str | None = None

    @property
    def slices(self) -> int:
        """The number of slices of the pod."""
        return self.accelerator.slices

    @property
    def hosts_per_slice(self) -> int:
        """The number of hosts of each slice."""
        return self.accelerator.hosts // self.accelerator.slices

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the TPU VMs, one per slice."""
        if self.slices == 1:
            return (self.name,)
        return tuple(f"{self.name}-{index}" for index in range(self.slices))

    @property
    def described(self) -> str:
        """The pod in words: accelerator, capacity and zone."""
        terms = {"on-demand": "on demand"}.get(self.capacity, self.capacity)
        return f"{self.accelerator}, {terms}{', queued' if self.queued else ''}, in {self.zone}"


def make_pod(
    *,
    tpu: str | None,
    name: str | None,
    zone: str | None,
    node_count: int | None = None,
    capacity: str = "on-demand",
    queued: bool | None = None,
    runtime_version: str | None = None,
    **rest,
) -> Pod:
    """Builds the pod of a command line.

    Args:
        tpu: an accelerator's name; `2xv5p-128` is two slices.
        node_count: slices, if the name does not give them.
        queued: None: if needed (several slices, reserved or best-effort capacity).
        rest: further fields of `Pod`.

    Raises:
        UsageError: lists everything that is wrong or missing.
    """
    problems = [
        f"--{flag} is missing{hint}"
        for flag, value, hint in (
            ("tpu_name", name, ": a name for the pod"),
            ("tpu_type", tpu, ", e.g. --tpu_type v4-256 or 2xv5p-128"),
            ("zone", zone, ", e.g. --zone us-central2-b"),
        )
        if not value
    ]
    if name and not _NAME.fullmatch(name):
        problems.append(
            f"--tpu_name {name}: use at most 63 lower-case letters, digits and hyphens, beginning with a letter"
        )
    accelerator = None
    try:
        accelerator = None if tpu is None else _accelerator(tpu, node_count)
    except AcceleratorError as error:
        problems.append(f"--tpu_type {tpu}: {error}")
    except UsageError as error:
        problems.append(str(error))
    if capacity not in CAPACITIES:
        problems.append(f"--capacity_type {capacity}: expected one of {', '.join(CAPACITIES)}")
    # gcloud creates several slices, and best-effort VMs, through queued resources only.
    needs_queue = (accelerator is not None and accelerator.slices > 1) or capacity == "best-effort"
    if queued is False and needs_queue:
        problems.append(
            "--queued=false: several slices and best-effort capacity are only available to queued resources"
        )
    if accelerator is not None and accelerator.generation.name not in RUNTIME_VERSIONS:
        problems.append(_not_a_tpu_vm(accelerator))
    if problems:
        raise UsageError("\n".join(problems))
    assert accelerator is not None and name and zone
    return Pod(
        name=name,
        accelerator=accelerator,
        zone=zone,
        capacity=capacity,  # type: ignore[arg-type]
        queued=needs_queue if queued is None else queued,
        runtime_version=runtime_version or RUNTIME_VERSIONS[accelerator.generation.name],
        **rest,
    )


def _accelerator(tpu: str, node_count: int | None) -> Accelerator:
    accelerator = parse_accelerator(tpu)
    if node_count is None:
        return accelerator
    if node_count < 1:
        raise UsageError(f"--node_count {node_count}: must be at least 1")
    if accelerator.slices not in (1, node_count):
        raise UsageError(f"--node_count {node_count}: --tpu_type {tpu} means {accelerator.slices} slices")
    # `--tpu_type 2xv5p-128 --node_count 2` names the two slices twice; they are counted once.
    slice_name = tpu.strip().lower().removeprefix(f"{accelerator.slices}x") if accelerator.slices > 1 else tpu.strip()
    return parse_accelerator(slice_name if node_count == 1 else f"{node_count}x{slice_name}")


def _not_a_tpu_vm(accelerator: Accelerator) -> str:
    if accelerator.generation.platform == "gpu":
        return f"--tpu_type {accelerator.name}: GPUs are launched through `slurm`, `local` or levanter.infra.ray_run"
    return (
        f"--tpu_type {accelerator.name}: Google offers {accelerator.generation.name} through Kubernetes Engine only, "
        "not as TPU VMs; on a Ray cluster there, use levanter.infra.ray_run"
    )
