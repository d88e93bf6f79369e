"""Replicas in parts: every device gives another one, nothing moves between devices, and the whole stays as it was."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from haliax_ext.abstract import Leaf
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import plan_sharding
from haliax_ext.replica_slices import replica_slices_plan, replica_slices_program

pytestmark = pytest.mark.quick

F32 = np.dtype(np.float32)
MESH = MeshSpec.of(replica=2, data=2, model=2)
LEAVES = (
    Leaf("whole", (("layers", 3), ("embed", 16)), F32),
    Leaf("cut", (("mlp", 8), ("embed", 12)), F32),
    Leaf("odd", (("rows", 6), ("columns", 5)), F32),
    Leaf("indivisible", (("rows", 7), ("columns", 5)), F32),
    Leaf("everywhere", (("mlp", 8), ("vocab", 8)), F32),
    Leaf("scalar", (), F32),
)
PARAMS = AxisMapping({"mlp": "model", "vocab": ("replica", "data")})


def planned():
    return plan_sharding(LEAVES, Mappings(params=PARAMS), MESH)


def test_each_leaf_is_cut_over_as_many_devices_as_go():
    found = {
        each.leaf.path: (each.spec, each.shard_shape) for each in replica_slices_plan(planned(), min_bytes=4).leaves
    }
    assert found == {
        "whole": (PartitionSpec(None, ("replica", "data", "model")), (3, 2)),
        "cut": (PartitionSpec(("model", "replica", "data"), None), (1, 12)),
        # 6 by 8 or by 4 leaves a rest: one mesh axis, the first.
        "odd": (PartitionSpec(("replica",), None), (3, 5)),
    }


@pytest.mark.parametrize(("least", "ways"), [(24, 8), (25, 4), (49, 2), (97, 1)])
def test_no_part_is_smaller_than_asked(least, ways):
    found = replica_slices_plan(planned(), min_bytes=least).by_path
    assert ("whole" in found) == (ways > 1)
    if ways > 1:
        assert found["whole"].shard_shape == (3, 16 // ways)


def test_nothing_to_cut_is_no_program():
    assert replica_slices_program(plan_sharding(LEAVES[4:], Mappings(params=PARAMS), MESH)) is None


def test_every_device_gives_its_own_part_and_nothing_moves():
    plan = planned()
    program = replica_slices_program(plan, min_bytes=4)
    mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(2, 2, 2), ("replica", "data", "model"))
    values = {leaf.path: np.arange(np.prod(leaf.shape), dtype=F32).reshape(leaf.shape) for leaf in LEAVES[:3]}
    given = {path: jax.device_put(x, NamedSharding(mesh, plan.spec(path))) for path, x in values.items()}
    found = program.jit(mesh)(given)
    assert all(not x.is_deleted() for x in given.values())
    for path, x in found.items():
        np.testing.assert_array_equal(np.asarray(x), values[path])
        # What a device gives lies in what it held: it had nothing to ask of the others.
        held = {shard.device: np.asarray(shard.data).ravel() for shard in given[path].addressable_shards}
        for shard in x.addressable_shards:
            assert set(np.asarray(shard.data).ravel()) <= set(held[shard.device])
    assert {s.replica_id for s in found["whole"].addressable_shards} == {0}
    text = program.lower(mesh).compile().as_text()
    assert not any(word in text for word in ("all-gather", "all-to-all", "collective-permute", "all-reduce"))
