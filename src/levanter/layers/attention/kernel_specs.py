"""Which part of an array a device has, for kernels that no compiler can shard."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
from haliax import Axis
from jax.sharding import PartitionSpec

from haliax_ext.errors import IndivisibleError, named_shape
from haliax_ext.mapping import AxisMapping, compute_mapping_in_scope


@dataclass(frozen=True)
class AxisShards:
    """Which mesh axes shard an axis: the mapping in scope on the mesh in scope.

    Attributes:
        mapping: of logical axes to mesh axes.
        mesh: sizes of the mesh axes; empty where there is no mesh.
    """

    mapping: AxisMapping
    mesh: Mapping[str, int]

    @staticmethod
    def in_scope() -> "AxisShards":
        """By the mapping and the mesh in scope."""
        mesh = jax.sharding.get_abstract_mesh()
        return AxisShards(compute_mapping_in_scope(), {} if mesh.empty else dict(mesh.shape))

    def mesh_axes(self, axis: Axis) -> tuple[str, ...]:
        """What shards it, major first."""
        return tuple(a for a in self.mapping.mesh_axes(axis.name) if a in self.mesh)

    def ways(self, axis: Axis) -> int:
        """Into how many parts it is cut."""
        return math.prod(self.mesh[a] for a in self.mesh_axes(axis))

    def spec(self, axes: tuple[Axis, ...]) -> PartitionSpec:
        """What shards an array with these axes.

        Raises:
            IndivisibleError: one of them does not divide.
        """
        for axis in axes:
            if axis.size % self.ways(axis):
                shape = named_shape((a.name, a.size) for a in axes)
                rule = f"{axis.name} → {', '.join(self.mesh_axes(axis))}"
                raise IndivisibleError(
                    f"attention {shape}: the compute mapping has {rule} ({self.ways(axis)} ways), "
                    f"and {axis.name} {axis.size} is not a multiple of that",
                    suggestion="change the mapping, or set model.attn_backend: blockwise",
                )
        return PartitionSpec(*(self.mesh_axes(axis) or None for axis in axes))
