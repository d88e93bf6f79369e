"""`Target`: the devices that a run is planned for, counted but not held."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from haliax_ext.meshspec import MeshSpec
from levanter.hardware import unit_name


@dataclass(frozen=True, kw_only=True)
class Target:
    """The devices that a run is planned for, counted but not held.

    Attributes:
        name: the user's name for it (`local`, `v4-256`).
        platform: `cpu`, `gpu` or `tpu`, which selects kernels.
        kind: the vendor's name of one device.
        devices: the number of devices.
        granules: the number of slices (or processes) that they form.
        hosts: the number of processes; each holds the same number of devices.
        hbm_bytes: usable memory of one device; None where it is not limited by the device (CPU).
        host_bytes: memory of a host whose devices share it because they have none (CPU); None elsewhere.
        devices_per_chip: the number of devices that JAX sees for one chip.
        hosts_on: mesh → host index of each device, in mesh shape; None if hosts hold consecutive devices in mesh
            order.
    """

    name: str
    platform: str
    kind: str
    devices: int
    granules: int = 1
    hosts: int = 1
    hbm_bytes: int | None = None
    host_bytes: int | None = None
    devices_per_chip: int = 1
    # A function has no useful equality: two targets that differ only in it are the same devices.
    hosts_on: Callable[[MeshSpec], np.ndarray] | None = field(default=None, repr=False, compare=False)

    @property
    def unit(self) -> str:
        """The word for a device: `chip`, `GPU`, or `device` where a chip has several or the device is a CPU."""
        return unit_name(self.platform) if self.devices_per_chip == 1 else "device"

    @property
    def limit_bytes(self) -> int | None:
        """Memory of a device: its HBM, or its share of its host's memory; None where neither is known."""
        if self.hbm_bytes is not None or self.host_bytes is None:
            return self.hbm_bytes
        # Every host has the same number of devices, which share its memory.
        return self.host_bytes * self.hosts // self.devices

    def host_layout(self, mesh: MeshSpec) -> np.ndarray:
        """Returns the host index of each device of `mesh`, in mesh shape."""
        if self.hosts_on is not None:
            return self.hosts_on(mesh)
        # By default hosts hold consecutive devices in the row-major order of the mesh.
        per_host = mesh.size // self.hosts
        return (np.arange(mesh.size) // per_host).reshape(tuple(size for _, size in mesh.axes))
