"""Replica groups in every printed form, against groups made by hand from mesh coordinates."""

import itertools

import numpy as np
import pytest

from haliax_ext.hlo.replica_groups import AxisSpan, inner_mesh, network, pair_spans, parse_groups, parse_pairs, spans
from haliax_ext.meshspec import MeshSpec

pytestmark = pytest.mark.quick

MESH = MeshSpec.of(data=32, model=4)


def by_hand(mesh: MeshSpec, *varying: str) -> set[frozenset[int]]:
    """All sets of positions that agree in every axis but `varying`, positions counted in row-major order."""
    groups: dict[tuple, set[int]] = {}
    for position, coordinates in enumerate(itertools.product(*(range(size) for _, size in mesh.axes))):
        fixed = tuple(c for c, (name, _) in zip(coordinates, mesh.axes, strict=True) if name not in varying)
        groups.setdefault(fixed, set()).add(position)
    return {frozenset(group) for group in groups.values()}


def as_sets(groups: np.ndarray) -> set[frozenset[int]]:
    return {frozenset(int(x) for x in group) for group in groups}


@pytest.mark.parametrize(
    ("printed", "axes"),
    [
        ("replica_groups=[32,4]<=[128], dimensions={2}", ("model",)),
        ("replica_groups=[4,32]<=[32,4]T(1,0), dimensions={0}", ("data",)),
        ("replica_groups=mesh['axis_0'=32,'axis_1'=1,'axis_2'=4] {'axis_2'}, use_global_device_ids=true", ("model",)),
        ("replica_groups=mesh['axis_0'=32,'axis_1'=4,'axis_2'=1] {'axis_0'}, dimensions={1}", ("data",)),
        ("replica_groups=mesh['axis_0'=32,'axis_1'=4] {'axis_0','axis_1'}, to_apply=%add", ("data", "model")),
        ("replica_groups={}, to_apply=%add", ("data", "model")),
    ],
)
def test_printed_groups_are_those_of_the_mesh_axes(printed, axes):
    groups = parse_groups(f", channel_id=3, {printed}", MESH.size)
    assert as_sets(groups) == by_hand(MESH, *axes)
    assert spans(groups, MESH) == tuple(AxisSpan(a, MESH.shape[a], MESH.shape[a]) for a in axes)


def test_lists():
    mesh = MeshSpec.of(data=4, model=2)
    groups = parse_groups(", replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={1}", 8)
    assert as_sets(groups) == by_hand(mesh, "data")
    assert parse_groups(", replica_groups={{0,1,2},{3,4}}", 8) is None


@pytest.mark.parametrize(
    ("printed", "positions"),
    [
        # Every fourth data position: the slow part of `data` (8 of 32 = 8 × 4).
        ("replica_groups=[16,8]<=[8,4,4]T(2,1,0)", [16 * i for i in range(8)]),
        # Neighbouring data positions, through a permuted mesh of the compiler's own and a part of its axis.
        (
            "replica_groups=mesh['axis_0'=32,'axis_1'=1,'axis_2'=4], device_ids=([4,8,4]T(2,1,0)) {'axis_0':(4)8}",
            [4 * i for i in range(8)],
        ),
    ],
)
def test_a_part_of_a_mesh_axis(printed, positions):
    groups = parse_groups(printed, MESH.size)
    assert groups.shape == (16, 8)
    assert frozenset(positions) in as_sets(groups)
    assert sorted(groups.ravel()) == list(range(128))
    assert spans(groups, MESH) == (AxisSpan("data", 8, 32),)
    assert str(AxisSpan("data", 8, 32)) == "data[8/32]"


def test_groups_that_are_no_block_of_the_mesh_are_not_named():
    mesh = MeshSpec.of(data=4, model=2)
    assert spans(np.array([[0, 3], [1, 2], [4, 7], [5, 6]]), mesh) is None
    assert network(None, mesh) == "unknown"
    # Blocks of different shapes.
    assert spans(np.array([[0, 1], [2, 4], [3, 5], [6, 7]]), mesh) is None


def test_permutes_name_the_axis_they_move_along():
    ring = ",".join("{%d,%d}" % (4 * d + m, 4 * ((d + 1) % 32) + m) for d in range(32) for m in range(4))  # noqa: UP031
    pairs = parse_pairs(f", channel_id=9, source_target_pairs={{{ring}}}, metadata={{}}")
    assert pairs.shape == (128, 2)
    assert pair_spans(pairs, MESH) == (AxisSpan("data", 32, 32),)
    assert parse_pairs(", source_target_pairs={}") is None


def test_slices():
    mesh = MeshSpec(axes=(("slices", 2), ("data", 2), ("model", 2)), dcn=("slices",))
    assert inner_mesh(mesh, 8) == mesh
    assert inner_mesh(mesh, 4).names == ("data", "model")
    assert inner_mesh(mesh, 3) is None
    across = spans(np.array([[0, 4], [1, 5], [2, 6], [3, 7]]), mesh)
    assert network(across, mesh) == "dcn"
    assert network(spans(np.array([[0, 2], [1, 3]]), inner_mesh(mesh, 4)), mesh) == "ici"
