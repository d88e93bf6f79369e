"""`plan_sharding`: abstract leaves + mappings + mesh sizes → a `ShardingPlan`, by arithmetic alone.

A plan says for every leaf which `PartitionSpec` it gets, what that costs on a device, over which mesh axes it stays
replicated, and why. Rule violations are *findings*, collected and not raised, so that a preflight can show all of them
with the numbers; `plan.check()` raises them together for a run. The rules: conflict and divisibility (`placement`), and
replication (`replication`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from haliax_ext.abstract import Leaf
from haliax_ext.errors import ShardingError, gib, nearest, raise_all
from haliax_ext.mapping import Mappings, path_matches
from haliax_ext.meshspec import MeshSpec
from haliax_ext.placement import Finding as Finding
from haliax_ext.placement import LeafPlan as LeafPlan
from haliax_ext.placement import OnConflict, place
from haliax_ext.replication import replication_findings


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """Every leaf's place on a mesh, and what is wrong with it.

    Attributes:
        mesh: mesh axis names and sizes.
        mappings: the rules that were applied.
        leaves: one plan for each leaf, in the order they were given.
        findings: errors and notes, in the order of the leaves.
        hbm_bytes: memory of one device that replication was judged by; None if unknown.
    """

    mesh: MeshSpec
    mappings: Mappings
    leaves: tuple[LeafPlan, ...]
    findings: tuple[Finding, ...]
    hbm_bytes: int | None = None

    @cached_property
    def by_path(self) -> dict[str, LeafPlan]:
        """The leaves' plans by path."""
        return {plan.leaf.path: plan for plan in self.leaves}

    def spec(self, path: str) -> PartitionSpec:
        """The `PartitionSpec` of the leaf at `path`."""
        assert path in self.by_path, f"no leaf {path} in this plan (near: {nearest(path, self.by_path)})"
        return self.by_path[path].spec

    def sharding(self, path: str, mesh: Mesh) -> NamedSharding:
        """The sharding of the leaf at `path` on a mesh built from `self.mesh`."""
        return NamedSharding(mesh, self.spec(path))

    @property
    def total_bytes(self) -> int:
        """Bytes of all leaves, each counted once."""
        return sum(plan.leaf.nbytes for plan in self.leaves)

    @property
    def bytes_per_device(self) -> int:
        """Bytes of all leaves on one device."""
        return sum(plan.bytes_per_device for plan in self.leaves)

    @property
    def replicated_bytes(self) -> int:
        """Bytes on each device that a plan over all mesh axes would not need."""
        # Rounded up leaf by leaf: a leaf with fewer elements than devices still takes one.
        return self.bytes_per_device - sum(-(-plan.leaf.nbytes // self.mesh.size) for plan in self.leaves)

    @property
    def errors(self) -> tuple[ShardingError, ...]:
        """What `check` raises: one error for each mistake, with the other arrays it shows in."""
        mistakes: dict[tuple[str, str], list[Finding]] = {}
        for n, finding in enumerate(self.findings):
            if finding.error is not None:
                # A finding without a cause is a mistake of its own; its number keeps it apart.
                mistakes.setdefault((finding.kind, finding.cause or f"its own {n}"), []).append(finding)
        return tuple(_folded(findings) for findings in mistakes.values())

    @property
    def notes(self) -> tuple[Finding, ...]:
        """The findings that stop nothing."""
        return tuple(f for f in self.findings if f.severity == "note")

    def check(self) -> "ShardingPlan":
        """Returns the plan, or raises everything that is wrong with it."""
        raise_all(self.errors)
        return self

    def __str__(self) -> str:
        return (
            f"{len(self.leaves)} arrays, {gib(self.total_bytes)}, on mesh {self.mesh}: {gib(self.bytes_per_device)} "
            f"on each device, {gib(self.replicated_bytes)} of it replicated; {len(self.errors)} errors, "
            f"{len(self.notes)} notes"
        )


def plan_sharding(
    leaves: Iterable[Leaf],
    mappings: Mappings,
    mesh: MeshSpec,
    *,
    hbm_bytes: int | None = None,
    on_conflict: OnConflict | None = None,
) -> ShardingPlan:
    """Plans where every leaf goes under the parameter mapping (with overrides).

    Args:
        leaves: what to place.
        mappings: `params` and `overrides` decide; `allow_replicated` and `declared` excuse replication.
        mesh: mesh axis names and sizes.
        hbm_bytes: memory of one device; without it replication is reported, never an error.
        on_conflict: what happens when two axes of an array want the same mesh axis: an error, or the axis that comes
            first in the mapping keeps it. None: as `mappings` says.
    """
    leaves = tuple(leaves)
    plans: list[LeafPlan] = []
    findings: list[Finding] = []
    for leaf in leaves:
        plan, leaf_findings = place(
            leaf,
            mappings.params_at(leaf.path),
            mesh,
            on_conflict=on_conflict or mappings.on_conflict,
            overrides=[pattern for pattern, _ in mappings.overrides_at(leaf.path)],
        )
        plans.append(plan)
        findings += leaf_findings
    findings += replication_findings(plans, mappings, mesh, hbm_bytes)
    findings += _idle_overrides(leaves, mappings)
    return ShardingPlan(
        mesh=mesh, mappings=mappings, leaves=tuple(plans), findings=tuple(findings), hbm_bytes=hbm_bytes
    )


def _folded(findings: Sequence[Finding]) -> ShardingError:
    """The error of the first finding; the arrays of the others are named in it."""
    error = findings[0].error
    assert error is not None
    others = list(dict.fromkeys(f.path for f in findings[1:]))
    if not others:
        return error
    named = ", ".join(others[:3]) + (", …" if len(others) > 3 else "")
    # One mistake in a mapping shows in every layer: the message names three of the arrays and counts the rest.
    likewise = f"; likewise in {len(others)} more array{'s' if len(others) > 1 else ''}: {named}"
    return type(error)(error.problem + likewise, path=error.path, suggestion=error.suggestion)


def _idle_overrides(leaves: tuple[Leaf, ...], mappings: Mappings) -> list[Finding]:
    return [
        Finding(
            kind="override",
            severity="note",
            path=pattern,
            message=f"overrides[{pattern!r}] matches no array of this model",
        )
        for pattern, _ in mappings.overrides
        if not any(path_matches(pattern, leaf.path) for leaf in leaves)
    ]
