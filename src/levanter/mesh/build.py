"""Devices: the only place that looks for them, and what is printed about them at start."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from haliax_ext.meshspec import MeshSpec, granules
from levanter.mesh.config import MeshConfig


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

    devices: tuple[jax.Device, ...]
    granules: int
    platform: str
    kind: str
    hosts: int
    hbm_bytes: int | None


def local_devices(config: MeshConfig) -> DeviceSet:
    """The devices JAX sees now."""
    return describe_devices(jax.devices(), config)


def describe_devices(devices: Sequence[jax.Device], config: MeshConfig) -> DeviceSet:
    """Counts hosts and granules of `devices`."""
    first = devices[0]
    stats = first.memory_stats() if first.platform != "cpu" else None
    return DeviceSet(
        devices=tuple(devices),
        granules=len(granules(devices, config.granule)),
        platform=first.platform,
        kind=first.device_kind,
        hosts=len({d.process_index for d in devices}),
        hbm_bytes=(stats or {}).get("bytes_limit"),
    )


def mesh_report(spec: MeshSpec, found: DeviceSet) -> str:
    """One line on chips, hosts, granules and the mesh, and which mesh axes cross the data-center network."""
    crossing = [name for name in spec.dcn if spec.shape[name] > 1]
    dcn = f"; {', '.join(crossing)} cross DCN" if crossing else ""
    plural = lambda n, word: f"{n} {word}{'' if n == 1 else 's'}"  # noqa: E731
    return (
        f"{plural(len(found.devices), 'device')} ({found.kind}), {plural(found.hosts, 'host')}, "
        f"{plural(found.granules, spec.granule)}; mesh {spec}{dcn}"
    )


def require_accelerator(*, wanted: bool | None, found: DeviceSet) -> None:
    """Refuses a CPU-only run where the config asked for an accelerator.

    Raises:
        ValueError: `require_accelerator: true` and only CPU devices.
    """
    if wanted and found.platform == "cpu":
        hint = f" (JAX_PLATFORMS={os.environ['JAX_PLATFORMS']} is set)" if "JAX_PLATFORMS" in os.environ else ""
        raise ValueError(f"trainer.require_accelerator is true, but JAX sees only CPU devices{hint}")
