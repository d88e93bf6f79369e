"""Mesh, activations and weight loading of a model: planning, and loading itself.

Shared by runs that train and runs that read a pretrained model. Each plans the sharding of parameters itself, since a
training run also holds optimizer state.
"""

import logging
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import haliax as hax
import jax
import numpy as np
from jax.sharding import Mesh

from haliax_ext.abstract import Leaf
from haliax_ext.abstract_source import ExpectedSource
from haliax_ext.activations import plan_activations
from haliax_ext.errors import ShardingError
from haliax_ext.load_plan import LoadPlan
from haliax_ext.load_progress import LoadProgress
from haliax_ext.load_strategy import plan_loading
from haliax_ext.loading import LoadedArrays, load
from haliax_ext.mapping import path_matches
from haliax_ext.meshspec import MeshSpec
from haliax_ext.nonfinite import NotFinite
from haliax_ext.planner import ShardingPlan
from haliax_ext.rules import WeightMismatchError, WeightRules
from haliax_ext.sources import TensorSource
from levanter.commands.cli.consistency import require_same_weights
from levanter.commands.model.source import ModelSource
from levanter.distributed.agreement import barrier
from levanter.distributed.compile_barrier import jit_together
from levanter.io import Progress
from levanter.mesh import MeshConfig, ResolvedMesh, resolve
from levanter.models.activations import transformer_activations
from levanter.models.axes import model_axes
from levanter.models.lm_head.plan import planned_chunk
from levanter.models.param_groups import hint
from levanter.models.precision import Precision
from levanter.models.registry import LmConfig
from levanter.runplan import Check, Target

if TYPE_CHECKING:
    from levanter.commands.model.with_adapter import Adapter


def resolve_mesh(
    target: Target,
    mesh: MeshConfig,
    model: LmConfig,
    *,
    vocab: int,
    positions: int,
    precision: Precision,
    backward: bool,
) -> ResolvedMesh:
    """Resolves the mesh and the mappings of a model on the devices of a run.

    Args:
        target: the devices.
        mesh: the user's mesh configuration.
        model: the architecture.
        vocab: vocabulary size.
        positions: tokens in a sequence.
        precision: dtype policy of the run.
        backward: whether gradients are computed.

    Raises:
        ShardingError: lists all problems of sizes and names.
    """
    prices = None
    # Only the links of TPUs have known rates.
    if target.platform == "tpu":
        from levanter.plan.context_parallel_cost import context_parallel_cost

        itemsize = np.dtype(precision.compute).itemsize
        prices = context_parallel_cost(model, target, positions=positions, itemsize=itemsize, backward=backward)
    return resolve(
        mesh,
        # Sizes by logical name; the resolver assigns mesh axes to them.
        model_axes(model.axes, vocab=vocab, positions=positions),
        devices=target.devices,
        granules=target.granules,
        hbm_bytes=target.hbm_bytes,
        # Time estimates, from which `auto` chooses how attention is parallelized over positions.
        prices=prices,
    )


def pattern_checks(mesh: MeshConfig, spec: MeshSpec, parameters: Iterable[Leaf]) -> list[Check]:
    """Refuses patterns of `overrides` and `allow_replicated` that match nothing: they are misspelt.

    Args:
        mesh: the user's mesh configuration.
        spec: the mesh, whose axes `allow_replicated` may name too.
        parameters: all parameters of the run.
    """
    known = tuple(parameters)

    def unmatched(patterns: Iterable[str]) -> list[str]:
        return [pattern for pattern in patterns if not any(path_matches(pattern, leaf.path) for leaf in known)]

    problems = [
        f"trainer.mesh.overrides[{pattern!r}] matches no parameter; {hint(pattern, known, ())}"
        for pattern in unmatched(mesh.overrides)
    ]
    problems += [
        f"trainer.mesh.allow_replicated: {pattern!r} matches no parameter and is no mesh axis; "
        f"{hint(pattern, known, spec.names)}"
        for pattern in unmatched(entry for entry in mesh.allow_replicated if entry not in spec.names)
    ]
    return [Check(name="mesh", status="error", message=text, error=ShardingError(text)) for text in problems]


def vocabulary_axis(vocab: int, resolved: ResolvedMesh) -> hax.Axis:
    """The rows of embedding and head, rounded up to a multiple of their shards under parameter and compute mapping."""
    mappings = resolved.mappings
    shards = [resolved.spec.ways(mapping.mesh_axes("vocab")) for mapping in (mappings.params, mappings.compute)]
    # The least common multiple suits both mappings; the two may shard the vocabulary differently.
    unit = math.lcm(*shards)
    return hax.Axis("vocab", -(-vocab // unit) * unit)


def plan_activation_sharding(
    model: LmConfig,
    resolved: ResolvedMesh,
    *,
    rows: int,
    positions: int,
    Vocab: hax.Axis,
    precision: Precision,
    chunk: int | None = None,
) -> ShardingPlan:
    """Plans the sharding of the named activations of a forward pass with chunked scoring.

    Args:
        model: the architecture.
        resolved: mesh and mappings.
        rows: sequences per batch, over all devices.
        positions: tokens per sequence.
        Vocab: rows of the head.
        precision: the dtype policy.
        chunk: positions whose logits are computed at a time; default that of scoring.
    """
    batch, mapping = (resolved.batch_axis, rows), resolved.mappings.compute
    # The chunk decides the size of the logits, the largest activation.
    chunk = chunk or planned_chunk(model, batch=batch, vocab=Vocab.size, mapping=mapping, mesh=resolved.spec)
    named = transformer_activations(
        model, batch=batch, positions=positions, vocab=Vocab.size, chunk=chunk, dtype=precision.compute
    )
    return plan_activations(named, resolved.mappings, resolved.spec)


def plan_weight_loading(
    origin: ModelSource,
    model: LmConfig,
    Vocab: hax.Axis,
    parameters: ShardingPlan,
    target: Target,
    *,
    memory_bytes: int | None = None,
    rules: WeightRules | None = None,
    adapter: "Adapter | None" = None,
) -> tuple[LoadPlan | None, list[Check]]:
    """Plans which bytes of a checkpoint each host reads; an unavailable one is assumed to match the rules.

    Args:
        origin: the source of the weights.
        model: the architecture, with `vocab_size`.
        Vocab: rows of the embedding, which may be more.
        parameters: their sharding.
        target: the devices.
        memory_bytes: host memory for read buffers; None for the default.
        rules: the weight rules, if they are not those of the source.
        adapter: an adapter whose tensors are also loaded; None for none.

    Returns:
        The plan, or None and a check that lists the weights that do not match.
    """
    # Leaves in the plan's order, which is that of the module.
    leaves = [planned.leaf for planned in parameters.leaves]
    rules = origin.weight_rules(model, Vocab, leaves) if rules is None else rules
    source = (
        # Without files, tensors with the names and shapes of the rules stand in for them.
        ExpectedSource.of(rules, leaves, dtype=origin.stored) if origin.checkpoint is None else origin.checkpoint.source
    )
    if adapter is not None and origin.checkpoint is not None:
        from levanter.commands.model.with_adapter import WithAdapter

        # Weights of the adapter are in other files, behind the same interface.
        source = WithAdapter(source, adapter.source)
    try:
        hosts = target.host_layout(parameters.mesh)
        return plan_loading(parameters, rules, source, hosts=hosts, memory_bytes=memory_bytes), []
    except WeightMismatchError as error:
        message = f"{error}\n  → copy the checkpoint again, or give it the config.json that its weights belong to"
        return None, [Check(name="weights", status="error", message=message, error=error)]


logger = logging.getLogger(__name__)

SHOWN = 5
"""Number of tensors that an error lists."""


class NonFiniteWeightsError(ValueError):
    """Weights are NaN or infinite; the message has their number and the first arrays."""


def load_weights(
    plan: LoadPlan,
    parameters: ShardingPlan,
    source: TensorSource,
    mesh: Mesh,
    *,
    show: bool,
    memory_bytes: int | None = None,
    allow_nonfinite: bool = False,
) -> LoadedArrays:
    """Streams weights into their final shards, with progress over all of them.

    Args:
        plan: the bytes that each host reads.
        parameters: the sharding of the weights.
        source: the checkpoint, which is first compared between processes.
        mesh: the devices.
        show: whether progress is shown.
        memory_bytes: host memory for read buffers; None for the default.
        allow_nonfinite: whether weights that are NaN or infinite only cause a warning.

    Raises:
        NonFiniteWeightsError: some weights are not finite.
    """
    # All processes must read the same bytes, or shards of one array would come from different models.
    require_same_weights(source)
    barrier("loading weights")
    # A plan for one host has one entry, also where several processes read the same bytes.
    total = plan.bytes_by_host[jax.process_index() if plan.num_hosts > 1 else 0]
    with Progress("loading weights", total=total, unit="bytes", show=show) as progress:

        def report_progress(at: LoadProgress) -> None:
            where = at.path if at.layer is None else f"{at.path}, layer {at.layer}"
            progress.advance_to(at.bytes_done, note=f"{where}; {at.network}" if at.network else where)

        loaded = load(
            plan, parameters, source, mesh, memory_bytes=memory_bytes, jit=jit_together, progress=report_progress
        )
    # Counted while loading, so no second pass over the weights is needed.
    if loaded.report.not_finite:
        message = _nonfinite_message(loaded.report.not_finite)
        if not allow_nonfinite:
            raise NonFiniteWeightsError(
                f"{message}\n  → the checkpoint is damaged, or its training diverged; use another one, or a wider "
                "trainer.mp if they overflow, or set trainer.allow_nonfinite: true to continue with them"
            )
        logger.warning("%s; continuing with them (trainer.allow_nonfinite)", message)
    return loaded


def _nonfinite_message(tensors: Sequence[NotFinite]) -> str:
    count, leaves = sum(tensor.count for tensor in tensors), len({tensor.path for tensor in tensors})
    lines = "".join(f"\n  {tensor}" for tensor in tensors[:SHOWN])
    more = f"\n  and {len(tensors) - SHOWN} more tensors" if len(tensors) > SHOWN else ""
    return f"{count:,} weights in {leaves} arrays are not finite; the first are in{lines}{more}"
