"""Activations as named shapes, checked against the compute mapping before JAX is called.

Inside `jit` an activation whose axis does not divide ends replicated without a word, and one whose axes collide fails
with JAX's own message. A model knows which activations it constrains; it lists them as `Activation`s, and
`check_activations` says what is wrong with them by the same rules that parameters obey.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from haliax_ext.abstract import Leaf
from haliax_ext.mapping import Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.placement import Finding, LeafPlan, place
from haliax_ext.planner import ShardingPlan


@dataclass(frozen=True, kw_only=True)
class Activation:
    """One named activation of a model.

    Attributes:
        name: what messages call it (`mlp hidden`, `logits`).
        axes: its axes (name, size), with the global batch.
        mapping: which mapping it is constrained by; the residual stream has its own, and so has what is inside of
            attention, which is left out where no mapping is for that.
        dtype: for the bytes.
    """

    name: str
    axes: tuple[tuple[str, int], ...]
    mapping: Literal["compute", "residual", "attention"] = "compute"
    dtype: np.dtype = np.dtype(np.float32)


def plan_activations(activations: Iterable[Activation], mappings: Mappings, mesh: MeshSpec) -> ShardingPlan:
    """Places every activation under its mapping, as if each were a leaf.

    `on_conflict` does not apply: Haliax, which constrains activations, would not follow it. Replicated activations are
    no findings; only replicated parameters are.
    """
    plans: list[LeafPlan] = []
    findings: list[Finding] = []
    attention_mappings = {"residual": mappings.residual_stream, "attention": mappings.inside_attention}
    has_attention = bool(mappings.attention or mappings.attention.unmapped)
    for activation in activations:
        # Without an attention mapping these arrays are constrained by the compute mapping.
        if activation.mapping == "attention" and not has_attention:
            continue
        mapping = attention_mappings.get(activation.mapping, mappings.compute)
        leaf = Leaf(activation.name, activation.axes, np.dtype(activation.dtype))
        plan, leaf_findings = place(leaf, mapping, mesh, role="activation")
        plans.append(plan)
        findings += leaf_findings
    return ShardingPlan(mesh=mesh, mappings=mappings, leaves=tuple(plans), findings=tuple(findings))


def check_activations(activations: Iterable[Activation], mappings: Mappings, mesh: MeshSpec) -> tuple[Finding, ...]:
    """What is wrong with the activations under the mappings: collisions and indivisible axes."""
    return plan_activations(activations, mappings, mesh).findings
