"""Detects frozen weights that are gathered over DCN, and suggests the mapping that avoids it.

Adapters are cheap over the data-center network because their gradients are small. A frozen weight that is sharded over
a mesh axis between slices is gathered over it twice in a step: that costs a run with adapters as much as full
fine-tuning, and many times what its gradients cost. A weight that is sharded inside slices alone stays inside them.
"""

from collections.abc import Mapping
from dataclasses import replace

from haliax_ext.errors import gib
from haliax_ext.mapping import AxisMapping
from haliax_ext.placement import LeafPlan, show_axes
from levanter.plan.collective_bytes import FROZEN_GATHERED, GRADIENTS, CollectiveBytes, step_collective_bytes
from levanter.plan.hbm_lower_bound import HbmLowerBound, layout_lower_bound
from levanter.plan.layout_memory import Layout, LayoutSubject, layout_memory
from levanter.runplan import RunPlan
from levanter.trainer.train_state import FROZEN

_GB = 1e9


def dcn_gather_note(plan: RunPlan) -> str | None:
    """A note on frozen weights that are sharded between slices; None where there are none.

    Also None where they fit in no other way: then gathers over the network are the only option.

    Args:
        plan: a training run, without errors.
    """
    limit, is_tpu = plan.target.hbm_bytes, plan.target.platform == "tpu"
    between, domain = ("DCN", "slice") if is_tpu else ("the network", "host")
    cut = [leaf for leaf in plan.sharding.leaves if leaf.leaf.path.startswith(f"{FROZEN}.") and _dcn_axes(plan, leaf)]
    if not cut or limit is None or plan.errors or not plan.workloads:
        return None
    # Arithmetic of the changed mapping: whether the same Program would still
    # fit with the weights inside each slice.
    subject = LayoutSubject(plan=plan, program=plan.program(plan.workloads[0].program), hbm_bytes=limit)
    inside, changed = _inside(plan, subject.now)
    figures = layout_memory(subject, inside)
    known: HbmLowerBound = layout_lower_bound(subject, inside, figures)
    if figures.errors or known.total > limit:
        return None
    now = layout_lower_bound(subject, subject.now, layout_memory(subject, subject.now))
    received = step_collective_bytes(plan)
    nothing = CollectiveBytes()
    weights, gradients = received.get(FROZEN_GATHERED, nothing).dcn, received.get(GRADIENTS, nothing).dcn
    over = sorted({axis for leaf in cut for axis in _dcn_axes(plan, leaf)})
    return (
        f"frozen weights sharded over {', '.join(over)} are gathered between {domain}s: each {plan.target.unit} "
        f"receives {weights / _GB:.3g} GB a step over {between}, and {gradients / _GB:.3g} GB of gradients. Gradients "
        f"of adapters are small; gathering frozen weights costs as much as in full fine-tuning. Sharded inside "
        f"{domain}s alone, they stay there, and a {plan.target.unit} needs at least {gib(known.total)} of {gib(limit)} "
        f"(now {gib(now.total)}): {changed}"
    )


def _dcn_axes(plan: RunPlan, leaf: LeafPlan) -> tuple[str, ...]:
    """The mesh axes between slices that shard an array."""
    axes_ = (axis for axes in leaf.mesh_axes for axis in axes)
    return tuple(axis for axis in axes_ if axis in plan.mesh.dcn and plan.mesh.shape[axis] > 1)


def _inside(plan: RunPlan, now: Layout) -> tuple[Layout, str]:
    """The layout whose parameter rules leave out DCN axes, and the YAML for it."""
    mappings = now.mappings

    def without(mapping: AxisMapping) -> dict[str, tuple[str, ...] | None]:
        return {
            name: tuple(axis for axis in mapping.mesh_axes(name) if axis not in plan.mesh.dcn) or None
            for name in mapping
            if any(axis in plan.mesh.dcn for axis in mapping.mesh_axes(name))
        }

    # `or None` in the rules: an axis left with no mesh axis is replicated, and
    # `null` in YAML overrides a default rule.
    params = without(mappings.params)
    overrides = {pattern: rules_ for pattern, rules in mappings.overrides if (rules_ := without(rules))}
    written = [f"trainer.mesh.param_mapping: {_shown(params)}"] if params else []
    written += [f"trainer.mesh.overrides: {{{pattern}: {_shown(rules)}}}" for pattern, rules in overrides.items()]
    changed = replace(
        mappings,
        params=mappings.params.merged(params),
        overrides=tuple(
            (pattern, rules.merged(overrides[pattern]) if pattern in overrides else rules)
            for pattern, rules in mappings.overrides
        ),
    )
    return replace(now, mappings=changed), ", ".join(written)


def _shown(rules: Mapping[str, tuple[str, ...] | None]) -> str:
    return "{" + ", ".join(f"{name}: {show_axes(axes) if axes else 'null'}" for name, axes in rules.items()) + "}"
