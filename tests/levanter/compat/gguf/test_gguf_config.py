"""GGUF metadata as a model config: every rotary scaling, and what has no place in a llama."""

import math

import numpy as np
import pytest
from helpers.gguf_file import CONTEXT, HEAD_DIM, gguf_tensors, hf_weights, write_gguf

from levanter.compat.gguf import hf_document, open_gguf
from levanter.compat.hf.config_bridge import read_config
from levanter.compat.hf.errors import CheckpointError, UnknownModelError
from levanter.layers.rotary import (
    DefaultRotaryConfig,
    LinearRotaryConfig,
    Llama3RotaryConfig,
    YarnRotaryConfig,
)


def bridged(path, **options):
    return read_config(hf_document(open_gguf(write_gguf(path / "m.gguf", **options))))


def refusal(path, error=CheckpointError, **options) -> str:
    with pytest.raises(error) as caught:
        bridged(path, **options)
    return str(caught.value).removeprefix(f"{path / 'm.gguf'}: ")


def llama3_divisors(theta, head_dim, factor, low, high, original) -> np.ndarray:
    """`rope_freqs` as llama.cpp's converter computes it for Llama 3.1, number by number."""
    found = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < original / high:
            found.append(1.0)
        elif wavelength > original / low:
            found.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def test_a_plain_llama(tmp_path):
    found = bridged(tmp_path)
    config = found.config
    assert (config.hidden_dim, config.intermediate_dim, config.num_layers) == (64, 96, 2)
    assert (config.num_heads, config.num_kv_heads, config.HeadSize.size) == (4, 2, HEAD_DIM)
    assert (config.vocab_size, config.max_seq_len) == (300, CONTEXT)
    assert config.layer_norm_epsilon == 1e-5, "not the float32 nearest to it"
    assert config.tie_word_embeddings and not config.has_attention_bias
    assert config.rope == DefaultRotaryConfig(theta=10000.0)
    assert found.findings == ()


def test_untied_biased_and_one_value_for_all_layers(tmp_path):
    tensors = gguf_tensors(hf_weights(tied=False, bias=True))
    metadata = {"llama.feed_forward_length": [96, 96], "llama.attention.head_count_kv": ...}
    with pytest.raises(CheckpointError):  # 4 kv heads by default: read, and refused by the shapes later
        bridged(tmp_path, tensors=tensors, metadata={"llama.feed_forward_length": [96, 97]})
    config = bridged(tmp_path, tensors=tensors, metadata=metadata).config
    assert not config.tie_word_embeddings and config.attention_bias and config.num_kv_heads == 4


@pytest.mark.parametrize(
    ("metadata", "rope"),
    [
        ({"llama.rope.freq_base": 5e5}, DefaultRotaryConfig(theta=5e5)),
        ({"llama.rope.scaling.type": "none"}, DefaultRotaryConfig()),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            LinearRotaryConfig(factor=4.0),
        ),
        ({"llama.rope.scale_linear": 2.0}, LinearRotaryConfig(factor=2.0)),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
                "llama.rope.scaling.finetuned": True,
            },
            YarnRotaryConfig(factor=4.0, original_max_position_embeddings=32),
        ),
    ],
)
def test_rotary_scalings(tmp_path, metadata, rope):
    assert bridged(tmp_path, metadata=metadata).config.rope == rope


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (8.0, 4096)])
def test_the_scaling_of_llama_3_is_found_behind_its_tensor(tmp_path, factor, original):
    theta, head_dim = 500000.0, 64
    metadata = {
        "llama.rope.freq_base": theta,
        "llama.attention.head_count": 1,
        "llama.attention.head_count_kv": 1,
        "llama.rope.dimension_count": head_dim,
    }
    divisors = llama3_divisors(theta, head_dim, factor, 1.0, 4.0, original)
    tensors = gguf_tensors(hf_weights()) | {"rope_freqs.weight": divisors}
    found = bridged(tmp_path, tensors=tensors, metadata=metadata).config.rope
    assert found == Llama3RotaryConfig(theta=theta, factor=factor, original_max_position_embeddings=original)
    plain = 1 / theta ** (np.arange(0, head_dim, 2) / head_dim)
    np.testing.assert_allclose(found.frequencies(head_dim, 1), plain / divisors, rtol=1e-5)
    divisors[-20:] *= 1.5
    assert refusal(tmp_path, tensors=tensors | {"rope_freqs.weight": divisors}, metadata=metadata).startswith(
        f"rope_freqs.weight is not the scaling of Llama 3.1 with factor {factor * 1.5:g} over an original context of "
    )


def test_divisors_of_one_are_no_scaling(tmp_path):
    tensors = gguf_tensors(hf_weights()) | {"rope_freqs.weight": np.ones(HEAD_DIM // 2, np.float32)}
    assert bridged(tmp_path, tensors=tensors).config.rope == DefaultRotaryConfig()
    tensors["rope_freqs.weight"] = np.ones(3, np.float32)
    assert refusal(tmp_path, tensors=tensors) == "rope_freqs.weight is F32[3], expected F32[8]"


def test_everything_wrong_is_listed_together(tmp_path):
    metadata = {
        "llama.block_count": ...,
        "llama.attention.layer_norm_rms_epsilon": ...,
        "llama.expert_count": 8,
        "llama.feed_forward_length": [96, 97],
    }
    assert refusal(tmp_path, metadata=metadata) == (
        "4 problems:\n"
        "  [1] metadata key 'feed_forward_length' is [96, 97], expected one number for all layers\n"
        "  [2] metadata key 'block_count' is missing\n"
        "  [3] metadata key 'attention.layer_norm_rms_epsilon' is missing\n"
        "  [4] metadata key 'expert_count' is set: mixture-of-experts models are not supported"
    )


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type 'longrope' is not one of none, linear, yarn"),
        ({"llama.rope.dimension_count": 8}, "metadata key 'rope.dimension_count' is 8, but heads have 16 features"),
    ],
)
def test_rotary_embeddings_that_are_not_known(tmp_path, metadata, message):
    assert refusal(tmp_path, metadata=metadata) == message


def test_other_architectures(tmp_path):
    assert refusal(tmp_path, UnknownModelError, architecture="mamba") == (
        "unknown architecture 'mamba'; known architectures: llama"
    )


def test_keys_that_nobody_knows_are_findings(tmp_path):
    found = bridged(tmp_path, metadata={"llama.attention.temperature_scale": 0.5})
    assert [str(each) for each in found.findings] == [
        "llama.attention.temperature_scale: 0.5: not understood and ignored; the results will differ if it matters"
    ]
