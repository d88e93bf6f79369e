"""Bytes that a device receives in a train step, by purpose and by network: arithmetic from the plan alone.

The sum has the transfers that every implementation needs. A parameter that is sharded over mesh axes which do not shard
its computation is gathered over them, in the compute dtype: once in the forward pass and once in the backward pass of
each microbatch; the embedding table in the forward pass alone. A gradient is float32, summed over the mesh axes that
shard the batch, once a microbatch, and ends in its parameter's shards. Frozen weights have no gradient. With `V` the
bytes of a whole array on `n` devices, each device receives

    all-gather, reduce-scatter    V · (n−1)/n
    all-reduce                    twice that

Where a group covers devices of several slices, each device receives its share over the data-center network, and the
devices of a slice exchange these shares: `V / inside · (slices−1)/slices` over DCN and the rest over ICI.

Not counted: activations that tensor parallelism sums, norms, metrics, and collectives that the compiler adds.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from haliax_ext.hlo import AxisSpan, Collective
from haliax_ext.meshspec import MeshSpec
from haliax_ext.placement import LeafPlan
from levanter.layers.low_rank import RANK
from levanter.models.param_groups import EMBEDDING, parameter_group
from levanter.runplan import RunPlan, Searchable
from levanter.trainer.train_state import FROZEN, GRADIENT_BYTES, MODEL

FROZEN_GATHERED, GATHERED = "frozen weights, gathered", "weights, gathered"
ADAPTERS_GATHERED, GRADIENTS = "adapters, gathered", "gradients, summed"


@dataclass(frozen=True, kw_only=True)
class CollectiveBytes:
    """Bytes that one device receives.

    Attributes:
        ici: inside a slice.
        dcn: between slices.
    """

    ici: float = 0.0
    dcn: float = 0.0

    def __add__(self, other: "CollectiveBytes") -> "CollectiveBytes":
        return CollectiveBytes(ici=self.ici + other.ici, dcn=self.dcn + other.dcn)

    def __mul__(self, times: float) -> "CollectiveBytes":
        return CollectiveBytes(ici=self.ici * times, dcn=self.dcn * times)


def step_collective_bytes(plan: RunPlan) -> Mapping[str, CollectiveBytes]:
    """The bytes that a device receives in one train step, by purpose; empty for runs that do not train.

    Args:
        plan: a training run.
    """
    searchable = plan.searchable
    if not isinstance(searchable, Searchable) or not searchable.training:
        return {}
    compute = plan.sharding.mappings.compute
    batch = tuple(axis for axis in compute.mesh_axes(searchable.batch_axis) if plan.mesh.shape[axis] > 1)
    times = _microbatches(plan, searchable)
    by_purpose: dict[str, CollectiveBytes] = {}
    for purpose, leaf in _parameters(plan):
        # Mesh axes that shard both the parameter and its computation (tensor parallelism) leave it in place;
        # those that shard the parameter alone (FSDP) gather it, in mesh order.
        cut = {axis for axes in leaf.mesh_axes for axis in axes if plan.mesh.shape[axis] > 1}
        computed = {axis for name in leaf.leaf.names for axis in compute.mesh_axes(name)}
        stationary, gathered = cut & computed, tuple(a for a in plan.mesh.names if a in cut - computed)
        elements = math.prod(leaf.leaf.shape) // plan.mesh.ways(tuple(stationary))
        # A parameter is cast before it is gathered where that makes it smaller, and
        # gathered as stored where it is narrower.
        narrow = elements * min(leaf.leaf.dtype.itemsize, searchable.compute_bytes)
        # The backward pass of a lookup scatters gradients into rows and never reads the table. Low-rank factors
        # of the table are multiplied, so they are gathered twice like other weights.
        is_table = parameter_group(leaf.leaf) == EMBEDDING and RANK not in leaf.leaf.names
        passes = 1 if is_table else 2
        gathered_bytes = collective(plan.mesh, "all-gather", narrow, gathered) * (passes * times)
        by_purpose[purpose] = by_purpose.get(purpose, CollectiveBytes()) + gathered_bytes
        if purpose != FROZEN_GATHERED:
            summed = _summed(plan.mesh, elements * GRADIENT_BYTES, batch, gathered) * times
            by_purpose[GRADIENTS] = by_purpose.get(GRADIENTS, CollectiveBytes()) + summed
    return {
        purpose: gathered_bytes
        for purpose, gathered_bytes in by_purpose.items()
        if gathered_bytes.ici or gathered_bytes.dcn
    }


def compiled_collective_bytes(mesh: MeshSpec, collectives: tuple[Collective, ...]) -> CollectiveBytes:
    """The bytes that a device receives in one execution of a compiled Program, but for unknown groups."""
    total = CollectiveBytes()
    for collective in collectives:
        if collective.spans is not None:
            total = total + span_collective_bytes(mesh, collective.kind, collective.total_bytes, collective.spans)
    return total


def collective(mesh: MeshSpec, kind: str, nbytes: float, axes: tuple[str, ...]) -> CollectiveBytes:
    """The bytes that a device receives in one collective over whole mesh axes.

    Args:
        mesh: names the axes between slices.
        kind: the compiler's name of the collective.
        nbytes: of the whole array; of one device's part for `all-to-all` and `collective-permute`.
        axes: the mesh axes of a group.
    """
    return span_collective_bytes(
        mesh, kind, nbytes, [AxisSpan(axis, mesh.shape[axis], mesh.shape[axis]) for axis in axes]
    )


def span_collective_bytes(
    mesh: MeshSpec, kind: str, nbytes: float, spans: "tuple[AxisSpan, ...] | list[AxisSpan]"
) -> CollectiveBytes:
    """The bytes that a device receives in one collective over parts of mesh axes."""
    inside = math.prod(span.extent for span in spans if span.axis not in mesh.dcn)
    slices = math.prod(span.extent for span in spans if span.axis in mesh.dcn)
    if inside * slices == 1:
        return CollectiveBytes()
    if kind in ("all-gather", "reduce-scatter", "all-reduce"):
        # An all-reduce is a reduce-scatter followed by an all-gather.
        twice = 2 if kind == "all-reduce" else 1
        return CollectiveBytes(
            ici=twice * nbytes * (inside - 1) / inside, dcn=twice * nbytes / inside * (slices - 1) / slices
        )
    # The slowest pair of the permutation counts: with several slices in the group some pair crosses DCN.
    if kind == "collective-permute":
        return CollectiveBytes(dcn=nbytes) if slices > 1 else CollectiveBytes(ici=nbytes)
    # All-to-all: a device keeps 1 / members of its array and receives as much from every other member.
    members = inside * slices
    return CollectiveBytes(ici=nbytes * (inside - 1) / members, dcn=nbytes * (members - inside) / members)


def _summed(mesh: MeshSpec, nbytes: float, batch: tuple[str, ...], stored: tuple[str, ...]) -> CollectiveBytes:
    """Bytes of a gradient's sum over the batch axes: a reduce-scatter where they shard the parameter."""
    scattered = tuple(axis for axis in batch if axis in stored)
    rest = tuple(axis for axis in batch if axis not in stored)
    # The reduce-scatter comes first: what remains for the all-reduce is smaller by its ways.
    first = collective(mesh, "reduce-scatter", nbytes, scattered)
    return first + collective(mesh, "all-reduce", nbytes / mesh.ways(scattered), rest)


def _parameters(plan: RunPlan) -> Iterator[tuple[str, LeafPlan]]:
    for leaf in plan.sharding.leaves:
        if leaf.leaf.path.startswith(f"{FROZEN}."):
            yield FROZEN_GATHERED, leaf
        elif leaf.leaf.path.startswith(f"{MODEL}."):
            yield (ADAPTERS_GATHERED if RANK in leaf.leaf.names else GATHERED), leaf


def _microbatches(plan: RunPlan, searchable: Searchable) -> int:
    """The number of microbatches of a step, which run one after another."""
    # The activations of a plan are those of one microbatch, so their batch axis has its rows.
    rows = [dict(leaf.leaf.axes).get(searchable.batch_axis, 0) for leaf in plan.activations.leaves]
    largest = max(rows, default=0)
    return max(1, -(-(searchable.global_batch or 1) // largest)) if largest else 1
