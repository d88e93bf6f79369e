"""Attention and parts of layers by upstream's calls, against NumPy and torch."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from levanter.layers.attention import AttentionMask
from levanter.models import LlamaConfig
from levanter.upstream.facades.layers import (
    ActivationFunctionEnum,
    AttentionBackend,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    OldAttentionConfig,
    apply_rotary_pos_emb,
    dot_product_attention,
    flash_attention,
    rotate_half,
)
from levanter.upstream.facades.state_dicts import flatten_linear_layers, tree_from_state_dict, unflatten_linear_layers


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray) -> np.ndarray:
    scores = np.where(visible, q @ k.T / np.sqrt(q.shape[-1]), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)) @ v


@pytest.mark.parametrize("how", [{}, {"use_flash": True, "flash_block_size": 4}, {"attn_backend": "vanilla"}])
def test_attention_over_axes_of_any_name_is_the_formula(how):
    QPos, KPos, Key = Axis("QPos", 10), Axis("KPos", 10), Axis("Key", 6)
    random = np.random.default_rng(0)
    q, k, v = (random.normal(size=(10, 6)).astype(np.float32) for _ in range(3))
    named = [hax.named(x, axes) for x, axes in ((q, (QPos, Key)), (k, (KPos, Key)), (v, (KPos, Key)))]
    lower = np.tril(np.ones((10, 10), bool))
    for mask, visible in (
        (None, np.ones((10, 10), bool)),
        (AttentionMask.causal(), lower),
        (hax.named(lower, (QPos, KPos)), lower),
    ):
        found = dot_product_attention(QPos, "KPos", Key, *named, mask, **how)
        assert found.axes == (QPos, Key)
        np.testing.assert_allclose(found.array, attended(q, k, v, visible), atol=1e-5)
    np.testing.assert_allclose(
        flash_attention(QPos, KPos, Key, *named, AttentionMask.causal(), inference=True).array,
        attended(q, k, v, lower),
        atol=1e-5,
    )
    with pytest.raises(ValueError, match="dropout: not supported by attention here"):
        flash_attention(QPos, KPos, Key, *named, inference=False, dropout=0.5)


def test_activations_are_torchs():
    import torch

    x = np.linspace(-4, 4, 33, dtype=np.float32).reshape(3, 11)
    oracle = {
        "relu": torch.nn.functional.relu,
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_new": lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
        "tanh": torch.tanh,
    }
    for name, function in oracle.items():
        one = ActivationFunctionEnum(name)
        expected = function(torch.tensor(x)).numpy()
        np.testing.assert_allclose(one.to_jax_fn()(jnp.asarray(x)), expected, atol=2e-6)
        np.testing.assert_allclose(one.to_fn()(hax.named(x, ("a", "b"))).array, expected, atol=2e-6)


def test_parts_of_a_llama():
    config = LlamaConfig(max_seq_len=8, hidden_dim=16, num_layers=1, num_heads=4, num_kv_heads=2, intermediate_dim=24)
    x = hax.random.normal(jax.random.PRNGKey(1), (Axis("batch", 2), config.max_Pos, config.Embed))
    key = jax.random.PRNGKey(0)
    layer, causal = eqx.filter_jit(LlamaDecoderLayer.init)(config, key=key), AttentionMask.causal()
    attention = LlamaAttention(inner=layer.inner.self_attn, config=config)
    norm = LlamaRMSNorm.init(config.Embed, eps=config.layer_norm_epsilon)
    # A layer is its parts: x + attention(norm(x)), then the same with the feed-forward part.
    between = x + attention(norm(x), causal)
    expected = between + layer.inner.mlp(norm(between))
    np.testing.assert_allclose(layer(x, causal).array, expected.rearrange(x.axes).array, atol=1e-5)
    array = hax.nn.attention.causal_mask(config.max_Pos, config.max_Pos.alias("key_position"))
    np.testing.assert_allclose(attention(x, array).array, attention(x, causal).array, atol=1e-6)
    assert np.abs(attention(x).array - attention(x, causal).array).max() > 1e-4
    assert eqx.filter_jit(LlamaAttention.init)(config, key=key)(x, causal).axes == x.axes


def test_rotary_tables_and_rotation():
    HeadSize, Pos = Axis("head_size", 6), Axis("position", 5)
    cos, sin = LlamaRotaryEmbedding(HeadSize, Pos)(5)
    angles = np.arange(5)[:, None] * np.tile(10000.0 ** (-np.arange(0, 6, 2) / 6), 2)[None, :]
    np.testing.assert_allclose(cos.array, np.cos(angles), atol=1e-6)
    x = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
    half = np.concatenate([-x[:, 3:], x[:, :3]], axis=1)
    named = hax.named(x, (Pos, HeadSize))
    assert (np.asarray(rotate_half(named).array) == half).all()
    q, k = apply_rotary_pos_emb(named, named, cos, sin)
    np.testing.assert_allclose(q.array, x * np.cos(angles) + half * np.sin(angles), atol=1e-5)
    assert (np.asarray(k.array) == np.asarray(q.array)).all()


def test_a_configuration_of_attention():
    config = OldAttentionConfig(Axis("embed", 32), 8, 2, attn_backend=AttentionBackend.VANILLA)
    assert (config.head_size, config.q_heads_per_group) == (4, 4)
    assert (config.KVHeads.size, config.Heads.size, config.HeadSize.size, config.QHeadsPerGroup.size) == (2, 8, 4, 4)
    with pytest.raises(ValueError, match="not divisible"):
        OldAttentionConfig(Axis("embed", 32), 8, 3)


@pytest.mark.parametrize("first", [True, False, None])
def test_linear_layers_become_matrices_and_come_back(first):
    H, W, D, B = Axis("H", 2), Axis("W", 3), Axis("D", 4), Axis("B", 5)
    layer = hnn.Linear.init((H, W), (D, B), key=jax.random.PRNGKey(0), use_bias=True)
    weight = np.asarray(layer.weight.rearrange((H, W, D, B)).array).reshape(6, 20)
    flat = flatten_linear_layers("at", layer, first)
    out_first = True if first is None else first  # Haliax keeps outputs first
    assert flat.keys() == {"at.weight", "at.bias"}
    assert (np.asarray(flat["at.weight"]) == (weight.T if out_first else weight)).all() and flat["at.bias"].shape == (
        20,
    )
    back = tree_from_state_dict(layer, unflatten_linear_layers("at", flat, layer, first), "at")
    assert (np.asarray(back.weight.array) == np.asarray(layer.weight.array)).all()
    with pytest.raises(ValueError, match=r"at\.bias: the tree has"):
        tree_from_state_dict(layer, {"at.weight": layer.weight.array, "at.bias": np.zeros(3)}, "at")
