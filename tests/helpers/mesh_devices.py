"""Stand-ins for TPU devices: enough of one for a mesh to be built from it, no computation."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SliceDevice:
    """A device of a slice, as JAX's mesh utilities look at it."""

    id: int
    slice_index: int = 0
    process_index: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU stand-in"
    hbm: int = 32 << 30

    @property
    def coords(self) -> tuple[int, int, int]:
        return (self.id, 0, 0)

    @property
    def core_on_chip(self) -> int:
        return 0

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": self.hbm}


@dataclass(frozen=True)
class HostDevice:
    """A device of a CPU or GPU host: no slices, only processes."""

    id: int
    process_index: int = 0
    platform: str = "gpu"
    device_kind: str = "H100"

    def memory_stats(self) -> dict[str, int] | None:
        return None


def slices(count: int, devices_each: int, *, per_host: int = 4, kind: str = "cpu") -> list[SliceDevice]:
    """`count` slices of `devices_each` devices, listed in an order that is not by slice."""
    made = [
        SliceDevice(id=n, slice_index=n // devices_each, process_index=n // per_host, platform=kind)
        for n in range(count * devices_each)
    ]
    return made[::2] + made[1::2]
