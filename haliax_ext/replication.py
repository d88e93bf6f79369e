"""Rule 3: what is replicated on devices that could share it.

An array larger than 0.1 % of a device's memory that is replicated over a mesh axis is reported with the bytes it
repeats. It is an error when that mesh axis shards another parameter of the model (so the mesh axis is meant for
sharding) and the array's share on a device exceeds 5 % of its memory, unless the mapping *declares* the replication
(K/V heads over the mesh axis of query groups) or the user accepts it (`allow_replicated`). Replication over mesh axes
that shard no parameter at all is data parallelism: reported, never an error. Where the memory of a device is unknown
(CPU) nothing is an error.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

from haliax_ext.errors import ReplicationError, gib, named_shape
from haliax_ext.mapping import Mappings, path_matches
from haliax_ext.meshspec import MeshSpec
from haliax_ext.placement import Finding, LeafPlan, place, show_axes

REPORT_SHARE = 0.001
"""An array above this share of a device's memory is reported where it is replicated."""
ERROR_SHARE = 0.05
"""A replicated array above this share of a device's memory is an error."""
REPORT_BYTES = 1 << 20
"""Bytes of a replicated array that is reported where a device's memory is unknown."""


def replication_findings(
    plans: Sequence[LeafPlan], mappings: Mappings, mesh: MeshSpec, hbm_bytes: int | None
) -> list[Finding]:
    """One finding for each leaf that is large enough and is replicated over a mesh axis."""
    # Mesh axes that shard at least one parameter; replication over any other one is data parallelism.
    cutting = {axis for plan in plans for axes in plan.mesh_axes for axis in axes}
    threshold = REPORT_BYTES if hbm_bytes is None else REPORT_SHARE * hbm_bytes
    return [
        _judge(plan, plans, mappings, mesh, cutting, hbm_bytes)
        for plan in plans
        if plan.replicated_over and plan.leaf.nbytes > threshold
    ]


def _judge(
    plan: LeafPlan,
    plans: Sequence[LeafPlan],
    mappings: Mappings,
    mesh: MeshSpec,
    cutting: set[str],
    hbm_bytes: int | None,
) -> Finding:
    path, share = plan.leaf.path, plan.bytes_per_device
    # The share that a device would have if these mesh axes sharded the leaf, rounded up, is not wasted.
    wasted = share - -(-share // mesh.ways(plan.replicated_over))
    over = " × ".join(f"{axis} {mesh.shape[axis]}" for axis in plan.replicated_over)
    message = (
        f"{path} {named_shape(plan.leaf.axes)} {plan.leaf.dtype.name} is replicated over {over}: "
        f"{gib(share)} on each device, {gib(wasted)} of it redundant"
    )
    excuses = {axis: _excuse(plan, axis, mappings, cutting) for axis in plan.replicated_over}
    faults = [axis for axis, excuse in excuses.items() if excuse is None]
    # An error needs all three: no excuse, a known memory size, and a large share of it.
    if not faults or hbm_bytes is None or share <= ERROR_SHARE * hbm_bytes:
        if hbm_bytes is None:
            unexcused = "not checked, because the memory of a device is unknown"
        else:
            unexcused = f"{share / hbm_bytes:.2%} of a device's memory, below {ERROR_SHARE:.0%}"
        why = "; ".join(f"{axis}: {excuse or unexcused}" for axis, excuse in excuses.items())
        return Finding(kind="replicated", severity="note", path=path, message=f"{message} ({why})", nbytes=wasted)
    error = ReplicationError(
        f"{message}; that is {share / hbm_bytes:.1%} of a device's {gib(hbm_bytes)}, "
        f"and {_cuts(faults)} other parameters of this model",
        path=path,
        suggestion=_way_out(plan, faults, plans, mappings, mesh),
    )
    return Finding(kind="replicated", severity="error", path=path, message=str(error), nbytes=wasted, error=error)


def _excuse(plan: LeafPlan, axis: str, mappings: Mappings, cutting: set[str]) -> str | None:
    """Why it is no fault that the leaf is replicated over `axis`; None if it is one."""
    if axis not in cutting:
        return "it shards no parameter (data parallelism)"
    if axis in mappings.allow_replicated or any(path_matches(p, plan.leaf.path) for p in mappings.allow_replicated):
        return "accepted by allow_replicated"
    for rule in mappings.declared:
        if rule.applies(plan.leaf.names) and axis in rule.mesh_axes:
            return f"declared, {rule.reason}"
    return None


def _cuts(mesh_axes: Sequence[str]) -> str:
    return f"mesh axis {mesh_axes[0]} shards" if len(mesh_axes) == 1 else f"mesh axes {' and '.join(mesh_axes)} shard"


def _way_out(
    plan: LeafPlan, faults: Sequence[str], plans: Sequence[LeafPlan], mappings: Mappings, mesh: MeshSpec
) -> str:
    """The first rules that shard the leaf over `faults`, tried out: for all arrays if that works, else for this one."""
    path = plan.leaf.path

    def legal(other: LeafPlan, rules: Mapping[str, tuple[str, ...]]) -> bool:
        mapping = mappings.params_at(other.leaf.path).merged(rules)
        return all(f.severity != "error" for f in place(other.leaf, mapping, mesh)[1])

    accept = f'or accept it: allow_replicated: ["{path}"]'
    # A rule is suggested for the whole mapping only if it breaks no other parameter.
    fallback = None
    for rules in _rules(plan, faults, mesh):
        if not legal(plan, rules):
            continue
        shown = "{" + ", ".join(f"{name}: {show_axes(axes)}" for name, axes in rules.items()) + "}"
        if all(legal(other, rules) for other in plans if rules.keys() & set(other.leaf.names)):
            return f"shard it, e.g. {shown}, {accept}"
        fallback = fallback or f'shard it, for this array alone: overrides: {{"{path}": {shown}}}, {accept}'
    return fallback or f"none of its axes is divisible by {mesh.ways(tuple(faults))}; {accept}"


def _rules(plan: LeafPlan, faults: Sequence[str], mesh: MeshSpec) -> Iterator[dict[str, tuple[str, ...]]]:
    """Rules that divide: all mesh axes on one axis (whole ones first), then each mesh axis on an axis of its own.

    The axis of a stack of layers is never proposed: a scan visits one layer at a time.
    """
    pairs = zip(plan.leaf.axes, plan.mesh_axes, strict=True)
    axes = {name: (size, cut) for (name, size), cut in pairs if name != "layers" and not name.startswith("_")}
    # Axes that are not sharded yet come first: the suggestion then changes no existing rule.
    for name in sorted(axes, key=lambda n: len(axes[n][1])):
        size, cut = axes[name]
        if size % mesh.ways((*cut, *faults)) == 0:
            yield {name: (*cut, *faults)}
    whole = [name for name, (_, cut) in axes.items() if not cut]
    for names in itertools.permutations(whole, len(faults)) if len(faults) > 1 else ():
        if all(axes[name][0] % mesh.shape[fault] == 0 for name, fault in zip(names, faults, strict=True)):
            yield {name: (fault,) for name, fault in zip(names, faults, strict=True)}
