"""`Target`: the devices that a run is for, counted but not held."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from haliax_ext.meshspec import MeshSpec


@dataclass(frozen=True, kw_only=True)
class Target:
    """The devices a run is for, counted but not held.

    Attributes:
        name: how the user calls it (`local`, `v4-256`).
        platform: `cpu`, `gpu` or `tpu`: decides kernels.
        kind: the vendor's name of one device.
        devices: how many.
        granules: how many slices (or processes) they form.
        hosts: how many processes hold them, equally.
        hbm_bytes: usable memory of one device; None where it is not limited by the device (CPU).
        host_bytes: memory of a host where its devices have none of their own and share it; None elsewhere.
        hosts_on: mesh → host index of each device, in mesh shape; without it devices are numbered host by host in
            mesh order.
    """

    name: str
    platform: str
    kind: str
    devices: int
    granules: int = 1
    hosts: int = 1
    hbm_bytes: int | None = None
    host_bytes: int | None = None
    hosts_on: Callable[[MeshSpec], np.ndarray] | None = field(default=None, repr=False, compare=False)

    @property
    def limit_bytes(self) -> int | None:
        """What a device can hold at most: its own memory, or its share of its host's; None where neither is known."""
        if self.hbm_bytes is not None or self.host_bytes is None:
            return self.hbm_bytes
        return self.host_bytes * self.hosts // self.devices

    def host_layout(self, mesh: MeshSpec) -> np.ndarray:
        """Host index of each device of `mesh`, in mesh shape."""
        if self.hosts_on is not None:
            return self.hosts_on(mesh)
        per_host = mesh.size // self.hosts
        return (np.arange(mesh.size) // per_host).reshape(tuple(size for _, size in mesh.axes))
