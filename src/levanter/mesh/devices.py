"""Devices: the only module that asks JAX for them, and the report about them at start-up."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax

from haliax_ext.errors import gib
from haliax_ext.mapping import Mappings
from haliax_ext.meshspec import Device, MeshSpec, granules
from haliax_ext.placement import show_axes
from levanter.hardware import unit_name
from levanter.mesh.config import MeshConfig
from levanter.mesh.heads import KV_HEAD, Q_PER_GROUP


class DeviceFacts(Protocol):
    """The facts about devices that the report needs, whether available (`DeviceSet`) or only named (a target)."""

    @property
    def platform(self) -> str:
        """`cpu`, `gpu` or `tpu`."""
        ...

    @property
    def kind(self) -> str:
        """The vendor's name of one device."""
        ...

    @property
    def hosts(self) -> int:
        """The number of processes that hold the devices."""
        ...

    @property
    def granules(self) -> int:
        """The number of slices (or processes) that they form."""
        ...

    @property
    def hbm_bytes(self) -> int | None:
        """Usable memory of one device; None where it is not limited by the device."""
        ...


@dataclass(frozen=True, kw_only=True)
class DeviceSet:
    """The devices of this run, counted.

    Attributes:
        devices: all devices of all hosts.
        granules: how many slices (or processes) they form.
        platform: `cpu`, `gpu` or `tpu`.
        kind: the vendor's name of one device.
        hosts: how many processes hold them.
        hbm_bytes: memory of one device as its runtime states it; None on CPU.
    """

    devices: tuple[Device, ...]
    granules: int
    platform: str
    kind: str
    hosts: int
    hbm_bytes: int | None

    @property
    def chips(self) -> int:
        """Chips; some TPU generations show two devices on each."""
        # TPU v2 and v3 have two cores with the same coordinates on a chip; slices repeat coordinates, so the slice
        # counts too.
        coordinates = {
            (getattr(d, "slice_index", None) or 0, tuple(getattr(d, "coords", (d.id,)))) for d in self.devices
        }
        return len(coordinates)


def local_devices(config: MeshConfig) -> DeviceSet:
    """The devices JAX sees now."""
    return describe_devices(jax.devices(), config)


def describe_devices(devices: Sequence[Device], config: MeshConfig) -> DeviceSet:
    """Counts hosts and granules of `devices`."""
    first = devices[0]
    # On CPU, memory is the host's and no limit of a device.
    stats = first.memory_stats() if first.platform != "cpu" else None
    return DeviceSet(
        devices=tuple(devices),
        granules=len(granules(devices, config.granule)),
        platform=first.platform,
        kind=first.device_kind,
        hosts=len({d.process_index for d in devices}),
        hbm_bytes=(stats or {}).get("bytes_limit"),
    )


def mesh_report(
    spec: MeshSpec,
    facts: DeviceFacts,
    *,
    mappings: Mappings | None = None,
    bytes_per_device: Mapping[str, int] | None = None,
) -> str:
    """The report at start-up: chips, hosts, granules, mesh, bytes on each device, what is sharded, what crosses DCN.

    Args:
        spec: the mesh.
        facts: the devices it is for.
        mappings: for what shards attention, and the warning about parameters that are sharded across granules.
        bytes_per_device: what stays on each device for the whole run (`parameters`, `optimizer`, `gradients`).
    """
    unit = unit_name(facts.platform)
    # On an abstract target only the number of devices is known, not the number of chips.
    count = facts.chips if isinstance(facts, DeviceSet) and unit == "chip" else spec.size
    shown = f"{_plural(count, unit)} ({facts.kind})"
    if count != spec.size:
        shown += f" as {spec.size} devices"
    lines = [f"{shown}, {_plural(facts.hosts, 'host')}, {_plural(facts.granules, spec.granule)}", f"mesh {spec}"]
    if bytes_per_device:
        total = sum(bytes_per_device.values())
        sizes = ", ".join(f"{name} {gib(size)}" for name, size in bytes_per_device.items())
        limit = "" if facts.hbm_bytes is None else f" of {gib(facts.hbm_bytes)} ({total / facts.hbm_bytes:.1%})"
        lines.append(f"on each device: {sizes}; together {gib(total)}{limit}")
    lines += _heads(spec, mappings)
    lines += _crossing(spec, mappings)
    return "\n".join(lines)


def _heads(spec: MeshSpec, mappings: Mappings | None) -> list[str]:
    """The projections of attention that are sharded, because in other projects `heads` shards o only."""
    reached = {KV_HEAD: "q, k, v and o", Q_PER_GROUP: "q and o"}
    cut = []
    for name, projections in reached.items():
        axes = () if mappings is None else mappings.params.mesh_axes(name)
        if (ways := spec.ways(axes)) > 1:
            cut.append(f"{name} → {show_axes(axes)} shards {projections} {ways} ways")
    return ["; ".join(cut)] if cut else []


def _crossing(spec: MeshSpec, mappings: Mappings | None) -> list[str]:
    crossing = [name for name in spec.dcn if spec.shape[name] > 1]
    if not crossing:
        return [f"no mesh axis crosses DCN: all devices are in one {spec.granule}"]
    verb = "crosses" if len(crossing) == 1 else "cross"
    lines = [f"{', '.join(crossing)} {verb} DCN"]
    # Overrides may shard single parameters over DCN even where the parameter mapping does not.
    rules = [] if mappings is None else [mappings.params, *(override for _, override in mappings.overrides)]
    cut = {f"{name} → {axis}" for rule in rules for name in rule for axis in rule.mesh_axes(name) if axis in crossing}
    if cut:
        lines.append(
            f"warning: parameters are sharded across {spec.granule}s ({', '.join(sorted(cut))}): each use of such a "
            "weight gathers it over DCN, which is at least an order of magnitude slower than ICI"
        )
    return lines


def _plural(n: int, word: str) -> str:
    ending = "es" if word.endswith("s") else "s"
    return f"{n} {word}{'' if n == 1 else ending}"


def require_accelerator(*, wanted: bool | None, devices: DeviceSet) -> None:
    """Refuses a CPU-only run where the config asked for an accelerator.

    Raises:
        ValueError: `require_accelerator: true` and only CPU devices.
    """
    if wanted and devices.platform == "cpu":
        hint = f" (JAX_PLATFORMS={os.environ['JAX_PLATFORMS']} is set)" if "JAX_PLATFORMS" in os.environ else ""
        raise ValueError(f"trainer.require_accelerator is true, but JAX sees only CPU devices{hint}")
