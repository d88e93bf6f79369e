"""Activations under the compute and residual mappings, checked before JAX would replicate or fail."""

import pytest
from jax.sharding import PartitionSpec as P

from haliax_ext.activations import Activation, check_activations, plan_activations
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec

pytestmark = pytest.mark.quick

MESH = MeshSpec.of(data=4, model=2)
COMPUTE = {"batch": "data", "mlp": "model", "kv_head": "model", "vocab": "model"}


def activations(batch=8, position=128, kv_head=4):
    tokens = (("batch", batch), ("position", position))
    heads = (("kv_head", kv_head), ("q_heads_per_group", 2), ("head_size", 16))
    return [
        Activation(name="residual", axes=(*tokens, ("embed", 64)), mapping="residual"),
        Activation(name="queries", axes=(*tokens, *heads)),
        Activation(name="mlp hidden", axes=(*tokens, ("mlp", 256))),
        Activation(name="logits", axes=(*tokens, ("vocab", 512))),
    ]


def mappings(compute=None, residual=None):
    return Mappings(compute=AxisMapping(compute or COMPUTE), residual=AxisMapping(residual or {}))


@pytest.mark.parametrize("residual", [{}, {"embed": "model"}, {"position": "model"}])
def test_the_residual_stream_has_its_own_mapping(residual):
    plan = plan_activations(activations(), mappings(residual=residual), MESH).check()
    expected = {(): P("data"), ("embed",): P("data", None, "model"), ("position",): P("data", "model")}
    assert plan.spec("residual") == expected[tuple(residual)]
    assert plan.spec("mlp hidden") == P("data", None, "model")
    assert plan.by_path["logits"].bytes_per_device == 8 * 128 * 512 * 4 // 8


def test_a_batch_that_does_not_divide():
    findings = check_activations(activations(batch=6)[:1], mappings(), MESH)
    assert [f.message for f in findings] == [
        "activation residual [batch 6, position 128, embed 64]: axis 'batch' has size 6, which mesh axis data 4 does "
        "not divide (6 % 4 = 2)\n"
        "  → make batch 4 or 8; nearest mesh sizes that divide 6: 3, 6; or unmap the axis: {batch: null}"
    ]


def test_collision_in_the_residual_stream():
    findings = check_activations(activations(), mappings(residual={"embed": "data"}), MESH)
    assert [f.message for f in findings] == [
        "activation residual [batch 8, position 128, embed 64]: axes 'batch' and 'embed' are both mapped to mesh axis "
        "'data' (rules batch → data and embed → data); a mesh axis can shard an array only once\n"
        "  → map one of them elsewhere, or unmap it for activations: compute_mapping: {embed: null}"
    ]


def test_a_position_mapped_in_compute_collides_with_heads():
    findings = check_activations(activations(), mappings(compute=COMPUTE | {"position": "model"}), MESH)
    assert [(f.kind, f.path) for f in findings] == [
        ("collision", "queries"),
        ("collision", "mlp hidden"),
        ("collision", "logits"),
    ]


def test_first_wins_is_for_parameters_only():
    """Haliax constrains activations, and would hand JAX the mesh axis twice."""
    given = Mappings(compute=AxisMapping(COMPUTE | {"position": "model"}), on_conflict="first_wins")
    assert len(plan_activations(activations(), given, MESH).errors) == 3


def test_large_whole_activations_are_no_findings():
    assert check_activations(activations(batch=1 << 16), mappings(compute={"batch": "data"}), MESH) == ()
