"""`plan_sharding`: abstract leaves + mappings + mesh sizes → a `ShardingPlan`, by arithmetic alone.

A plan says for every leaf which `PartitionSpec` it gets, what that costs on a device, over which mesh axes it stays
whole, and why. Rule violations are *findings*, collected and not raised, so that a preflight can show all of them with
the numbers; `plan.check()` raises them together for a run. The rules:

1. Conflict: two logical axes of one array may not go to the same mesh axis.
2. Divisibility: an axis size must be a multiple of the mesh axes it is mapped to.
3. Replication: an array of more than 0.1 % of a chip's memory that stays whole over a mesh axis is reported with the
   bytes it wastes; it is an error when that mesh axis shards another parameter of the model and the array's share on
   a chip exceeds 5 % of its memory, unless `allow_replicated` lists its path or the axis, or the mapping declares it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from haliax_ext.abstract import Leaf
from haliax_ext.divisibility import describe_indivisible
from haliax_ext.errors import (
    AxisCollisionError,
    IndivisibleError,
    ReplicationError,
    ShardingError,
    named_shape,
    raise_all,
)
from haliax_ext.mapping import AxisMapping, Mappings, path_matches
from haliax_ext.meshspec import MeshAxes, MeshSpec

REPORT_SHARE = 0.001
"""A replicated array above this share of a chip's memory is reported."""
ERROR_SHARE = 0.05
"""A replicated array above this share of a chip's memory is an error (rule 3)."""
REPORT_BYTES = 1 << 20
"""What is reported where the chip's memory is unknown (CPU devices)."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something the plan noticed: an error that stops a run, or a fact worth printing.

    Attributes:
        kind: which rule.
        severity: `error` stops a run.
        path: the leaf.
        message: the whole story in axis names.
        nbytes: bytes wasted on each device, for replication.
        error: the exception a run would raise, for severity `error`.
    """

    kind: Literal["collision", "indivisible", "replicated"]
    severity: Literal["error", "note"]
    path: str
    message: str
    nbytes: int = 0
    error: ShardingError | None = None


@dataclass(frozen=True, kw_only=True)
class LeafPlan:
    """Where one leaf goes.

    Attributes:
        leaf: path, axes and dtype.
        spec: its `PartitionSpec`.
        shard_shape: the shape of one device's piece.
        replicated_over: mesh axes of size > 1 over which it stays whole.
        reason: the rules that led here, in words.
    """

    leaf: Leaf
    spec: PartitionSpec
    shard_shape: tuple[int, ...]
    replicated_over: tuple[str, ...]
    reason: str

    @property
    def bytes_per_device(self) -> int:
        return math.prod(self.shard_shape) * self.leaf.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """Every leaf's place on a mesh, and what is wrong with it."""

    mesh: MeshSpec
    mappings: Mappings
    leaves: tuple[LeafPlan, ...]
    findings: tuple[Finding, ...]

    @cached_property
    def by_path(self) -> dict[str, LeafPlan]:
        return {plan.leaf.path: plan for plan in self.leaves}

    def spec(self, path: str) -> PartitionSpec:
        return self.by_path[path].spec

    def sharding(self, path: str, mesh: Mesh) -> NamedSharding:
        return NamedSharding(mesh, self.spec(path))

    @property
    def total_bytes(self) -> int:
        """Bytes of all leaves, each counted once."""
        return sum(plan.leaf.nbytes for plan in self.leaves)

    @property
    def bytes_per_device(self) -> int:
        return sum(plan.bytes_per_device for plan in self.leaves)

    @property
    def replicated_bytes(self) -> int:
        """Bytes on each device that a plan over all mesh axes would not need."""
        return self.bytes_per_device - sum(-(-plan.leaf.nbytes // self.mesh.size) for plan in self.leaves)

    @property
    def errors(self) -> tuple[ShardingError, ...]:
        return tuple(f.error for f in self.findings if f.error is not None)

    def check(self) -> "ShardingPlan":
        """Returns the plan, or raises everything that is wrong with it."""
        raise_all(self.errors)
        return self


def plan_sharding(
    leaves: Iterable[Leaf],
    mappings: Mappings,
    mesh: MeshSpec,
    *,
    hbm_bytes: int | None = None,
    on_conflict: Literal["error", "first_wins"] = "error",
) -> ShardingPlan:
    """Plans where every leaf goes under the parameter mapping (with overrides).

    Args:
        leaves: what to place.
        mappings: `params` and `overrides` decide; `allow_replicated` and `declared` excuse replication.
        mesh: mesh axis names and sizes.
        hbm_bytes: memory of one chip; without it replication is reported, never an error.
        on_conflict: what happens when two axes of an array want the same mesh axis: an error, or the axis that comes
            first in the mapping keeps it.
    """
    placed = [_place(leaf, mappings.params_at(leaf.path), mesh, on_conflict) for leaf in leaves]
    plans = tuple(plan for plan, _ in placed)
    findings = [finding for _, found in placed for finding in found]
    findings += _replication(plans, mappings, mesh, hbm_bytes)
    return ShardingPlan(mesh=mesh, mappings=mappings, leaves=plans, findings=tuple(findings))


def _place(leaf: Leaf, mapping: AxisMapping, mesh: MeshSpec, on_conflict: str) -> tuple[LeafPlan, list[Finding]]:
    taken: dict[str, str] = {}
    chosen: dict[str, tuple[str, ...]] = {}
    findings: list[Finding] = []
    # Mapping order decides who comes first where conflicts are allowed; otherwise the order has no meaning.
    for name in sorted(leaf.names, key=lambda n: (n not in mapping, list(mapping).index(n) if n in mapping else 0)):
        kept = []
        for axis in mapping.mesh_axes(name):
            if axis not in taken:
                taken[axis] = name
                kept.append(axis)
            elif on_conflict == "error":
                findings.append(_collision(leaf, taken[axis], name, axis, mapping))
        chosen[name] = tuple(kept)

    entries: list[MeshAxes | None] = []
    shard_shape, reasons = [], []
    for name, size in leaf.axes:
        axes = chosen[name]
        ways = mesh.ways(axes)
        if size % ways:
            findings.append(_indivisible(leaf, name, size, axes, mesh))
        entries.append(None if not axes else axes[0] if len(axes) == 1 else axes)
        shard_shape.append(-(-size // ways))
        if axes:
            reasons.append(f"{name} → {'×'.join(axes)} ({size}/{ways})")
    # A mesh axis of size 1 shards nothing and replicates nothing.
    whole_over = tuple(name for name, size in mesh.axes if size > 1 and name not in taken)
    reason = ", ".join(reasons) or ("no axis of it is mapped" if leaf.axes else "a scalar")
    while entries and entries[-1] is None:
        entries.pop()
    plan = LeafPlan(
        leaf=leaf,
        spec=PartitionSpec(*entries),
        shard_shape=tuple(shard_shape),
        replicated_over=whole_over,
        reason=reason,
    )
    return plan, findings


def _collision(leaf: Leaf, first: str, second: str, axis: str, mapping: AxisMapping) -> Finding:
    error = AxisCollisionError(
        f"{leaf.path} {named_shape(leaf.axes)}: axes {first!r} and {second!r} are both mapped to mesh axis {axis!r} "
        f"(rules {first} → {_show(mapping.mesh_axes(first))} and {second} → {_show(mapping.mesh_axes(second))}); "
        f"a mesh axis can cut an array only once",
        path=leaf.path,
        suggestion=f'map one of them elsewhere, or unmap it for this array: overrides: {{"{leaf.path}": '
        f"{{{second}: null}}}}",
    )
    return Finding(kind="collision", severity="error", path=leaf.path, message=str(error), error=error)


def _indivisible(leaf: Leaf, name: str, size: int, axes: Sequence[str], mesh: MeshSpec) -> Finding:
    problem, suggestion = describe_indivisible(name, size, axes, mesh)
    error = IndivisibleError(f"{leaf.path} {named_shape(leaf.axes)}: {problem}", path=leaf.path, suggestion=suggestion)
    return Finding(kind="indivisible", severity="error", path=leaf.path, message=str(error), error=error)


def _show(axes: Sequence[str]) -> str:
    return axes[0] if len(axes) == 1 else f"[{', '.join(axes)}]"


def gib(nbytes: float) -> str:
    """Formats bytes with a binary unit and three significant digits or two decimals."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes:.0f} B"


def _replication(plans: Sequence[LeafPlan], mappings: Mappings, mesh: MeshSpec, hbm_bytes: int | None) -> list[Finding]:
    # Only mesh axes that some parameter is cut over count as a fault: the others are data parallelism.
    sharding_axes = {axis for plan in plans for entry in plan.spec for axis in _flat(entry)}
    threshold = REPORT_BYTES if hbm_bytes is None else REPORT_SHARE * hbm_bytes
    findings = []
    for plan in plans:
        share = plan.bytes_per_device
        if not plan.replicated_over or share <= threshold:
            continue
        path = plan.leaf.path
        wasted = share - -(-share // mesh.ways(plan.replicated_over))
        declared = mappings.declared_replication(plan.leaf.names)
        faults = [
            axis
            for axis in plan.replicated_over
            if axis in sharding_axes and axis not in declared and axis not in mappings.allow_replicated
        ]
        accepted = any(path_matches(pattern, path) for pattern in mappings.allow_replicated)
        over = " and ".join(f"{axis} ({mesh.shape[axis]})" for axis in plan.replicated_over)
        message = (
            f"{path} {named_shape(plan.leaf.axes)} {plan.leaf.dtype.name} stays whole over {over}: "
            f"{gib(share)} on each chip, {gib(wasted)} of it a copy"
        )
        if hbm_bytes is not None and faults and not accepted and share > ERROR_SHARE * hbm_bytes:
            error = ReplicationError(
                f"{message}; that is {share / hbm_bytes:.1%} of a chip's {gib(hbm_bytes)}, "
                f"and mesh axis {' and '.join(faults)} shards other parameters of this model",
                path=path,
                suggestion=_mapping_that_shares(plan, faults, mesh),
            )
            findings.append(
                Finding(
                    kind="replicated",
                    severity="error",
                    path=path,
                    message=str(error),
                    nbytes=wasted,
                    error=error,
                )
            )
        else:
            why = _excuse(plan, declared, accepted, sharding_axes)
            findings.append(
                Finding(kind="replicated", severity="note", path=path, message=f"{message} ({why})", nbytes=wasted)
            )
    return findings


def _excuse(plan: LeafPlan, declared: frozenset[str], accepted: bool, sharding_axes: set[str]) -> str:
    if accepted:
        return "accepted by allow_replicated"
    if declared & set(plan.replicated_over):
        return "declared by the mapping of heads: query groups are cut further than K/V can be"
    if not sharding_axes & set(plan.replicated_over):
        return "no parameter is cut over it: data parallelism"
    return "small"


def _mapping_that_shares(plan: LeafPlan, axes: Sequence[str], mesh: MeshSpec) -> str:
    used = {name for (name, _), entry in zip(plan.leaf.axes, _padded(plan), strict=True) if entry is not None}
    ways = mesh.ways(tuple(axes))
    free = [name for name, size in plan.leaf.axes if name not in used and size % ways == 0 and name != "layers"]
    accept = f'or accept it: allow_replicated: ["{plan.leaf.path}"]'
    if not free:
        return f"no free axis of it divides by {ways}; {accept}"
    target = _show(tuple(axes))
    return f"map one of its axes there, e.g. {{{free[0]}: {target}}}, {accept}"


def _padded(plan: LeafPlan) -> list[MeshAxes | None]:
    return [*plan.spec, *[None] * (len(plan.leaf.axes) - len(plan.spec))]


def _flat(entry: MeshAxes | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
