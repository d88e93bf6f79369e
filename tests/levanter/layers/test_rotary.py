"""Frequencies, tables and rotations equal Hugging Face's; configs refuse what makes no sense."""

import draccus
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from levanter.layers.rotary import (
    DefaultRotaryConfig,
    DynamicRotaryConfig,
    LinearRotaryConfig,
    Llama3RotaryConfig,
    RotaryConfig,
    YarnRotaryConfig,
    apply_rotary,
)

LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
YARN = dict(factor=16.0, original_max_position_embeddings=4096)
DEEPSEEK = YARN | dict(mscale=0.9, mscale_all_dim=0.6, beta_fast=40.0, beta_slow=2.0)
CASES = {
    "linear": (LinearRotaryConfig(factor=4.0), "linear", 1e4, dict(factor=4.0)),
    "llama3": (Llama3RotaryConfig(), "llama3", 5e5, LLAMA3),
    "yarn": (YarnRotaryConfig(**YARN), "yarn", 1e4, YARN),
    "yarn_deepseek": (YarnRotaryConfig(theta=5e4, **DEEPSEEK), "yarn", 5e4, DEEPSEEK),
    "yarn_untruncated": (YarnRotaryConfig(truncate=False, **YARN), "yarn", 1e4, YARN | {"truncate": False}),
    "dynamic_short": (DynamicRotaryConfig(factor=3.0, original_max_position_embeddings=4096), "dynamic", 1e4, None),
}


def hf_frequencies(kind: str, theta: float, values: dict | None, head_size: int, length: int):
    from transformers import LlamaConfig as HfLlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    values = {"factor": 3.0} if values is None else values
    config = HfLlamaConfig(
        hidden_size=4 * head_size,
        num_attention_heads=4,
        max_position_embeddings=4096 if kind == "dynamic" else 131072,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **values},
    )
    frequencies, amplitude = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    return frequencies.numpy(), amplitude


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("case", CASES)
def test_frequencies_equal_transformers(case, head_size):
    config, kind, theta, values = CASES[case]
    expected, amplitude = hf_frequencies(kind, theta, values, head_size, 1024)
    np.testing.assert_allclose(config.frequencies(head_size, 1024), expected, rtol=3e-7)
    assert config.frequencies(head_size, 1024).dtype == np.float32
    assert config.amplitude == pytest.approx(amplitude, rel=1e-7)


@pytest.mark.parametrize("length", [4096, 4097, 10000])
def test_dynamic_frequencies_follow_the_length(length):
    config = CASES["dynamic_short"][0]
    expected, _ = hf_frequencies("dynamic", 1e4, None, 64, length)
    np.testing.assert_allclose(config.frequencies(64, length), expected, rtol=3e-7)
    unscaled = config.frequencies(64, 10)
    assert np.array_equal(unscaled, config.frequencies(64, length)) == (length == 4096)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotation_equals_transformers(dtype):
    torch = pytest.importorskip("torch")
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    config = DefaultRotaryConfig(theta=1e4)
    Batch, Pos, Head, Size = Axis("batch", 2), Axis("position", 300), Axis("kv_head", 3), Axis("head_size", 16)
    values = np.random.default_rng(0).standard_normal((2, 300, 3, 16)).astype(np.float32)

    @jax.jit
    def rotate(x):
        x = hax.named(x.astype(dtype), (Batch, Pos, Head, Size))
        cos, sin = config.tables(Size, hax.arange(Pos), length=Pos.size)
        assert cos.dtype == jnp.float32
        return apply_rotary(x, cos, sin, Size).array.astype(jnp.float32)

    torch_dtype = getattr(torch, dtype)
    x = torch.from_numpy(values).to(torch_dtype).transpose(1, 2)
    frequency = 1.0 / 1e4 ** (torch.arange(0, 16, 2).float() / 16)
    angles = torch.arange(300).float()[:, None] * frequency
    angles = torch.cat([angles, angles], -1)[None]
    expected, _ = apply_rotary_pos_emb(x, x, angles.cos().to(torch_dtype), angles.sin().to(torch_dtype))
    expected = expected.transpose(1, 2).float().numpy()
    # XLA keeps a fused multiply-add in higher precision where torch rounds each step.
    np.testing.assert_allclose(rotate(values), expected, atol=3e-5 if dtype == "float32" else 0.04)


def test_scores_depend_on_relative_position_only():
    config = Llama3RotaryConfig(original_max_position_embeddings=16)
    Pos, Size = Axis("position", 1), Axis("head_size", 32)
    rng = np.random.default_rng(1)
    q, k = (rng.standard_normal((1, 32)).astype(np.float32) for _ in range(2))

    @jax.jit
    def score(at_q, at_k):
        def turned(x, at):
            cos, sin = config.tables(Size, hax.named(at[None], Pos), length=64)
            return apply_rotary(hax.named(x, (Pos, Size)), cos, sin, Size)

        return hax.sum(turned(q, at_q) * turned(k, at_k)).array

    at = [score(jnp.int32(p), jnp.int32(p - 5)) for p in (5, 20, 63)]
    np.testing.assert_allclose(at, at[0], atol=1e-4)
    assert abs(at[0] - score(jnp.int32(5), jnp.int32(1))) > 1e-2


def test_a_partial_factor_leaves_the_rest_alone():
    config = DefaultRotaryConfig(partial_rotary_factor=0.5)
    Pos, Size = Axis("position", 6), Axis("head_size", 8)
    x = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)

    @jax.jit
    def rotate(x, config_size):
        del config_size
        cos, sin = config.tables(Size, hax.arange(Pos), length=6)
        return apply_rotary(hax.named(x, (Pos, Size)), cos, sin, Size).array

    found = np.asarray(rotate(x, 0))
    np.testing.assert_array_equal(found[:, 4:], x[:, 4:])
    angle = np.arange(6)[:, None] * np.array([1.0, 1e4**-0.5])
    first, second = x[:, :2], x[:, 2:4]
    np.testing.assert_allclose(found[:, :2], first * np.cos(angle) - second * np.sin(angle), atol=1e-6)
    np.testing.assert_allclose(found[:, 2:4], second * np.cos(angle) + first * np.sin(angle), atol=1e-6)


def test_yaml_chooses_by_type():
    found = draccus.decode(RotaryConfig, {"type": "llama3", "factor": 32.0})
    assert found == Llama3RotaryConfig(factor=32.0)
    assert draccus.decode(RotaryConfig, {"theta": 500000}) == DefaultRotaryConfig(theta=500000.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DefaultRotaryConfig(theta=0), "rope.theta: must be above 1, got 0"),
        (lambda: LinearRotaryConfig(factor=0), "rope.factor: must be at least 1, got 0"),
        (
            lambda: DefaultRotaryConfig(partial_rotary_factor=1.5),
            "partial_rotary_factor: must be above 0 and at most 1",
        ),
        (lambda: Llama3RotaryConfig(low_freq_factor=4.0), "must be below high_freq_factor"),
        (lambda: YarnRotaryConfig(factor=4.0, mscale=0.7), "without mscale_all_dim"),
        (lambda: DefaultRotaryConfig().rotated_size(15), "rotate features in pairs"),
        (lambda: DynamicRotaryConfig(original_max_position_embeddings=8).frequencies(2, 9), "more than 2 rotated"),
    ],
)
def test_values_without_a_meaning_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
