"""Upstream's calls of models and masks: logits by hand from today's parts, tensors as safetensors reads an export."""

import equinox as eqx
import haliax as hax
import haliax.state_dict
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from levanter.compat.hf.export import export
from levanter.layers.attention import AttentionMask
from levanter.models import Gpt2Config, LlamaConfig
from levanter.upstream.facades.models import LmExample

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
SMALL = {"max_seq_len": 12, "hidden_dim": 16, "num_layers": 1, "num_heads": 4}


@pytest.fixture(scope="module")
def model():
    config = LlamaConfig(**SMALL, num_kv_heads=2, intermediate_dim=24, vocab_size=40)
    return eqx.filter_jit(config.build)(Axis("vocab", 40), key=jax.random.PRNGKey(0))


@pytest.fixture(scope="module")
def ids():
    return hax.named(np.arange(12, dtype=np.int32) % 7, "position")


def test_a_call_with_upstreams_arguments_gives_logits(model, ids):
    expected = model.logits(model(ids).activations)
    causal = AttentionMask.causal()
    array = hax.nn.attention.causal_mask(Axis("position", 12), Axis("key_position", 12))
    calls = [
        model(ids, causal, key=jax.random.PRNGKey(1)),
        model(ids, causal),
        model(ids, attn_mask=causal, key=None),
        model(ids, attn_mask=array),
        jax.jit(lambda m, x: m(x, array, key=None))(model, ids),
        model(ids, key=None, pos_ids=hax.arange(Axis("position", 12))),
    ]
    for logits in calls:
        assert logits.axes == (Axis("position", 12), Axis("vocab", 40)) and logits.dtype == jnp.float32
        np.testing.assert_allclose(logits.array, expected.array, atol=1e-5)
    window = model(ids, AttentionMask.causal(sliding_window=2), key=None)
    assert np.abs(window.array - expected.array).max() > 1e-3


def test_todays_call_gives_activations_and_acts_as_logits(model, ids):
    outputs = model(ids, attn_mask=AttentionMask.causal())
    assert outputs.activations.axes[-1].name == "embed"
    expected = model.logits(outputs.activations)
    assert outputs.axes == expected.axes
    np.testing.assert_array_equal(outputs.array, expected.array)
    np.testing.assert_array_equal((outputs * 2)["vocab", 3].array, 2 * expected["vocab", 3].array)
    with pytest.raises(ValueError, match="the same argument"):
        model(ids, key=None, pos_ids=ids, positions=ids)
    with pytest.raises(ValueError, match="position and key_position"):
        model(ids, attn_mask=hax.ones(Axis("other", 3)), key=None)


def test_a_part_of_a_mask_is_that_part_of_the_whole():
    Pos, KeyPos = Axis("position", 32), Axis("key_position", 32)
    mask = AttentionMask.causal()
    part = mask.materialize(Pos, KeyPos, q_slice=hax.dslice(7, 8), k_slice=hax.dslice(5, 16))
    expected = np.arange(7, 15)[:, None] >= np.arange(5, 21)[None, :]
    assert (np.asarray(part.array) == expected).all()
    moved = AttentionMask.causal(offset=3)
    assert moved.causal_offset == 3 and moved.explicit_mask is None and moved.segment_ids is None
    visible = hax.ones((Pos, KeyPos), dtype=bool)
    assert AttentionMask.explicit(visible).explicit_mask is visible


@pytest.mark.parametrize("family", [LlamaConfig, pytest.param(Gpt2Config, marks=pytest.mark.slow)])
def test_a_state_dict_is_what_an_export_holds(family, tmp_path):
    from safetensors.numpy import load_file

    config = family(
        **{**SMALL, "num_layers": 1}, vocab_size=40, **({"num_kv_heads": 2} if family is LlamaConfig else {})
    )
    model = eqx.filter_jit(config.build)(Axis("vocab", 40), key=jax.random.PRNGKey(0))
    written = load_file(export(model, config, tmp_path / "model") / "model.safetensors")
    found = hax.state_dict.to_torch_compatible_state_dict(model)
    assert found.keys() == written.keys()
    assert all((found[name] == written[name]).all() for name in written)
    assert set(model.to_state_dict("policy")) == {f"policy.{name}" for name in written}


def test_configurations_know_their_heads():
    config = LlamaConfig(**SMALL, num_kv_heads=2)
    assert config.Heads == Axis("heads", 4) and config.KVHeads == Axis("kv_head", 2)
    assert Gpt2Config(**SMALL).Heads == Axis("heads", 4)
    assert Gpt2Config.default_hf_checkpoint_converter.reference_checkpoint == Gpt2Config(**SMALL).reference_checkpoint


def test_an_example_is_made_by_either_generations_names(ids):
    weights, causal = hax.ones(Axis("position", 12)), AttentionMask.causal()
    array = hax.nn.attention.causal_mask(Axis("position", 12), Axis("key_position", 12))
    made = [
        LmExample(tokens=ids, loss_mask=weights, attn_mask=causal),
        LmExample(tokens=ids, loss_weight=weights),
        LmExample(ids, weights, array),
    ]
    assert all((each.loss_mask.array == each.loss_weight.array).all() for each in made)
    assert made[1].attn_mask == causal and made[2].attn_mask.explicit_mask is not None
    assert jax.tree.structure(made[0]) == jax.tree.structure(jax.tree.map(lambda x: x, made[0]))
    for wrong in ({}, {"loss_weight": weights, "loss_mask": weights}):
        with pytest.raises(ValueError, match="loss_mask, its 2025 name"):
            LmExample(tokens=ids, **wrong)
