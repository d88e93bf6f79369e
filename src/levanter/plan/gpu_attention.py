"""What attention costs a GPU run with the kernel that it has, and with the one that it could have instead.

cuDNN's kernel keeps scores on the chip: its time is its products at the share of peak that the model of kernels gives
it. `reference` and `blockwise` are ordinary XLA programs, whose scores go through memory: their time is bytes for each
pair of a query and a key, masked ones too, of all heads. The bytes were read off compiled train steps
(`BYTES_PER_SCORE`), and docs/preflight/step-time.md compares the result with three other compiled shapes. Nothing is
compiled here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from haliax_ext.errors import gib
from levanter.hardware import Accelerator
from levanter.html.format import seconds_text
from levanter.layers.attention.backends import (
    DEFAULT_BLOCK,
    MAX_CUDNN_HEAD,
    MAX_MATERIALIZED_KEYS,
    choose_backend,
)
from levanter.layers.attention.dot_product import MIN_PACKED_ROWS
from levanter.models.stack import checkpoint_policy
from levanter.plan.gpu_kernel_time import kernel_shares
from levanter.runplan import RunPlan, Searchable

Kernel = Literal["cudnn", "reference", "blockwise"]


@dataclass(frozen=True, kw_only=True)
class ScoreBytes:
    """Bytes of a device's memory for each score, read and written, in one layer.

    Attributes:
        forward: of the forward pass.
        again: of the forward pass that gradient checkpointing repeats.
        backward: of the backward pass.
    """

    forward: float
    again: float
    backward: float


BYTES_PER_SCORE: Mapping[str, ScoreBytes] = {
    "reference": ScoreBytes(forward=24, again=18, backward=24),
    "blockwise": ScoreBytes(forward=23, again=23, backward=64),
}
"""From Llama 2 7B in rows of 1,024 tokens on h100x8 (`reference`), and 4 layers of a Llama in rows of 4,096:
the backward pass of `blockwise` computes the scores of a block once more."""
SCORE_ARRAYS = 2
"""Scores and their weights, in float32, are alive at once."""
PRODUCTS_FORWARD, PRODUCTS_BACKWARD = 2, 5


@dataclass(frozen=True, kw_only=True)
class AttentionCost:
    """Attention of one train step or scored batch, without its projections.

    Attributes:
        kernel: which one.
        seconds: on each device, all layers and passes.
        nbytes: of scores that are alive at once; 0 for cuDNN's kernel.
    """

    kernel: Kernel
    seconds: float
    nbytes: int

    def __str__(self) -> str:
        scores = f" and {gib(self.nbytes)} of scores" if self.nbytes else ""
        return f"{seconds_text(self.seconds)}{scores}"


def attention_note(plan: RunPlan, pod: Accelerator | None) -> str | None:
    """A sentence that compares the run's attention kernel with the other one; None where there is no choice.

    Args:
        plan: the run.
        pod: the target.
    """
    if pod is None or pod.generation.platform != "gpu" or plan.errors or not plan.workloads:
        return None
    now = chosen_kernel(plan)
    searchable = plan.searchable
    if now is None or isinstance(searchable, str) or not searchable.windows:
        return None
    positions, size = searchable.sizes["position"], searchable.sizes.get("head_size", 128)
    description = pod.generation.gpu
    assert description is not None
    other: Kernel = "cudnn"
    where = ""
    if now == "cudnn":
        other = "reference" if positions <= MAX_MATERIALIZED_KEYS else "blockwise"
    elif not _takes_cudnn(plan, searchable, size, description.capability):
        return None
    elif description.capability < (9, 0):
        # On these cards the kernel takes rows of one document only.
        where = " and data.block_cross_document_attention: false"
    ours, theirs = (attention_cost(plan, searchable, pod, kernel) for kernel in (now, other))
    if now == "cudnn" and _rows_of_call(plan, searchable) < MIN_PACKED_ROWS:
        ours = f"{ours}; packed documents of a single row take blockwise"
    return (
        f"attention of a {plan.workloads[0].program}: {now}, {ours}; with model.attn_backend: {other}{where} it would "
        f"be {theirs} (by arithmetic, without projections)"
    )


def chosen_kernel(plan: RunPlan) -> Kernel | None:
    """The kernel of a run's model; None for other kernels and for runs without a model."""
    name = getattr(getattr(plan.work, "model", None), "attn_backend", None)
    return name if name in ("cudnn", "reference", "blockwise") else None


def attention_cost(plan: RunPlan, searchable: Searchable, pod: Accelerator, kernel: Kernel) -> AttentionCost:
    """The cost of a kernel in the first workload of a run.

    Args:
        plan: the run.
        searchable: its facts.
        pod: its GPUs.
        kernel: any of the three.
    """
    positions, size = searchable.sizes["position"], searchable.sizes.get("head_size", 128)
    # Pairs of a query and a key, times the features of the query's heads, of all layers, on one device.
    features = sum(features for _, features in searchable.windows)
    pairs = plan.workloads[0].tokens * positions * features / pod.devices
    # Scoring has no backward pass, and a policy that saves everything has no second forward pass.
    again = searchable.training and _recomputes(plan)
    if kernel == "cudnn":
        # The causal half; documents of packed rows need less, which a plan does not know.
        products = PRODUCTS_FORWARD * (1 + again) + PRODUCTS_BACKWARD * searchable.training
        seconds = products * pairs / (pod.peak_flops() * kernel_shares(pod).attention)
        return AttentionCost(kernel=kernel, seconds=seconds, nbytes=0)
    of_score = BYTES_PER_SCORE[kernel]
    moved = of_score.forward + of_score.again * again + of_score.backward * searchable.training
    # `pairs` has the features of the heads in it, and scores have none.
    seconds = moved * pairs / size / (pod.hbm_bandwidth * kernel_shares(pod).memory)
    keys = positions if kernel == "reference" else min(positions, DEFAULT_BLOCK)
    layers = max(1, searchable.layers)
    rows, shards = _rows_at_once(plan, searchable), _head_shards(plan)
    # Of one layer: those of the other layers are computed at other times.
    alive = 4 * SCORE_ARRAYS * rows * positions * keys * features / layers / size / shards
    return AttentionCost(kernel=kernel, seconds=seconds, nbytes=math.ceil(alive))


def _takes_cudnn(plan: RunPlan, searchable: Searchable, head_size: int, capability: tuple[int, int]) -> bool:
    """Whether the run could have cuDNN's kernel."""
    if capability < (8, 0) or (head_size > MAX_CUDNN_HEAD and capability < (9, 0)):
        return False
    attention = getattr(getattr(plan.work, "model", None), "attention", None)
    # The choice that a request for cuDNN would get; what it refuses is no alternative.
    try:
        choose_backend(
            "cudnn",
            platform="gpu",
            dtype="bfloat16" if searchable.compute_bytes == 2 else "float32",
            length=searchable.sizes["position"],
            head_size=head_size,
            soft_cap=getattr(attention, "soft_cap", None),
            sinks=getattr(attention, "sinks", False),
        )
    except ValueError:
        return False
    inside = plan.sharding.mappings.inside_attention
    return plan.mesh.ways(inside.mesh_axes("position")) == 1


def _recomputes(plan: RunPlan) -> bool:
    policy = checkpoint_policy(getattr(getattr(plan.work, "model", None), "gradient_checkpointing", True))
    return not (policy.disable or policy.save_block_internals is True)


def _rows_of_call(plan: RunPlan, searchable: Searchable) -> int:
    # Activations of a plan are those of one microbatch over all devices.
    return max((dict(leaf.leaf.axes).get(searchable.batch_axis, 1) for leaf in plan.activations.leaves), default=1)


def _rows_at_once(plan: RunPlan, searchable: Searchable) -> int:
    ways = plan.mesh.ways(plan.sharding.mappings.compute.mesh_axes(searchable.batch_axis))
    return max(1, _rows_of_call(plan, searchable) // ways)


def _head_shards(plan: RunPlan) -> int:
    mapping = plan.sharding.mappings.compute
    return plan.mesh.ways(mapping.mesh_axes("kv_head")) * plan.mesh.ways(mapping.mesh_axes("q_heads_per_group"))
