"""Rotary embeddings in config.json, both spellings, against the frequencies that transformers computes from them."""

import copy
import dataclasses

import numpy as np
import pytest
import transformers
from helpers.hf_folder import CONFIG
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from levanter.compat.hf.config_bridge import read_config, write_config
from levanter.compat.hf.errors import CheckpointError
from levanter.layers.rotary import DefaultRotaryConfig

CONTEXT, HEAD_DIM = CONFIG["max_position_embeddings"], 8
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
SCALINGS = [
    ("default", {}),
    ("linear", {"factor": 2.5}),
    ("dynamic", {"factor": 2.0}),
    ("llama3", LLAMA3),
    ("llama3", {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}),
    ("yarn", YARN),
    ("yarn", {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.25}),
    ("yarn", {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}),
    ("yarn", {**YARN, "truncate": False}),
]


def document(**fields):
    return {name: value for name, value in CONFIG.items() if not name.startswith("rope_")} | fields


def spelled(kind, parameters, theta, spelling):
    if spelling == "transformers5":
        return document(rope_parameters={"rope_type": kind, "rope_theta": theta, **parameters})
    key = "type" if spelling == "transformers4, 'type'" else "rope_type"
    return document(rope_theta=theta, rope_scaling={key: kind, **parameters} if kind != "default" else None)


def oracle(config_json, length):
    """Inverse frequencies and amplitude from transformers, for a sequence of a length."""
    config = transformers.LlamaConfig(**copy.deepcopy(config_json))
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
        inverse, amplitude = rotary.compute_default_rope_parameters(config)
    else:
        inverse, amplitude = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    return inverse.numpy(), amplitude


@pytest.mark.parametrize("spelling", ["transformers4", "transformers4, 'type'", "transformers5"])
@pytest.mark.parametrize(("kind", "parameters"), SCALINGS)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_frequencies_equal_transformers(kind, parameters, theta, spelling):
    config_json = spelled(kind, parameters, theta, spelling)
    rope = read_config(config_json).config.rope
    for length in (CONTEXT // 2, 3 * CONTEXT):
        expected, amplitude = oracle(config_json, length)
        np.testing.assert_allclose(rope.frequencies(HEAD_DIM, length), expected, rtol=2e-6)
        assert rope.amplitude == pytest.approx(amplitude, rel=1e-6)


@pytest.mark.parametrize("spelling", ["transformers4", "transformers5"])
@pytest.mark.parametrize(("kind", "parameters"), SCALINGS)
def test_written_configs_mean_the_same_to_transformers(kind, parameters, spelling):
    config = read_config(spelled(kind, parameters, 500000.0, "transformers5")).config
    written = write_config(config, spelling=spelling)
    assert ("rope_parameters" in written) == (spelling == "transformers5")
    assert read_config(written).config.rope == config.rope
    expected, amplitude = oracle(written, 3 * CONTEXT)
    np.testing.assert_allclose(config.rope.frequencies(HEAD_DIM, 3 * CONTEXT), expected, rtol=2e-6)
    assert config.rope.amplitude == pytest.approx(amplitude, rel=1e-6)


def test_both_spellings_may_agree():
    both = document(rope_theta=5e5, rope_parameters={"rope_type": "default", "rope_theta": 5e5}, rope_scaling=None)
    assert read_config(both).config.rope == DefaultRotaryConfig(theta=5e5)


def test_theta_is_found_in_either_place_beside_the_other():
    split = document(rope_theta=5e5, rope_parameters={"rope_type": "linear", "factor": 2.0})
    assert read_config(split).config.rope.theta == 5e5
    assert read_config(document()).config.rope.theta == 10000.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            dict(rope_theta=10000.0, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
            "rope_parameters.rope_theta is 500000.0 but rope_theta is 10000.0; they must agree",
        ),
        (
            dict(rope_scaling={"rope_type": "linear", "factor": 2.0}, rope_parameters={"rope_type": "default"}),
            "rope_parameters.rope_type is 'default' but rope_scaling.rope_type is 'linear'; they must agree",
        ),
        (
            dict(rope_scaling={"type": "linear", "rope_type": "dynamic", "factor": 2.0}),
            "rope_scaling.type is 'linear' but rope_scaling.rope_type is 'dynamic'; they must agree",
        ),
        (
            dict(rope_scaling={"rope_type": "llama-3", "factor": 2.0}),
            "rope type 'llama-3' is not one of default, linear, dynamic, llama3, yarn, longrope; "
            "did you mean 'llama3'?",
        ),
        (
            dict(rope_parameters={"rope_type": "spiral", "factor": 2.0}),
            "rope type 'spiral' is not one of default, linear, dynamic, llama3, yarn, longrope",
        ),
        (dict(rope_scaling={"rope_type": "linear"}), "rope type 'linear' needs 'factor'"),
        (
            dict(rope_scaling={"rope_type": "linear", "factor": 2.0, "alpha": 3}),
            "rope type 'linear' has no parameter 'alpha' (factor, original_max_position_embeddings)",
        ),
        (
            dict(rope_scaling={"rope_type": "linear", "factor": "2"}),
            "field 'rope.factor' is '2', expected float",
        ),
        (
            dict(rope_parameters={"full_attention": {"rope_type": "default"}}),
            "rope_parameters.full_attention is a block of its own: rotary embeddings that differ by layer",
        ),
        (dict(rope_theta="1e4"), "field 'rope.rope_theta' is '1e4', expected float"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor is not 1: this family rotates full heads"),
        (
            dict(rope_parameters={"rope_type": "default", "factor": 4.0}),
            "rope type 'default' has factor 4.0; transformers ignores it: write 'linear' or remove it",
        ),
        (
            dict(rope_scaling={"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 32}),
            "rope type 'dynamic' grows from max_position_embeddings 64, but original_max_position_embeddings is 32",
        ),
        (
            dict(rope_scaling={"rope_type": "yarn", **YARN}, original_max_position_embeddings=32),
            "rope_scaling.original_max_position_embeddings is 16 but original_max_position_embeddings is 32; "
            "they must agree",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused(fields, message):
    with pytest.raises(CheckpointError) as caught:
        read_config(document(**fields))
    assert str(caught.value) == f"config.json: {message}"


def test_a_yarn_factor_that_transformers_4_would_replace_is_reported():
    found = read_config(document(rope_scaling={"rope_type": "yarn", **YARN, "factor": 8.0}))
    assert [str(finding) for finding in found.findings] == [
        "rope.factor: 8.0: is not max_position_embeddings / original_max_position_embeddings = 4, which transformers 4 "
        "would compute; the given factor is used, as in transformers 5"
    ]
    assert found.config.rope.factor == 8.0


def test_a_default_factor_is_exported_as_linear():
    config = read_config(document()).config
    config = dataclasses.replace(config, rope=DefaultRotaryConfig(theta=1e4, factor=4.0))
    assert write_config(config)["rope_parameters"] == {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
