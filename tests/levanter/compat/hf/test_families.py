"""config.json of every family: published files, what `transformers` makes of them, and what is refused."""

import dataclasses

import pytest
from helpers.published_configs import GEMMA3_27B_WITH_VISION, PUBLISHED

from levanter.compat.hf.config_bridge import check_model_block, read_config, write_config
from levanter.compat.hf.errors import CheckpointError
from levanter.layers.rotary import DefaultRotaryConfig, LinearRotaryConfig, LongRotaryConfig, YarnRotaryConfig


def by_transformers(document) -> dict:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoConfig.for_model(**document).to_dict()


KNOWN_AS_HARMLESS = {
    "Gemma 2 9B": ["sliding_window_size", "cache_implementation"],
    "SmolLM3 3B": ["max_window_layers"],
}
"""Fields of published files that transformers does not use either; they are shown to the user."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_understood(name):
    bridged = read_config(PUBLISHED[name])
    assert [finding.field for finding in bridged.findings] == KNOWN_AS_HARMLESS.get(name, [])
    config, theirs = bridged.config, by_transformers(PUBLISHED[name])
    assert config.hidden_dim == theirs["hidden_size"] and config.num_kv_heads == theirs["num_key_value_heads"]
    assert config.layer_norm_epsilon == theirs["rms_norm_eps"]
    assert config.tie_word_embeddings == theirs["tie_word_embeddings"]
    assert config.activation_function == (theirs.get("hidden_activation") or theirs["hidden_act"])
    if "layer_types" in theirs:
        windowed = [config.window(n) is not None for n in range(config.num_layers)]
        assert windowed == [kind == "sliding_attention" for kind in theirs["layer_types"]]


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_transformers_writes_means_the_same(name):
    """Its version 5 spells rotary embeddings and layer types otherwise than the published file does."""
    document = {key: value for key, value in by_transformers(PUBLISHED[name]).items() if value is not None}
    found = read_config(document).config
    expected = read_config(PUBLISHED[name]).config
    assert found.blocks == expected.blocks and found.ropes == expected.ropes
    assert dataclasses.replace(found, head_dim=None, rope=expected.rope) == dataclasses.replace(
        expected,
        head_dim=None,
        **{key: getattr(found, key) for key in ("max_window_layers", "sliding_window") if hasattr(found, key)},
    )


def agrees(written, original) -> bool:
    """Whether what both say is the same; one may say more (a LongRoPE's factor, the old word for a type)."""
    if isinstance(written, dict) and isinstance(original, dict):
        return all(agrees(written[key], original[key]) for key in written.keys() & original.keys())
    return written == original


@pytest.mark.parametrize("spelling", ["transformers4", "transformers5"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_written_is_read_back_by_us_and_by_transformers(name, spelling):
    config = read_config(PUBLISHED[name]).config
    written = write_config(config, spelling=spelling)
    again = read_config(written)
    assert not again.findings and dataclasses.replace(again.config, head_dim=config.head_dim) == config
    theirs, original = by_transformers(written), by_transformers(PUBLISHED[name])
    for field, value in original.items():
        # Special tokens are the tokenizer's; some published files name a window that nothing uses.
        if field.endswith("token_id") or field in ("architectures", "dtype", "max_window_layers", "sliding_window"):
            continue
        if field in theirs and value is not None:
            assert agrees(theirs[field], value), (field, theirs[field], value)


def test_rotary_embeddings_of_published_models():
    found = {name: read_config(document).config for name, document in PUBLISHED.items()}
    assert found["Gemma 3 27B"].rope == LinearRotaryConfig(theta=1e6, factor=8.0)
    assert found["Gemma 3 27B"].rope_local == DefaultRotaryConfig(theta=1e4)
    assert found["OLMo 3 7B"].rope == YarnRotaryConfig(
        theta=5e5, factor=8.0, original_max_position_embeddings=8192, attention_factor=1.2079441541679836
    )
    assert found["OLMo 3 7B"].rope_local == DefaultRotaryConfig(theta=5e5)
    rope = found["Phi-4 mini"].rope
    assert isinstance(rope, LongRotaryConfig) and rope.factor == 32.0 and rope.partial_rotary_factor == 0.75
    assert rope.amplitude == pytest.approx((1 + 5 / 12) ** 0.5)  # √(1 + ln 32 / ln 4096)
    assert found["SmolLM3 3B"].rope == DefaultRotaryConfig(theta=5e6)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("Mistral 7B v0.1", {"attn_logit_softcapping": 50.0}, "this Mistral does not have it"),
        ("Mistral 7B v0.1", {"attention_bias": True}, "a Mistral does not have it"),
        ("Mistral 7B v0.1", {"num_local_experts": 8}, "this Mistral does not have it"),
        ("Qwen2.5 72B", {"partial_rotary_factor": 0.5}, "this family rotates whole heads"),
        ("Qwen2.5 72B", {"layer_types": ["full_attention"] * 3}, "has 3 entries for model.num_layers 80"),
        ("Qwen2.5 72B", {"dual_chunk_attention_config": {"chunk_size": 9}}, "this Qwen2 does not have it"),
        ("Gemma 3 27B", {"use_bidirectional_attention": True}, "only causal attention is meant here"),
        ("Gemma 3 27B", {"attn_logit_softcapping": 50.0}, "transformers reads it and does not apply it"),
        ("Gemma 2 9B", {"layer_types": ["chunked_attention"] * 42}, "layer_types has 'chunked_attention'"),
        ("OLMo 3 7B", {"rope_theta": 1e4}, "versions of transformers differ"),
        ("Phi-4 mini", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear' is not one that this family has"),
        ("Phi-4 mini", {"num_key_value_heads": 5}, "5 does not divide num_heads 24"),
        (
            "Phi-4 mini",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "rope.short_factor has 1 numbers, but 96 features rotate in 48 pairs",
        ),
        ("SmolLM3 3B", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries"),
        ("SmolLM3 3B", {"logit_scale": 0.5}, "this SmolLM3 does not have it"),
    ],
)
def test_fields_that_change_the_numbers_are_errors(name, fields, message):
    with pytest.raises(CheckpointError, match=message):
        read_config({**PUBLISHED[name], **fields})


def test_unknown_fields_are_shown():
    for name, document in PUBLISHED.items():
        known = KNOWN_AS_HARMLESS.get(name, [])
        findings = read_config({**document, "frobnicate": 3}).findings
        assert [finding.field for finding in findings] == [*known, "frobnicate"]
    inner = {**GEMMA3_27B_WITH_VISION["text_config"], "frobnicate": 3}
    (finding,) = read_config({**GEMMA3_27B_WITH_VISION, "text_config": inner}).findings
    assert finding.field == "frobnicate"


def test_a_model_block_is_held_against_the_checkpoint():
    bridged = read_config(PUBLISHED["Gemma 2 9B"])
    block = {
        "type": "gemma2",
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
        "activation_function": "gelu_new",
    }
    check_model_block(block, bridged)
    with pytest.raises(CheckpointError, match=r"model\.sliding_window is 128, config\.json says 4096"):
        check_model_block({"type": "gemma2", "sliding_window": 128}, bridged)
    with pytest.raises(CheckpointError, match=r"model\.type is 'llama', the checkpoint's model is 'gemma2'"):
        check_model_block({"type": "llama"}, bridged)
