"""Mappings: parsing, path patterns, name checks."""

import haliax as hax
import pytest
from jax.sharding import PartitionSpec as P

from haliax_ext.errors import ShardingError, UnknownAxisError
from haliax_ext.mapping import AxisMapping, Mappings, mappings_in_scope, path_matches, shard_residual
from haliax_ext.meshspec import MeshSpec

pytestmark = pytest.mark.quick


def test_values_are_unwrapped_and_nulls_dropped():
    mapping = AxisMapping({"embed": ["data"], "mlp": ["model", "group"], "heads": None, "vocab": []})
    assert dict(mapping) == {"embed": "data", "mlp": ("model", "group")}
    assert mapping.spec(("mlp", "embed", "head_size")) == P(("model", "group"), "data", None)
    assert mapping.unmapped == {"heads", "vocab"}
    assert str(mapping) == "{embed: data, mlp: [model, group], heads: null, vocab: null}"


def test_merging_with_null_removes_a_rule():
    assert dict(AxisMapping({"mlp": "model", "embed": "data"}).merged({"mlp": None, "x": "data"})) == {
        "embed": "data",
        "x": "data",
    }


def test_equal_mappings_hash_equal_whatever_their_order():
    a, b = AxisMapping({"a": "x", "b": "y"}), AxisMapping({"b": ["y"], "a": "x"})
    assert a == b
    assert hash(a) == hash(b)


def test_one_mesh_axis_twice_in_one_rule():
    with pytest.raises(ShardingError, match="names a mesh axis twice"):
        AxisMapping({"mlp": ["model", "model"]})


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("**.self_attn.*", "transformer.layers.stacked.self_attn.q_proj.weight", True),
        ("**.self_attn.*", "self_attn.q_proj.weight", True),
        ("**.self_attn", "transformer.self_attn_norm.weight", False),
        ("embeddings", "embeddings.token_embeddings.weight", True),
        ("*.norm", "transformer.norm.weight", True),
        ("*.norm", "transformer.layers.norm.weight", False),
        ("lm_head.weight", "lm_head.weight", True),
        ("**.o_proj.weight", "transformer.layers.stacked.self_attn.o_proj.bias", False),
    ],
)
def test_path_patterns(pattern, path, expected):
    assert path_matches(pattern, path) is expected


def test_unknown_names_are_listed_with_near_matches():
    mapping = AxisMapping({"embd": "data", "mlp": "modle", "token": "data"})
    with pytest.raises(UnknownAxisError) as caught:
        mapping.check(known=["token", "expert"], used=["embed", "mlp"], mesh=MeshSpec.of(data=8), where="param_mapping")
    message = str(caught.value)
    assert "'embd' is neither an axis of this model nor a known axis name (did you mean embed?)" in message
    assert "mlp → modle, but the mesh has only ['data']" in message


def test_known_but_unused_names_are_notes():
    notes = AxisMapping({"expert": "data"}).check(
        known=["expert"], used=["embed"], mesh=MeshSpec.of(data=8), where="shared_mapping"
    )
    assert len(notes) == 1
    assert "'expert' is a known axis, but this model does not have it" in notes[0]


def test_overrides_apply_by_path():
    mappings = Mappings(
        params=AxisMapping({"embed": "data", "mlp": "model"}),
        overrides=(("**.self_attn.*", AxisMapping({"embed": "model", "head_size": "data"})),),
    )
    assert dict(mappings.params_at("layers.self_attn.q_proj.weight")) == {
        "embed": "model",
        "mlp": "model",
        "head_size": "data",
    }
    assert dict(mappings.params_at("layers.mlp.up_proj.weight")) == {"embed": "data", "mlp": "model"}


def test_a_null_in_an_override_or_residual_mapping_takes_a_rule_away():
    mappings = Mappings(
        params=AxisMapping({"embed": "data", "mlp": "model"}),
        compute=AxisMapping({"batch": "data", "embed": "model"}),
        residual=AxisMapping({"embed": None, "position": "model"}),
        overrides=(("**.norm", AxisMapping({"embed": None})),),
    )
    assert dict(mappings.params_at("layers.norm.weight")) == {"mlp": "model"}
    assert dict(mappings.params_at("layers.mlp.up")) == {"embed": "data", "mlp": "model"}
    assert dict(mappings.residual_stream) == {"batch": "data", "position": "model"}
    assert mappings.overrides_at("layers.norm.weight") == mappings.overrides


def test_what_is_unmapped_is_part_of_the_value():
    null, nothing = AxisMapping({"embed": None}), AxisMapping()
    assert null != nothing
    assert nothing == {}
    assert null == AxisMapping(null) == AxisMapping({"embed": []})
    assert len({null, nothing, AxisMapping({"embed": None})}) == 2


def test_haliax_and_our_residual_see_the_scope(devices):
    import jax

    mesh = MeshSpec.of(data=4, model=2).build(devices)
    mappings = Mappings(compute=AxisMapping({"batch": "data"}), residual=AxisMapping({"embed": "model"}))
    Batch, Embed = hax.Axis("batch", 8), hax.Axis("embed", 4)

    @jax.jit
    def boundary(x):
        return shard_residual(x)

    with mappings_in_scope(mappings), jax.set_mesh(mesh):
        out = boundary(hax.ones((Batch, Embed)))
    assert out.array.sharding.spec == P("data", "model")
