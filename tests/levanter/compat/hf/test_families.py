"""config.json of every family: published files, what `transformers` makes of them, and what is refused."""

import dataclasses

import pytest
from helpers.published_configs import GEMMA3_27B_WITH_VISION, PUBLISHED

from levanter.compat.hf.config_bridge import check_model_block, read_config, write_config
from levanter.compat.hf.errors import CheckpointError
from levanter.layers.residual import ParallelResidual
from levanter.layers.rotary import DefaultRotaryConfig, LinearRotaryConfig, LongRotaryConfig, YarnRotaryConfig


def transformers_config(document):
    return pytest.importorskip("transformers").AutoConfig.for_model(**document)


def by_transformers(document) -> dict:
    return transformers_config(document).to_dict()


def first_of(config, *names: str):
    """The first of some fields that a config of transformers has: families differ in their words."""
    return next(value for name in names if (value := getattr(config, name, None)) is not None)


KNOWN_AS_HARMLESS = {
    "GPT-2 XL": ["output_past"],
    "Gemma 2 9B": ["sliding_window_size", "cache_implementation"],
    "SmolLM3 3B": ["max_window_layers"],
}
"""Fields of published files that transformers does not use either; they are shown to the user."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_understood(name):
    bridged = read_config(PUBLISHED[name])
    assert [finding.field for finding in bridged.findings] == KNOWN_AS_HARMLESS.get(name, [])
    config, theirs = bridged.config, transformers_config(PUBLISHED[name])
    assert config.hidden_dim == theirs.hidden_size and config.num_layers == theirs.num_hidden_layers
    assert config.KVHead.size == first_of(theirs, "num_key_value_heads", "num_attention_heads")
    assert config.layer_norm_epsilon == first_of(theirs, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    assert config.activation_function == first_of(theirs, "hidden_activation", "hidden_act", "activation_function")
    if hasattr(theirs, "layer_types"):
        windowed = [config.window(n) is not None for n in range(config.num_layers)]
        assert windowed == [kind == "sliding_attention" for kind in theirs.layer_types]


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_transformers_writes_means_the_same(name):
    """Its version 5 spells rotary embeddings and layer types otherwise than the published file does."""
    document = {key: value for key, value in by_transformers(PUBLISHED[name]).items() if value is not None}
    found = read_config(document).config
    expected = read_config(PUBLISHED[name]).config
    assert found.layers == expected.layers and found.ropes == expected.ropes
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
        if field.endswith(("_pdrop", "_dropout")) or field.startswith("summary_") or field == "task_specific_params":
            continue  # which say nothing of how a text is scored
        if field in theirs and value is not None:
            assert agrees(theirs[field], value), (field, theirs[field], value)


def test_what_is_shown_of_gpt2_and_gpt_neox_and_of_experts():
    """Fields that are understood and left out, with a reason."""
    cases = {
        "GPT-NeoX 20B": {"hidden_dropout": 0.2, "attention_dropout": 0.1},
        "GPT-2 XL": {"resid_pdrop": 0.3},
        "Mixtral 8x22B": {"router_jitter_noise": 0.1},
    }
    for name, fields in cases.items():
        shown = [found for found in read_config({**PUBLISHED[name], **fields}).findings if found.field in fields]
        assert {found.field for found in shown} == set(fields)
        assert all("it matters only in training" in found.message for found in shown)


def test_a_gpt_neox_by_either_version_of_transformers():
    plain = read_config(PUBLISHED["Pythia 12B"]).config
    assert plain.rope == DefaultRotaryConfig(theta=1e4, partial_rotary_factor=0.25)
    assert isinstance(plain.residual, ParallelResidual)
    # Version 4 writes what it understood beside what it read.
    assert read_config({**PUBLISHED["Pythia 12B"], "rope_theta": 10000, "partial_rotary_factor": 0.25}).config == plain
    whole = dataclasses.replace(plain, rope=LinearRotaryConfig(theta=5e5, factor=2.0))
    for spelling, said in (("transformers4", "rotary_pct"), ("transformers5", "rope_parameters")):
        document = write_config(whole, spelling=spelling)
        assert said in document and "partial_rotary_factor" not in document and "rope_theta" not in document
        assert read_config(document).config == whole
        theirs = by_transformers(document)["rope_parameters"]
        assert (theirs["partial_rotary_factor"], theirs["rope_theta"], theirs["factor"]) == (1.0, 5e5, 2.0)
    with pytest.raises(ValueError, match="head_dim 64 has no place in a Hugging Face GPT-NeoX"):
        write_config(dataclasses.replace(plain, head_dim=64))


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
        ("GPT-2 XL", {"scale_attn_weights": False}, "scores that are not divided by the square root of the head size"),
        ("GPT-2 XL", {"add_cross_attention": True}, "a decoder-only model is expected"),
        ("GPT-2 XL", {"activation_function": "gelu_mew"}, r"'gelu_mew' is not one of .*\(did you mean gelu_new"),
        ("GPT-2 XL", {"n_head": 7}, "hidden_dim 1600 is not a multiple of num_heads 7"),
        ("GPT-2 XL", {"sliding_window": 128}, "this GPT-2 does not have it"),
        ("GPT-2 XL", {"alibi": True}, "this GPT-2 does not have it"),
        ("GPT-NeoX 20B", {"num_key_value_heads": 8}, "num_kv_heads is 8; a GPT-NeoX has as many as num_heads"),
        ("GPT-NeoX 20B", {"mlp_bias": False}, "a GPT-NeoX has biases in its MLPs"),
        ("GPT-NeoX 20B", {"rope_theta": 5e5}, "transformers reads rotary_emb_base, which is 10000.0, and not this"),
        ("GPT-NeoX 20B", {"partial_rotary_factor": 1.0}, "transformers reads rotary_pct, which is 0.25, and not this"),
        (
            "GPT-NeoX 20B",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor is 0.5 but rotary_pct is 0.25; they must agree",
        ),
        ("GPT-NeoX 20B", {"rotary_pct": 0.22}, "rotate features in pairs, but 21 of 96 would be rotated"),
        ("Pythia 12B", {"hidden_act": "gegelu"}, "'gegelu' is not one of"),
        ("Pythia 12B", {"parallel_residual": True}, "this GPT-NeoX does not have it"),
        ("Pythia 12B", {"num_experts": 8}, "this GPT-NeoX does not have it"),
        ("Mixtral 8x22B", {"attention_bias": True}, "a Mixtral does not have it"),
        ("Mixtral 8x22B", {"num_experts_per_tok": 9}, "a token can go to 1 to 8 experts"),
        ("Mixtral 8x22B", {"n_shared_experts": 2}, "this Mixtral does not have it"),
        ("Mixtral 8x22B", {"routed_scaling_factor": 2.5}, "this Mixtral does not have it"),
        ("Mixtral 8x22B", {"hidden_act": "swiglu_oai"}, "'swiglu_oai' is not one of"),
        ("Qwen3 235B-A22B", {"decoder_sparse_step": 2}, "layers without experts are not supported"),
        ("Qwen3 235B-A22B", {"mlp_only_layers": [0, 3]}, "layers without experts are not supported"),
        ("Qwen3 235B-A22B", {"num_experts_per_tok": 129}, "a token can go to 1 to 128 experts"),
        ("Qwen3 235B-A22B", {"shared_expert_intermediate_size": 512}, "this Qwen3 with experts does not have it"),
        ("Qwen3 235B-A22B", {"mlp_bias": True}, "a Qwen3 with experts does not have it"),
        ("Qwen2.5 72B", {"partial_rotary_factor": 0.5}, "this family rotates full heads"),
        ("Qwen2.5 72B", {"layer_types": ["full_attention"] * 3}, "has 3 entries for model.num_layers 80"),
        ("Qwen2.5 72B", {"dual_chunk_attention_config": {"chunk_size": 9}}, "this Qwen2 does not have it"),
        ("Gemma 3 27B", {"use_bidirectional_attention": True}, "only causal attention is supported here"),
        ("Gemma 3 27B", {"attn_logit_softcapping": 50.0}, "transformers reads it but does not apply it"),
        ("Gemma 2 9B", {"layer_types": ["chunked_attention"] * 42}, "layer_types has 'chunked_attention'"),
        ("OLMo 3 7B", {"rope_theta": 1e4}, "versions of transformers differ"),
        ("Phi-4 mini", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear' is not supported by this family"),
        ("Phi-4 mini", {"num_key_value_heads": 5}, "5 does not divide num_heads 24"),
        (
            "Phi-4 mini",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "rope.short_factor has 1 numbers, but the 96 rotated features form 48 pairs",
        ),
        ("Gemma 2B", {"hidden_activation": "relu"}, "versions of transformers differ in which one they read"),
        ("Mistral 7B v0.1", {"per_layer_config": {"1": {"intermediate_size": 8}}}, "layers with settings"),
        ("Gemma 3 27B", {"per_layer_config": {"1": {"intermediate_size": 8}}}, "layers with settings"),
        ("GPT-2 XL", {"num_attention_heads": 5}, "they are the same field"),
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
    check_model_block(block, bridged.config)
    with pytest.raises(CheckpointError, match=r"model\.sliding_window is 128, config\.json says 4096"):
        check_model_block({"type": "gemma2", "sliding_window": 128}, bridged.config)
    with pytest.raises(CheckpointError, match=r"model\.type is 'llama', the checkpoint's model is 'gemma2'"):
        check_model_block({"type": "llama"}, bridged.config)


def test_gelu_is_what_transformers_takes_it_for():
    """Its tanh approximation in the first Gemma, itself in those after it."""
    for name, field, expected in (
        ("Gemma 2B", "hidden_act", "gelu_pytorch_tanh"),
        ("Gemma 2 9B", "hidden_activation", "gelu"),
        ("Gemma 3 27B", "hidden_activation", "gelu"),
    ):
        bridged = read_config({**PUBLISHED[name], field: "gelu"})
        assert bridged.config.activation_function == expected
        again = dataclasses.replace(bridged.config, activation_function="gelu")
        if expected == "gelu":
            assert read_config(write_config(again)).config.activation_function == "gelu"
        else:
            with pytest.raises(ValueError, match=r"in a Gemma's config\.json it means gelu_pytorch_tanh"):
                write_config(again)
