"""Replicas cut into parts, so that each device that holds an array stores a part of its own.

An array that is replicated over several devices is stored by one of them, or in parts by all. The second is faster with
many hosts. A Program that the plan lists cuts the parts: every device takes its part of what it holds, and nothing
moves between devices.
"""

import itertools
from collections.abc import Mapping
from dataclasses import replace

import jax
from jax.sharding import PartitionSpec

from haliax_ext.meshspec import MeshAxes, MeshSpec
from haliax_ext.planner import LeafPlan, ShardingPlan
from haliax_ext.program import Input, Program

PROGRAM_NAME = "save.parts"
MIN_SLICE_BYTES = 64 << 10
"""Least bytes of a part: smaller ones cost more in the records of files than they save in bytes to write."""


def replica_slices_plan(plan: ShardingPlan, *, min_bytes: int = MIN_SLICE_BYTES) -> ShardingPlan:
    """The leaves of a plan that several devices hold, each sharded further over as many of them as possible.

    Args:
        plan: the leaves' shardings.
        min_bytes: no part is smaller.
    """
    sliced = (_sliced(leaf_plan, plan.mesh, min_bytes) for leaf_plan in plan.leaves)
    return replace(plan, leaves=tuple(leaf_plan for leaf_plan in sliced if leaf_plan is not None), findings=())


def replica_slices_program(plan: ShardingPlan, *, min_bytes: int = MIN_SLICE_BYTES) -> Program | None:
    """The Program from arrays by path to the same arrays, sharded by `replica_slices_plan`; None if none is.

    Args:
        plan: the leaves' shardings.
        min_bytes: no part is smaller.
    """
    slices = replica_slices_plan(plan, min_bytes=min_bytes)
    if not slices.leaves:
        return None
    value = {
        leaf_plan.leaf.path: jax.ShapeDtypeStruct(leaf_plan.leaf.shape, leaf_plan.leaf.dtype)
        for leaf_plan in slices.leaves
    }
    return Program(
        name=PROGRAM_NAME,
        function=_identity,
        # The function does nothing: the outputs' shardings alone make every device keep a part of what it holds.
        inputs=(Input(name="arrays", value=value, placement=plan),),
        out_placement=slices,
    )


def _identity(arrays: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
    return arrays


def _sliced(plan: LeafPlan, mesh: MeshSpec, min_bytes: int) -> LeafPlan | None:
    """The leaf sharded over the most devices that one of its axes can be divided among."""
    whole = plan.replicated_over
    # The most ways first; among equals, mesh axes that come first: those that cross hosts.
    subsets = [axes for n in range(len(whole), 0, -1) for axes in itertools.combinations(whole, n)]
    for axes in sorted(subsets, key=mesh.ways, reverse=True):
        ways = mesh.ways(axes)
        if plan.bytes_per_device < ways * min_bytes:
            continue
        for at, size in enumerate(plan.shard_shape):
            if size % ways == 0:
                return _cut(plan, at, axes, ways)
    return None


def _cut(plan: LeafPlan, at: int, axes: tuple[str, ...], ways: int) -> LeafPlan:
    # After the mesh axes that shard it already, so that each device's part is within what it holds.
    entries: list[MeshAxes | None] = [dim_axes or None for dim_axes in plan.mesh_axes]
    entries[at] = (*plan.mesh_axes[at], *axes)
    shape = tuple(size // ways if n == at else size for n, size in enumerate(plan.shard_shape))
    return replace(
        plan,
        spec=PartitionSpec(*entries),
        shard_shape=shape,
        replicated_over=tuple(axis for axis in plan.replicated_over if axis not in axes),
        reason=f"{plan.reason}; {plan.leaf.names[at]} in {ways} parts for saving",
    )
