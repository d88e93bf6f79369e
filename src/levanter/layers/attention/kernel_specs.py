"""PartitionSpecs of the arguments of attention kernels, which XLA's partitioner cannot shard."""

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
    """The mesh axes that shard each logical axis, under the mapping and the mesh in scope.

    Attributes:
        mapping: from logical axes to mesh axes.
        mesh: sizes of the mesh axes; empty without a mesh.
    """

    mapping: AxisMapping
    mesh: Mapping[str, int]

    @staticmethod
    def in_scope() -> "AxisShards":
        """The mapping and the mesh in scope."""
        mesh = jax.sharding.get_abstract_mesh()
        return AxisShards(compute_mapping_in_scope(), {} if mesh.empty else dict(mesh.shape))

    def mesh_axes(self, axis: Axis) -> tuple[str, ...]:
        """The mesh axes that shard an axis, major first."""
        # A mapping may name mesh axes that the mesh in scope lacks; without a mesh all of them.
        return tuple(a for a in self.mapping.mesh_axes(axis.name) if a in self.mesh)

    def num_shards(self, axis: Axis) -> int:
        """The number of shards of an axis."""
        return math.prod(self.mesh[a] for a in self.mesh_axes(axis))

    def spec(self, axes: tuple[Axis, ...]) -> PartitionSpec:
        """The PartitionSpec of an array with these axes.

        Raises:
            IndivisibleError: an axis size is not a multiple of its number of shards.
        """
        # `shard_map` would refuse this as well, but by the numbers of dimensions instead of the names of the axes.
        for axis in axes:
            if axis.size % self.num_shards(axis):
                shape = named_shape((a.name, a.size) for a in axes)
                rule = f"{axis.name} → {', '.join(self.mesh_axes(axis))}"
                raise IndivisibleError(
                    f"attention {shape}: the compute mapping has {rule} ({self.num_shards(axis)} ways), "
                    f"and {axis.name} {axis.size} is not a multiple of that",
                    suggestion="change the mapping, or set model.attn_backend: blockwise",
                )
        return PartitionSpec(*(self.mesh_axes(axis) or None for axis in axes))
