"""Norm, activations, projections and the MLP against torch and NumPy, in both dtypes."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from levanter.layers.activation import ACTIVATIONS
from levanter.layers.linear import Linear
from levanter.layers.mlp import GatedMlp
from levanter.layers.norm import RMSNorm

Embed, Mlp, Pos = Axis("embed", 24), Axis("mlp", 40), Axis("position", 10)
KVHead, Group, Size = Axis("kv_head", 2), Axis("q_heads_per_group", 3), Axis("head_size", 4)
RNG = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rms_norm_equals_transformers(dtype):
    torch = pytest.importorskip("torch")
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x = 300 * RNG.standard_normal((10, 24)).astype(np.float32)
    weight = RNG.standard_normal(24).astype(np.float32)
    reference = LlamaRMSNorm(24, eps=1e-3).to(getattr(torch, dtype))
    reference.weight.data = torch.from_numpy(weight).to(getattr(torch, dtype))
    expected = reference(torch.from_numpy(x).to(getattr(torch, dtype))).float().detach().numpy()

    @jax.jit
    def normalize(x, weight):
        norm = RMSNorm(weight=hax.named(weight.astype(dtype), Embed), axis="embed", eps=1e-3)
        y = norm(hax.named(x.astype(dtype), (Pos, Embed)))
        assert y.dtype == dtype
        return y.array.astype(jnp.float32)

    rtol = 1e-6 if dtype == "float32" else 2**-7
    np.testing.assert_allclose(normalize(x, weight), expected, rtol=rtol, atol=1e-7)


def test_a_norm_without_weight_has_unit_mean_square():
    norm = RMSNorm.init(Embed, eps=0.0, use_weight=False)
    x = RNG.standard_normal((10, 24)).astype(np.float32)
    y = jax.jit(lambda a: norm(hax.named(a, (Pos, Embed))).array)(x)
    np.testing.assert_allclose(np.mean(np.square(y), -1), 1, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_equal_transformers(name, dtype):
    torch = pytest.importorskip("torch")
    from transformers.activations import ACT2FN

    x = np.linspace(-6, 6, 10 * 24).reshape(10, 24).astype(np.float32)
    expected = ACT2FN[name](torch.from_numpy(x).to(getattr(torch, dtype))).float().numpy()
    found = jax.jit(lambda a: ACTIVATIONS[name](hax.named(a.astype(dtype), (Pos, Embed))).array.astype(jnp.float32))(x)
    exact = dtype == "float32"  # in bfloat16 some of transformers' functions round between steps
    np.testing.assert_allclose(found, expected, rtol=1e-5 if exact else 2**-6, atol=1e-6 if exact else 4e-3)


def test_a_projection_contracts_all_its_input_axes():
    def make(key):
        return Linear.init((KVHead, Group, Size), (Embed,), scale=0.5, use_bias=True, key=key)

    layer = jax.jit(make)(jax.random.key(0))
    assert [axis.name for axis in layer.weight.axes] == ["embed", "kv_head", "q_heads_per_group", "head_size"]
    assert np.std(np.asarray(layer.weight.array)) == pytest.approx(0.5, rel=0.1)
    bias = RNG.standard_normal(24).astype(np.float32)
    layer = Linear(weight=layer.weight, bias=hax.named(jnp.asarray(bias), Embed), In=layer.In)
    x = RNG.standard_normal((10, 2, 3, 4)).astype(np.float32)
    y = jax.jit(lambda m, a: m(hax.named(a, (Pos, KVHead, Group, Size))))(layer, x)
    weight = np.asarray(layer.weight.array)
    np.testing.assert_allclose(y.array, x.reshape(10, 24) @ weight.reshape(24, 24).T + bias, atol=1e-5)


def test_mixed_dtypes_are_refused_not_promoted():
    layer = jax.jit(lambda k: Linear.init((Embed,), (Mlp,), scale=1.0, use_bias=False, key=k))(jax.random.key(0))
    with pytest.raises(jax.dtypes.TypePromotionError, match="strict"):
        layer(hax.zeros((Pos, Embed), dtype=jnp.bfloat16))


def test_the_mlp_is_gated():
    make = jax.jit(lambda k: GatedMlp.init(Embed, Mlp, activation="silu", scale=0.3, use_bias=False, key=k))
    mlp = make(jax.random.key(1))
    x = RNG.standard_normal((10, 24)).astype(np.float32)
    gate, up, down = (np.asarray(p.weight.array, np.float64) for p in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    gated = x @ gate.T
    expected = (gated / (1 + np.exp(-gated)) * (x @ up.T)) @ down.T
    found = jax.jit(lambda m, a: m(hax.named(a, (Pos, Embed))).array)(mlp, x)
    np.testing.assert_allclose(found, expected, atol=1e-5)
