"""The order in which JAX places the devices of a pod on a mesh, computed without the pod and without its compiler.

JAX's own mesh utilities do the placing; they look at a device's coordinates, kind and process only, which follow from
the pod's topology.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jax.experimental import mesh_utils

from haliax_ext.errors import MeshError
from haliax_ext.meshspec import MeshSpec
from levanter.hardware import Accelerator


@dataclass(frozen=True, eq=False)
class _Chip:
    """The attributes of a device that JAX's mesh utilities read."""

    id: int
    process_index: int
    slice_index: int
    coords: tuple[int, ...]
    core_on_chip: int
    device_kind: str
    platform: str = "tpu"


def pod_coordinates(mesh: MeshSpec, accelerator: Accelerator) -> tuple[tuple[int, ...], ...]:
    """Slice, torus coordinates and core of each device, in row-major mesh order.

    Raises:
        MeshError: the mesh has not as many devices as the pod.
    """
    return tuple((c.slice_index, *c.coords, c.core_on_chip) for c in _placed(mesh, accelerator))


def pod_hosts(mesh: MeshSpec, accelerator: Accelerator) -> np.ndarray:
    """Host index of each device of `mesh`, in mesh shape.

    Raises:
        MeshError: the mesh has not as many devices as the pod.
    """
    indices = [chip.process_index for chip in _placed(mesh, accelerator)]
    return np.array(indices).reshape([size for _, size in mesh.axes])


@functools.lru_cache(maxsize=64)
def _placed(mesh: MeshSpec, accelerator: Accelerator) -> "tuple[_Chip, ...]":
    if mesh.size != accelerator.devices:
        raise MeshError(f"mesh {mesh} has {mesh.size} devices, {accelerator} has {accelerator.devices}")
    # A hybrid mesh is the elementwise product of a mesh inside a slice and one of slices, of the same rank.
    ici = tuple(1 if name in mesh.dcn else size for name, size in mesh.axes)
    dcn = tuple(size if name in mesh.dcn else 1 for name, size in mesh.axes)
    devices = _chips(accelerator)
    if mesh.num_granules > 1:
        array = mesh_utils.create_hybrid_device_mesh(
            ici, dcn, devices, process_is_granule=mesh.granule == "process", allow_split_physical_axes=True
        )
    elif mesh.size == 1:
        array = np.array(devices, dtype=object)
    else:
        array = mesh_utils.create_device_mesh(ici, devices, allow_split_physical_axes=True)
    return tuple(array.flat)


def _chips(accelerator: Accelerator) -> list[_Chip]:
    if accelerator.generation.platform == "gpu":
        return list(_gpus(accelerator))
    sides = accelerator.topology + (1,) * (3 - len(accelerator.topology))
    bounds = accelerator.chips_per_host_bounds or (1, 1, 1)
    # The host of a chip is its block of `bounds` in the torus, numbered with x fastest like the chips.
    hosts = tuple(side // bound for side, bound in zip(sides, bounds, strict=True))
    chips = []
    for slice_index in range(accelerator.slices):
        # x runs fastest, as libtpu numbers them.
        for z, y, x in np.ndindex(sides[2], sides[1], sides[0]):
            coords = (x, y, z)
            hx, hy, hz = (c // b for c, b in zip(coords, bounds, strict=True))
            host = (hz * hosts[1] + hy) * hosts[0] + hx
            for core in range(accelerator.generation.devices_per_chip):
                chips.append(
                    _Chip(len(chips), slice_index * math.prod(hosts) + host, slice_index, coords, core,
                          accelerator.generation.device_kind)
                )  # fmt: skip
    return chips


def _gpus(accelerator: Accelerator) -> Iterator[_Chip]:
    """GPUs in the order of their hosts, which is the order of JAX's processes. They have no torus."""
    kind = accelerator.generation.device_kind
    for number in range(accelerator.devices):
        position = number % accelerator.chips_per_slice
        host = number // accelerator.chips_per_host
        slice_index = number // accelerator.chips_per_slice
        yield _Chip(number, host, slice_index, (position, 0, 0), 0, kind, platform="gpu")
