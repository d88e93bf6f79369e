"""`MeshSpec`: the names and sizes of the mesh axes, without a device.

Planning needs only this. `.abstract()` gives JAX's device-free mesh, `.build(devices)` the real one; nothing else
in the project makes a mesh. A *granule* is what the axes in `dcn` count: a slice (an ICI domain, which may hold many
hosts), or a process where devices have no slices.
"""

# pyright: reportMissingTypeStubs=false
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import haliax as hax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from haliax_ext.errors import MeshError, UnknownAxisError, nearest

MeshAxes = str | tuple[str, ...]
AnyMesh = Mesh | AbstractMesh
"""A mesh of devices, or an abstract one with only names and sizes."""


class Device(Protocol):
    """The part of a JAX device that a mesh uses; TPU devices also have a `slice_index`."""

    @property
    def id(self) -> int:
        """Its number, unique over all processes."""
        ...

    @property
    def process_index(self) -> int:
        """The number of the process that holds it."""
        ...

    @property
    def platform(self) -> str:
        """`cpu`, `gpu` or `tpu`."""
        ...

    @property
    def device_kind(self) -> str:
        """The vendor's name of the device (`TPU v4`)."""
        ...

    def memory_stats(self) -> dict[str, int] | None:
        """The runtime's figures of its memory, in bytes; None where it has none."""
        ...


@dataclass(frozen=True, kw_only=True)
class MeshSpec:
    """Mesh axis names and sizes, in order, and which of them cross the data-center network.

    Attributes:
        axes: pairs (mesh axis name, size); the product is the number of devices.
        dcn: names of those axes whose neighbours are in different granules.
        granule: what a `dcn` axis counts.
    """

    axes: tuple[tuple[str, int], ...]
    dcn: tuple[str, ...] = ()
    granule: Literal["slice", "process"] = "slice"

    def __post_init__(self):
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names):
            raise MeshError(f"mesh {self} names an axis twice")
        for name, size in self.axes:
            if size < 1:
                raise MeshError(
                    f"mesh axis {name!r} has size {size}; sizes must be positive (-1 must be resolved beforehand)"
                )
        if stray := set(self.dcn) - set(names):
            raise MeshError(f"dcn names {sorted(stray)}, which are not axes of mesh {self}")

    @classmethod
    def of(cls, **sizes: int) -> "MeshSpec":
        """A mesh inside one granule: `MeshSpec.of(data=4, model=2)`.

        >>> mesh = MeshSpec.of(data=4, model=2)
        >>> print(mesh, mesh.size)
        data 4 × model 2 8
        """
        return cls(axes=tuple(sizes.items()))

    @classmethod
    def from_mesh(cls, mesh: AnyMesh) -> "MeshSpec":
        """The names and sizes of an existing JAX mesh (nothing is known of its DCN axes)."""
        return cls(axes=tuple(zip(mesh.axis_names, mesh.axis_sizes, strict=True)))

    @property
    def shape(self) -> dict[str, int]:
        """The sizes by mesh axis name."""
        return dict(self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the mesh axes, in order."""
        return tuple(name for name, _ in self.axes)

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(size for _, size in self.axes)

    @property
    def num_granules(self) -> int:
        """How many granules the mesh spans: the product of its DCN axes.

        >>> MeshSpec(axes=(("data", 4), ("replica_dcn", 2)), dcn=("replica_dcn",)).num_granules
        2
        """
        return math.prod(size for name, size in self.axes if name in self.dcn)

    def ways(self, mesh_axes: MeshAxes | None) -> int:
        """How many shards something sharded over `mesh_axes` has.

        >>> MeshSpec.of(data=4, model=2).ways(("data", "model"))
        8
        """
        if mesh_axes is None:
            return 1
        names = (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes
        shape = self.shape
        if unknown := [name for name in names if name not in shape]:
            close = nearest(unknown[0], shape)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise UnknownAxisError(f"mesh axis {', '.join(unknown)} is not an axis of mesh {self}{hint}")
        return math.prod(shape[name] for name in names)

    def __str__(self) -> str:
        factors = [f"{name} {size}" + (" (DCN)" if name in self.dcn else "") for name, size in self.axes]
        return " × ".join(factors) or "(no axes)"

    def abstract(self) -> AbstractMesh:
        """The JAX mesh without devices."""
        return AbstractMesh(
            tuple(size for _, size in self.axes), self.names, axis_types=(AxisType.Auto,) * len(self.axes)
        )

    def build(self, devices: Sequence[Device], *, slices: Sequence[int] | None = None) -> Mesh:
        """Places `devices` on this mesh: DCN axes outermost on the wire, ICI order from JAX's mesh utilities.

        Args:
            devices: as many as the mesh has.
            slices: the index of each device's slice, for devices that do not state it (those of a GPU compiler).

        Raises:
            MeshError: the devices' number or their granules do not match.
        """
        if len(devices) != self.size:
            factors = " × ".join(str(size) for _, size in self.axes)
            raise MeshError(f"mesh {self} needs {factors} = {self.size} devices, but {len(devices)} were given")
        if slices is not None:
            placed = [_DeviceOfSlice(*pair) for pair in zip(devices, slices, strict=True)]
            devices = cast("list[Device]", placed)
        axis_types = (AxisType.Auto,) * len(self.axes)
        # Each mesh axis is entirely inside a granule or entirely across granules: one of its two factors is 1.
        ici = tuple(1 if name in self.dcn else size for name, size in self.axes)
        dcn = tuple(size if name in self.dcn else 1 for name, size in self.axes)
        if self.num_granules > 1:
            # JAX's own errors name neither the mesh nor the granules, so both conditions are checked first.
            counts = granules(devices, self.granule)
            if len(counts) != self.num_granules:
                sizes = ", ".join(map(str, sorted(set(counts.values()))))
                raise MeshError(
                    f"mesh {self} spans {self.num_granules} granules ({self.granule}), "
                    f"but these devices form {len(counts)} (of {sizes} devices)"
                )
            if len(set(counts.values())) > 1:
                raise MeshError(f"mesh {self}: its {self.granule} granules differ in size: {dict(counts)}")
            by_process = self.granule == "process"
            array = mesh_utils.create_hybrid_device_mesh(
                ici, dcn, devices, process_is_granule=by_process, allow_split_physical_axes=True
            )
        # `create_device_mesh` is for several devices; one device fits any mesh of size 1.
        elif self.size == 1:
            array = np.asarray(devices, dtype=object).reshape(ici)
        else:
            array = mesh_utils.create_device_mesh(ici, devices, allow_split_physical_axes=True)
        if slices is not None:
            array = _without_slices(array)
        return Mesh(array, self.names, axis_types=axis_types)


@dataclass(frozen=True, eq=False)
class _DeviceOfSlice:
    """A device with the index of its slice, while JAX's mesh utilities place it."""

    device: Device
    slice_index: int

    def __getattr__(self, name: str) -> object:
        return getattr(self.device, name)


def _without_slices(placed: np.ndarray) -> np.ndarray:
    devices = np.empty(placed.shape, dtype=object)
    for position, item in np.ndenumerate(placed):
        devices[position] = cast(_DeviceOfSlice, item).device
    return devices


def granules(devices: Sequence[Device], kind: Literal["slice", "process"]) -> Mapping[int, int]:
    """Counts devices per granule. Devices without a `slice_index` form one slice."""
    counts: dict[int, int] = {}
    for device in devices:
        if kind == "process":
            index = device.process_index
        else:
            # `slice_index` is absent on CPU and GPU, and None on a TPU of one slice.
            index = getattr(device, "slice_index", None) or 0
        counts[index] = counts.get(index, 0) + 1
    return counts


def mesh_in_scope() -> AnyMesh | None:
    """The mesh of `jax.set_mesh` (the abstract one while tracing), or of Haliax's older scopes; None without either."""
    mesh = hax.partitioning._get_mesh()  # pyright: ignore[reportPrivateUsage]
    return None if mesh is None or mesh.empty else mesh
