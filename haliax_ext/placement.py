"""Places one array on a mesh by its mapping, under the two rules that concern a single array.

1. Conflict: two logical axes of one array may not go to the same mesh axis.
2. Divisibility: an axis size must be a multiple of the mesh axes it is mapped to.

`place` never raises: it returns *findings* beside the `LeafPlan`, so that a plan can show all of them. Parameters and
activations obey the same rules; only the suggested fix differs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jax.sharding import PartitionSpec

from haliax_ext.abstract import Leaf
from haliax_ext.divisibility import describe_indivisible
from haliax_ext.errors import AxisCollisionError, IndivisibleError, ShardingError, named_shape
from haliax_ext.mapping import AxisMapping
from haliax_ext.meshspec import MeshAxes, MeshSpec

OnConflict = Literal["error", "first_wins"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something a plan noticed: an error that stops a run, or a fact worth printing.

    Attributes:
        kind: which rule.
        severity: `error` stops a run.
        path: the leaf, or the pattern of an override.
        message: the whole story in axis names.
        nbytes: bytes repeated on each device, for replication.
        error: the exception a run would raise, for severity `error`.
        cause: findings of one kind and cause are one mistake that shows in several arrays.
    """

    kind: Literal["collision", "indivisible", "replicated", "override"]
    severity: Literal["error", "note"]
    path: str
    message: str
    nbytes: int = 0
    error: ShardingError | None = None
    cause: str | None = None


@dataclass(frozen=True, kw_only=True)
class LeafPlan:
    """Where one leaf goes.

    Attributes:
        leaf: path, axes and dtype.
        spec: its `PartitionSpec`.
        shard_shape: the shape of one device's piece.
        replicated_over: mesh axes of size > 1 over which it is replicated.
        reason: the rules that led here, in words.
    """

    leaf: Leaf
    spec: PartitionSpec
    shard_shape: tuple[int, ...]
    replicated_over: tuple[str, ...]
    reason: str

    @property
    def bytes_per_device(self) -> int:
        """Bytes of one device's shard."""
        return math.prod(self.shard_shape) * self.leaf.dtype.itemsize

    @property
    def mesh_axes(self) -> tuple[tuple[str, ...], ...]:
        """The mesh axes of each logical axis, `()` if it is not sharded."""
        padded = (*self.spec, *(None,) * (len(self.leaf.axes) - len(self.spec)))
        return tuple(flat(entry) for entry in padded)


def flat(entry: MeshAxes | None) -> tuple[str, ...]:
    """An entry of a `PartitionSpec` as a tuple of mesh axes.

    >>> flat(None), flat("data"), flat(("replica", "data"))
    ((), ('data',), ('replica', 'data'))
    """
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def shard_boxes(shape: Sequence[int], spec: PartitionSpec, mesh: MeshSpec) -> np.ndarray:
    """The box of an array that each device of a mesh holds.

    Args:
        shape: the array's shape; mesh axes divide it.
        spec: its sharding.
        mesh: mesh axis names and sizes.

    Returns:
        Integers `[devices, axes, 2]`: start and stop, devices in the mesh's row-major order.

    >>> shard_boxes((4, 6), PartitionSpec(None, "model"), MeshSpec.of(data=1, model=2)).tolist()
    [[[0, 4], [0, 3]], [[0, 4], [3, 6]]]
    """
    coordinates = dict(zip(mesh.names, np.indices([size for _, size in mesh.axes]), strict=True))
    boxes = np.zeros((mesh.size, len(shape), 2), dtype=np.int64)
    entries = (*spec, *(None,) * (len(shape) - len(spec)))
    for axis, (size, entry) in enumerate(zip(shape, entries, strict=True)):
        number = np.zeros(mesh.size, dtype=np.int64)
        for name in flat(entry):
            # Mesh axes of one entry are the digits, major first, of the number of the shard.
            number = number * mesh.shape[name] + coordinates[name].reshape(-1)
        length, rest = divmod(size, mesh.ways(flat(entry)))
        assert rest == 0, f"{size} over {flat(entry)} of {mesh}"
        boxes[:, axis, 0] = number * length
        boxes[:, axis, 1] = (number + 1) * length
    return boxes


def show_axes(axes: Sequence[str]) -> str:
    """Mesh axes as YAML: `model` or `[model, group]`.

    >>> show_axes(("model", "group"))
    '[model, group]'
    """
    return axes[0] if len(axes) == 1 else f"[{', '.join(axes)}]"


def place(
    leaf: Leaf,
    mapping: AxisMapping,
    mesh: MeshSpec,
    *,
    on_conflict: OnConflict = "error",
    overrides: Sequence[str] = (),
    role: Literal["parameter", "activation"] = "parameter",
) -> tuple[LeafPlan, list[Finding]]:
    """Applies `mapping` to the axes of `leaf`.

    Args:
        leaf: what to place.
        mapping: the rules that apply to it, overrides included.
        mesh: mesh axis names and sizes.
        on_conflict: what happens when two axes want the same mesh axis: an error, or the axis whose rule comes first
            in the mapping keeps it.
        overrides: the patterns that gave `mapping` its present form, for the reason.
        role: decides how messages name the array and what they suggest.
    """
    named = f"{'activation ' if role == 'activation' else ''}{leaf.path} {named_shape(leaf.axes)}"
    order = {name: n for n, name in enumerate(mapping)}
    taken: dict[str, str] = {}
    chosen: dict[str, tuple[str, ...]] = {}
    findings: list[Finding] = []
    # Where conflicts are allowed the mapping's order decides who comes first; otherwise the order has no meaning.
    for name in sorted(leaf.names, key=lambda n: order.get(n, len(order))):
        kept: list[str] = []
        for axis in mapping.mesh_axes(name):
            if axis not in taken:
                taken[axis] = name
                kept.append(axis)
            else:
                findings.append(_collision(leaf, named, (taken[axis], name), axis, mapping, on_conflict, role))
        chosen[name] = tuple(kept)

    entries: list[MeshAxes | None] = []
    shard_shape: list[int] = []
    reasons: list[str] = []
    for name, size in leaf.axes:
        axes = chosen[name]
        ways = mesh.ways(axes)
        if size % ways:
            findings.append(_indivisible(leaf, named, name, size, axes, mesh, role))
        entries.append(None if not axes else axes[0] if len(axes) == 1 else axes)
        # Rounded up, so that a plan with an indivisible axis still states a size; the finding above stops the run.
        shard_shape.append(-(-size // ways))
        if axes:
            reasons.append(f"{name} → {'×'.join(axes)} ({size}/{ways})")
    reason = ", ".join(reasons) or ("none of its axes is mapped" if leaf.axes else "a scalar")
    if overrides:
        reason += f" by overrides[{', '.join(repr(pattern) for pattern in overrides)}]"
    # Trailing None entries mean nothing; without them equal shardings compare equal.
    while entries and entries[-1] is None:
        entries.pop()
    plan = LeafPlan(
        leaf=leaf,
        spec=PartitionSpec(*entries),
        shard_shape=tuple(shard_shape),
        # A mesh axis of size 1 shards nothing and replicates nothing.
        replicated_over=tuple(name for name, size in mesh.axes if size > 1 and name not in taken),
        reason=reason,
    )
    return plan, findings


def _collision(
    leaf: Leaf, named: str, axes: tuple[str, str], axis: str, mapping: AxisMapping, on_conflict: str, role: str
) -> Finding:
    first, second = axes
    rules = " and ".join(f"{name} → {show_axes(mapping.mesh_axes(name))}" for name in axes)
    if on_conflict == "first_wins":
        message = (
            f"{named}: axes {first!r} and {second!r} are both mapped to mesh axis {axis!r} (rules {rules}); "
            f"{first!r} keeps it because its rule comes first (on_conflict: first_wins)"
        )
        return Finding(kind="collision", severity="note", path=leaf.path, message=message)
    if role == "activation":
        way_out = f"map one of them elsewhere, or unmap it for activations: compute_mapping: {{{second}: null}}"
    else:
        way_out = (
            f'map one of them elsewhere, or unmap it for this array: overrides: {{"{leaf.path}": {{{second}: null}}}}'
        )
    error = AxisCollisionError(
        f"{named}: axes {first!r} and {second!r} are both mapped to mesh axis {axis!r} (rules {rules}); "
        "a mesh axis can shard an array only once",
        path=leaf.path,
        suggestion=way_out,
    )
    return Finding(kind="collision", severity="error", path=leaf.path, message=str(error), error=error)


def _indivisible(
    leaf: Leaf, named: str, name: str, size: int, axes: Sequence[str], mesh: MeshSpec, role: str
) -> Finding:
    problem, suggestion = describe_indivisible(name, size, axes, mesh)
    if role == "activation":
        ways = mesh.ways(tuple(axes))
        below, above = size // ways * ways, -(-size // ways) * ways
        sizes = " or ".join(str(n) for n in (below, above) if n)
        suggestion = f"make {name} {sizes}; {suggestion}"
    error = IndivisibleError(f"{named}: {problem}", path=leaf.path, suggestion=suggestion)
    return Finding(kind="indivisible", severity="error", path=leaf.path, message=str(error), error=error, cause=problem)
