"""From an architecture on a resolved mesh to plans: activations, and the loading of weights.

Runs that train and runs that read a pretrained model share this; each plans the placement of parameters itself, since a
training run holds more than parameters.
"""

import logging
import math
from collections.abc import Sequence

import haliax as hax
import jax
import numpy as np
from jax.sharding import Mesh

from haliax_ext.abstract_source import ExpectedSource
from haliax_ext.activations import plan_activations
from haliax_ext.load_plan import LoadPlan
from haliax_ext.load_progress import LoadProgress
from haliax_ext.load_strategy import plan_loading
from haliax_ext.loading import LoadedArrays, load
from haliax_ext.nonfinite import NotFinite
from haliax_ext.planner import ShardingPlan
from haliax_ext.rules import WeightMismatchError, WeightRules
from haliax_ext.sources import TensorSource
from levanter.commands.cli.consistency import require_same_weights
from levanter.commands.model.source import Origin
from levanter.commands.model.with_adapter import Adapter, WithAdapter
from levanter.distributed.barrier import barrier
from levanter.distributed.compile_barrier import jit_together
from levanter.io import Progress
from levanter.mesh import MeshConfig, ResolvedMesh, resolve
from levanter.models.activations import transformer_activations
from levanter.models.axes import model_axes
from levanter.models.lm_head.plan import planned_chunk
from levanter.models.precision import Precision
from levanter.models.registry import LmConfig
from levanter.plan.context_parallel_cost import context_parallel_cost
from levanter.runplan import Check, Target


def resolved_on(
    target: Target,
    mesh: MeshConfig,
    model: LmConfig,
    *,
    vocab: int,
    positions: int,
    precision: Precision,
    backward: bool,
) -> ResolvedMesh:
    """The mesh and the mappings of a model on the devices of a run.

    Args:
        target: the devices.
        mesh: what the user wrote.
        model: the architecture.
        vocab: ids that it tells apart.
        positions: tokens in a sequence.
        precision: of the run.
        backward: whether gradients are made.

    Raises:
        ShardingError: everything that is wrong with sizes and names, together.
    """
    itemsize = np.dtype(precision.compute).itemsize
    return resolve(
        mesh,
        model_axes(model.axes, vocab=vocab, positions=positions),
        devices=target.devices,
        granules=target.granules,
        hbm_bytes=target.hbm_bytes,
        prices=context_parallel_cost(model, target, positions=positions, itemsize=itemsize, backward=backward),
    )


def vocabulary_axis(vocab: int, resolved: ResolvedMesh) -> hax.Axis:
    """The rows of embedding and head, rounded up to a multiple of their shards under parameter and compute mapping."""
    mappings = resolved.mappings
    cuts = [resolved.spec.ways(mapping.mesh_axes("vocab")) for mapping in (mappings.params, mappings.compute)]
    unit = math.lcm(*cuts)
    return hax.Axis("vocab", -(-vocab // unit) * unit)


def planned_activations(
    model: LmConfig,
    resolved: ResolvedMesh,
    *,
    rows: int,
    positions: int,
    Vocab: hax.Axis,
    precision: Precision,
    chunk: int | None = None,
) -> ShardingPlan:
    """Where the named activations of a forward pass with chunked scoring go.

    Args:
        model: the architecture.
        resolved: mesh and mappings.
        rows: sequences at once, over all devices.
        positions: tokens per sequence.
        Vocab: rows of the head.
        precision: the dtype policy.
        chunk: positions scored at a time; scoring's own choice by default.
    """
    batch, mapping = (resolved.batch_axis, rows), resolved.mappings.compute
    chunk = chunk or planned_chunk(model, batch=batch, vocab=Vocab.size, mapping=mapping, mesh=resolved.spec)
    named = transformer_activations(
        model, batch=batch, positions=positions, vocab=Vocab.size, chunk=chunk, dtype=precision.compute
    )
    return plan_activations(named, resolved.mappings, resolved.spec)


def planned_loading(
    origin: Origin,
    model: LmConfig,
    Vocab: hax.Axis,
    parameters: ShardingPlan,
    target: Target,
    *,
    memory_bytes: int | None = None,
    rules: WeightRules | None = None,
    adapter: Adapter | None = None,
) -> tuple[LoadPlan | None, list[Check]]:
    """Which bytes of a checkpoint each host reads; an absent one is taken to hold what the rules expect.

    Args:
        origin: where the weights come from.
        model: the architecture, with `vocab_size`.
        Vocab: rows of the embedding, which may be more.
        parameters: where they go.
        target: the devices.
        memory_bytes: host memory for reading; None for the default.
        rules: where the leaves come from, if that is not what the origin says.
        adapter: whose tensors are loaded too; None for none.

    Returns:
        The plan, or None and a check that lists the weights that do not match.
    """
    leaves = [each.leaf for each in parameters.leaves]
    rules = origin.weight_rules(model, Vocab, leaves) if rules is None else rules
    source = (
        ExpectedSource.of(rules, leaves, dtype=origin.stored) if origin.checkpoint is None else origin.checkpoint.source
    )
    if adapter is not None and origin.checkpoint is not None:
        source = WithAdapter(source, adapter.source)
    try:
        hosts = target.host_layout(parameters.mesh)
        return plan_loading(parameters, rules, source, hosts=hosts, memory_bytes=memory_bytes), []
    except WeightMismatchError as error:
        return None, [Check(name="weights", status="error", message=str(error), error=error)]


logger = logging.getLogger(__name__)

SHOWN = 5
"""Tensors that an error lists."""


class NonFiniteWeightsError(ValueError):
    """Weights are NaN or infinite; the message says how many, and where the first of them are."""


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
        plan: which bytes each host reads.
        parameters: where they go.
        source: the checkpoint, compared between processes first.
        mesh: the devices.
        show: whether progress is shown.
        memory_bytes: host memory for reading; None for the default.
        allow_nonfinite: whether weights that are NaN or infinite only cause a warning.

    Raises:
        NonFiniteWeightsError: there are some.
    """
    require_same_weights(source)
    barrier("loading weights")
    total = plan.bytes_by_host[jax.process_index() if plan.num_hosts > 1 else 0]
    with Progress("loading weights", total=total, unit="bytes", show=show) as progress:

        def tell(at: LoadProgress) -> None:
            where = at.path if at.layer is None else f"{at.path}, layer {at.layer}"
            progress.advance_to(at.bytes_done, note=f"{where}; {at.network}" if at.network else where)

        loaded = load(plan, parameters, source, mesh, memory_bytes=memory_bytes, jit=jit_together, progress=tell)
    if loaded.report.not_finite:
        said = _said_of(loaded.report.not_finite)
        if not allow_nonfinite:
            raise NonFiniteWeightsError(
                f"{said}\n  → the checkpoint is damaged, or its training diverged; use another one, or a wider "
                "trainer.mp if they overflow, or set trainer.allow_nonfinite: true to continue with them"
            )
        logger.warning("%s; continuing with them (trainer.allow_nonfinite)", said)
    return loaded


def _said_of(found: Sequence[NotFinite]) -> str:
    count, leaves = sum(each.count for each in found), len({each.path for each in found})
    lines = "".join(f"\n  {each}" for each in found[:SHOWN])
    more = f"\n  and {len(found) - SHOWN} more tensors" if len(found) > SHOWN else ""
    return f"{count:,} weights in {leaves} arrays are not finite, the first of them in{lines}{more}"
