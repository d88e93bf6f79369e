"""Which devices talk to each other in a collective, and along which mesh axes.

Compilers print groups in three ways: a list (`{{0,2},{1,3}}`), an iota (`[16,8]<=[8,4,4]T(2,1,0)`: count up, reshape,
transpose, cut into 16 groups of 8) and a small mesh of the compiler's own (`mesh['a'=32,'b'=4] {'a'}`, its devices
possibly permuted). The numbers are positions in the mesh in row-major order, because that is the order in which JAX
hands the devices to the compiler. In a program of several slices they are positions inside one slice, and what crosses
slices is printed as sends and receives of the multi-slice runtime instead.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

from haliax_ext.meshspec import MeshSpec

Network = Literal["ici", "dcn", "unknown"]


@dataclass(frozen=True)
class AxisSpan:
    """The part of one mesh axis that a group covers: `extent` of its `size` positions."""

    axis: str
    extent: int
    size: int

    def __str__(self) -> str:
        return self.axis if self.extent == self.size else f"{self.axis}[{self.extent}/{self.size}]"


def parse_groups(attributes: str, devices: int) -> np.ndarray | None:
    """The groups of a collective as an array [groups, members]; `None` where they are not printed or not regular.

    Args:
        attributes: the instruction's printed attributes.
        devices: number of positions; an empty list of groups means one group of all of them.

    >>> parse_groups("replica_groups=[2,2]<=[2,2]T(1,0)", 4).tolist()
    [[0, 2], [1, 3]]
    """
    # The four forms, in this order: a list of lists, an empty list, an iota with an optional transposition, and the
    # keyword of the compiler's own mesh, whose attributes `_mesh_groups` reads from here on.
    match = re.search(
        r"replica_groups=(\{\{[\d,{} ]*\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|mesh)", attributes
    )
    if not match:
        return None
    text = match.group(1)
    if text == "{}":
        return np.arange(devices)[None, :]
    if text.startswith("{{"):
        rows = [[int(x) for x in row.split(",")] for row in re.findall(r"\{([\d, ]+)\}", text)]
        # Groups of different sizes have no array form; the caller reports them as not recognized.
        return np.array(rows) if len({len(row) for row in rows}) == 1 else None
    if text == "mesh":
        return _mesh_groups(attributes[match.start() :])
    return _iota(text)


def _iota(text: str) -> np.ndarray:
    shape, source, order = re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text).groups()  # type: ignore
    # `[groups, members]<=[source]T(order)`: number the devices row-major in `source`, transpose, and read row-major
    # again; consecutive runs of `members` numbers are the groups.
    ids = np.arange(np.prod(_ints(source))).reshape(_ints(source))
    if order:
        ids = ids.transpose(_ints(order))
    return ids.reshape(_ints(shape))


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _mesh_groups(text: str) -> np.ndarray | None:
    """`mesh['a'=32,'b'=4], device_ids=([4,8,4]T(2,1,0)) {'a'}`, and `'a':(2)4` for a part of an axis."""
    match = re.match(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^ ]*)\))? ?\{([^}]*)\}", text)
    if not match:
        return None
    axes = [(name, int(size)) for name, size in re.findall(r"'([^']*)'=(\d+)", match.group(1))]
    sizes = [size for _, size in axes]
    ids = np.arange(np.prod(sizes))
    # `device_ids` states which device sits at each position of the compiler's mesh; without it they are counted up.
    if order := match.group(2):
        permuted = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", order)
        listed = re.fullmatch(r"\{?([\d,]+)\}?", order)
        if permuted:
            ids = ids.reshape(_ints(permuted.group(1)))
            ids = ids.transpose(_ints(permuted.group(2))) if permuted.group(2) else ids
        elif listed:
            ids = np.array(_ints(listed.group(1)))
        else:
            return None
    ids = ids.reshape(sizes)
    # Cut each partly used axis in three (before, used, after), so that the used part is an axis of its own.
    used = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", match.group(3))
    shape: list[int] = []
    chosen: list[int] = []
    # `'a':(2)4` is the part of axis `a` with 4 positions, behind parts whose sizes multiply to 2; `'a'` alone is all of
    # it.
    extents = {name: (int(pre or 1), int(size) if size else None) for name, pre, size in used}
    for name, size in axes:
        # An axis that is not listed has extent 1: the members of a group share their position on it.
        before, extent = extents.get(name, (1, 1))
        extent = size if extent is None else extent
        shape += [before, extent, size // before // extent]
        chosen.append(len(shape) - 2)
    ids = ids.reshape(shape)
    # The positions outside the chosen parts number the groups, those inside number the members of a group.
    order_axes = [axis for axis in range(ids.ndim) if axis not in chosen] + chosen
    members = int(np.prod([shape[axis] for axis in chosen]))
    return ids.transpose(order_axes).reshape(-1, members)


def parse_pairs(attributes: str) -> np.ndarray | None:
    """Sources and targets of a collective-permute as an array [pairs, 2].

    >>> parse_pairs("source_target_pairs={{0,1},{1,0}}").tolist()
    [[0, 1], [1, 0]]
    """
    match = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes)
    if not match or not match.group(1):
        return None
    return np.array([_ints(pair) for pair in re.findall(r"\{(\d+,\d+)\}", match.group(1))])


def inner_mesh(mesh: MeshSpec, devices: int) -> MeshSpec | None:
    """The mesh that `devices` positions number: the whole one, or one slice's; `None` if neither fits."""
    # Positions count the whole mesh, or one slice of it: a multi-slice module is compiled for the devices of a slice.
    if devices == mesh.size:
        return mesh
    inside = MeshSpec(axes=tuple((name, size) for name, size in mesh.axes if name not in mesh.dcn))
    return inside if inside.size == devices else None


def spans(groups: np.ndarray, mesh: MeshSpec) -> tuple[AxisSpan, ...] | None:
    """The mesh axes along which the members of every group differ; `None` if groups are no block of the mesh.

    A group is a block if its members are all combinations of the positions it covers on each axis.

    >>> [str(span) for span in spans(np.array([[0, 1], [2, 3]]), MeshSpec.of(data=2, model=2))]
    ['model']
    """
    if groups.max(initial=0) >= mesh.size:
        return None
    if not groups.size:
        return None
    coordinates = cast("tuple[np.ndarray, ...]", np.unravel_index(groups, [size for _, size in mesh.axes]))
    # How many different positions each group has on each axis; a pod has up to thousands of groups.
    extents = [1 + np.count_nonzero(np.diff(np.sort(axis, axis=1), axis=1), axis=1) for axis in coordinates]
    # Members are distinct, so a group is a full block exactly if its extents multiply to its size. All groups must
    # have the same extents, or no single AxisSpan describes them.
    if np.any(np.prod(extents, axis=0) != groups.shape[1]) or any(len(set(axis.tolist())) > 1 for axis in extents):
        return None
    return tuple(
        AxisSpan(name, int(extent[0]), size)
        for (name, size), extent in zip(mesh.axes, extents, strict=True)
        if extent[0] > 1
    )


def pair_spans(pairs: np.ndarray, mesh: MeshSpec) -> tuple[AxisSpan, ...] | None:
    """The mesh axes along which a collective-permute moves data."""
    if pairs.max(initial=0) >= mesh.size:
        return None
    shape = [size for _, size in mesh.axes]
    sources, targets = (np.stack(np.unravel_index(pairs[:, side], shape)) for side in (0, 1))
    # An axis counts if any pair crosses it: a permute whose pairs cross two axes uses the links of both.
    moved = (sources != targets).any(axis=1)
    return tuple(AxisSpan(name, size, size) for (name, size), m in zip(mesh.axes, moved, strict=True) if m)


def network(covered: Sequence[AxisSpan] | None, mesh: MeshSpec) -> Network:
    """Whether a group stays inside a slice."""
    if covered is None:
        return "unknown"
    return "dcn" if any(span.axis in mesh.dcn for span in covered) else "ici"
