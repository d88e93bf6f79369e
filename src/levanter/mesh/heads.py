"""`heads` in a mapping means all attention heads, of q, k, v and o alike.

A model has `kv_head` groups of `q_heads_per_group` query heads. For `heads: [A, B, …]`, `kv_head` takes the leading
mesh axes while they divide it and `q_heads_per_group` takes the rest; K and V then are replicated over that rest, which
is declared. A single mesh axis larger than `kv_head` can be *factored* into two (`split_heads: auto`): itself, for
`kv_head`, and `group`, for `q_heads_per_group`. That is the published "duplicate KV heads so that tensor parallelism
can exceed them", without copying a weight.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from haliax_ext.divisibility import divisors
from haliax_ext.errors import IndivisibleError
from haliax_ext.mapping import DeclaredReplication
from haliax_ext.meshspec import MeshSpec
from haliax_ext.placement import show_axes

GROUP_AXIS = "group"
KV_HEAD, Q_PER_GROUP = "kv_head", "q_heads_per_group"


@dataclass(frozen=True, kw_only=True)
class HeadsMapping:
    """What `heads` expands to: rules for `kv_head` and `q_heads_per_group`, and the replication they imply."""

    kv_head: tuple[str, ...]
    q_heads_per_group: tuple[str, ...]

    @property
    def rules(self) -> dict[str, list[str]]:
        """The rules as entries of a mapping: logical axis → mesh axes."""
        return {KV_HEAD: list(self.kv_head), Q_PER_GROUP: list(self.q_heads_per_group)}

    @property
    def declared(self) -> tuple[DeclaredReplication, ...]:
        """The replication of K and V that the rules imply."""
        return declared_by_groups(self.q_heads_per_group)


def declared_by_groups(mesh_axes: Sequence[str]) -> tuple[DeclaredReplication, ...]:
    """K and V have no axis of query heads, so they are replicated over the mesh axes that shard it."""
    if not mesh_axes:
        return ()
    reason = "it shards query heads further than K/V heads can be sharded"
    return (DeclaredReplication(has=KV_HEAD, lacks=Q_PER_GROUP, mesh_axes=tuple(mesh_axes), reason=reason),)


def distribute(mesh_axes: Sequence[str], *, kv_heads: int, q_per_group: int, mesh: MeshSpec) -> HeadsMapping | None:
    """`kv_head` takes the leading mesh axes while they divide it, `q_heads_per_group` the rest; None if it cannot."""
    taken = 0
    while taken < len(mesh_axes) and kv_heads % mesh.ways(tuple(mesh_axes[: taken + 1])) == 0:
        taken += 1
    mine, rest = tuple(mesh_axes[:taken]), tuple(mesh_axes[taken:])
    if q_per_group % mesh.ways(rest):
        return None
    return HeadsMapping(kv_head=mine, q_heads_per_group=rest)


def expand_heads(
    mesh_axes: Sequence[str],
    *,
    kv_heads: int,
    q_per_group: int,
    mesh: MeshSpec,
    sizes: Mapping[str, int] | None = None,
) -> HeadsMapping:
    """Distributes `heads: mesh_axes` over the two head axes of a model.

    Args:
        mesh_axes: what `heads` is mapped to.
        kv_heads: size of `kv_head`.
        q_per_group: size of `q_heads_per_group`.
        mesh: mesh axis sizes.
        sizes: the model's other axis sizes; the suggestion then names only axes that divide.

    Raises:
        IndivisibleError: nothing divides; the message has the nearest factoring and a YAML fragment.
    """
    done = distribute(mesh_axes, kv_heads=kv_heads, q_per_group=q_per_group, mesh=mesh)
    if done is None:
        raise _cannot(mesh_axes, kv_heads, q_per_group, mesh, sizes or {})
    return done


def factor(ways: int, *, kv_heads: int, q_per_group: int) -> tuple[int, int] | None:
    """The factoring `ways = a × b` with `a` dividing the KV heads, as large as possible, and `b` the query groups."""
    for a in reversed(divisors(math.gcd(ways, kv_heads))):
        if q_per_group % (ways // a) == 0:
            return a, ways // a
    return None


def legal_ways(kv_heads: int, q_per_group: int) -> tuple[int, ...]:
    """Every number of pieces that the attention heads can be cut into."""
    return tuple(sorted({a * b for a in divisors(kv_heads) for b in divisors(q_per_group)}))


def _cannot(
    mesh_axes: Sequence[str], kv_heads: int, q_per_group: int, mesh: MeshSpec, sizes: Mapping[str, int]
) -> IndivisibleError:
    ways = mesh.ways(tuple(mesh_axes))
    product = " × ".join(f"{axis} {mesh.shape[axis]}" for axis in mesh_axes)
    problem = (
        f"heads → {show_axes(mesh_axes)}: {kv_heads * q_per_group} attention heads = {kv_heads} {KV_HEAD} × "
        f"{q_per_group} {Q_PER_GROUP} cannot be sharded over {product}" + (f" = {ways}" if len(mesh_axes) > 1 else "")
    )
    reordered = next(
        (
            order
            for order in itertools.permutations(mesh_axes)
            if distribute(order, kv_heads=kv_heads, q_per_group=q_per_group, mesh=mesh) is not None
        ),
        None,
    )
    both = factor(ways, kv_heads=kv_heads, q_per_group=q_per_group)
    if reordered is not None:
        suggestion = f"{KV_HEAD} takes the leading mesh axes; they divide in this order: heads: {show_axes(reordered)}"
    elif both is not None and len(mesh_axes) == 1 and GROUP_AXIS not in mesh.shape:
        name = mesh_axes[0]
        pair = f"[{name}, {GROUP_AXIS}]"
        suggestion = (
            f"factor the mesh axis, {both[0]} for {KV_HEAD} and {both[1]} for {Q_PER_GROUP}:\n"
            f"      mesh:\n"
            f"        axes: {{{name}: {both[0]}, {GROUP_AXIS}: {both[1]}}}\n"
            f"        shared_mapping: {{heads: {pair}, {_others(mesh_axes, pair, mesh, sizes)}}}"
        )
    else:
        legal = ", ".join(map(str, legal_ways(kv_heads, q_per_group)))
        others = _others(mesh_axes, show_axes(mesh_axes), mesh, sizes)
        suggestion = (
            f"the heads of this model can be sharded {legal} ways; choose such a size, "
            f"or leave the heads unsharded and shard the rest:\n"
            f"      mesh:\n"
            f"        shared_mapping: {{{others}, heads: null}}"
        )
    return IndivisibleError(problem, suggestion=suggestion)


def _others(mesh_axes: Sequence[str], shown: str, mesh: MeshSpec, sizes: Mapping[str, int]) -> str:
    """`mlp` and `vocab` mapped like the heads if they divide, else unsharded."""
    ways = mesh.ways(tuple(mesh_axes))
    return ", ".join(f"{name}: {shown if sizes.get(name, ways) % ways == 0 else 'null'}" for name in ("mlp", "vocab"))


def split_axis(
    mesh: MeshSpec, axis: str, *, kv_heads: int, q_per_group: int
) -> tuple[MeshSpec, tuple[int, int]] | None:
    """`mesh` with `axis` factored into `axis` × `group`, or None where it divides already or cannot be factored."""
    ways = mesh.shape[axis]
    both = factor(ways, kv_heads=kv_heads, q_per_group=q_per_group)
    if both is None or 1 in both or GROUP_AXIS in mesh.shape:
        return None
    axes: list[tuple[str, int]] = []
    for name, size in mesh.axes:
        axes += [(name, both[0]), (GROUP_AXIS, both[1])] if name == axis else [(name, size)]
    dcn = (*mesh.dcn, GROUP_AXIS) if axis in mesh.dcn else mesh.dcn
    return MeshSpec(axes=tuple(axes), dcn=dcn, granule=mesh.granule), both


def with_group(rules: Mapping[str, str | Sequence[str] | None], axis: str) -> dict[str, str | list[str] | None]:
    """The rules after `axis` was factored: whatever was mapped to it is mapped to it and `group`."""
    new: dict[str, str | list[str] | None] = {}
    for name, value in rules.items():
        axes = [value] if isinstance(value, str) else list(value or [])
        if name == KV_HEAD or axis not in axes:
            new[name] = value if value is None or isinstance(value, str) else list(value)
        elif name == Q_PER_GROUP:
            new[name] = [GROUP_AXIS if a == axis else a for a in axes]
        else:
            at = axes.index(axis)
            new[name] = [*axes[: at + 1], GROUP_AXIS, *axes[at + 1 :]]
    return new
