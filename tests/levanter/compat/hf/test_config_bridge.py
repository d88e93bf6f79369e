"""config.json ↔ LlamaConfig against transformers' own LlamaConfig, and the cross-checks with weights and YAML."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import transformers
from helpers.hf_folder import CONFIG, tensors

from haliax_ext.sources import TensorInfo
from levanter.compat.hf.config_bridge import check_model_block, check_tensors, read_config, write_config
from levanter.compat.hf.errors import CheckpointError, ConfigMismatchError, UnknownModelError
from levanter.models.llama.config import LlamaConfig
from levanter.models.registry import families_of_config_json

LLAMA32_1B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0", "use_cache": True,
    "vocab_size": 128256,
}  # fmt: skip
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
    "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "transformers_version": "4.42.3",
    "use_cache": True, "vocab_size": 49152,
}  # fmt: skip
LLAMA1 = {
    "architectures": ["LLaMAForCausalLM"], "bos_token_id": 0, "eos_token_id": 1, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 11008, "initializer_range": 0.02, "max_sequence_length": 2048,
    "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "pad_token_id": -1,
    "rms_norm_eps": 1e-06, "torch_dtype": "float16", "transformers_version": "4.27.0.dev0", "use_cache": True,
    "vocab_size": 32000,
}  # fmt: skip


@pytest.mark.parametrize("document", [LLAMA32_1B, SMOLLM2, LLAMA1, CONFIG], ids=["3.2-1B", "SmolLM2", "1", "tiny"])
def test_published_configs_mean_what_transformers_reads_in_them(document):
    found = read_config(document)
    config, expected = found.config, transformers.LlamaConfig(**document)
    assert isinstance(config, LlamaConfig)
    assert found.findings == ()
    assert (config.hidden_dim, config.intermediate_dim) == (expected.hidden_size, expected.intermediate_size)
    assert (config.num_layers, config.vocab_size) == (expected.num_hidden_layers, expected.vocab_size)
    assert (config.num_heads, config.num_kv_heads) == (expected.num_attention_heads, expected.num_key_value_heads)
    assert config.HeadSize.size == expected.head_dim
    assert config.layer_norm_epsilon == expected.rms_norm_eps
    assert config.activation_function == expected.hidden_act
    assert config.max_seq_len == expected.max_position_embeddings
    assert config.tie_word_embeddings == expected.tie_word_embeddings
    assert config.has_attention_bias == expected.attention_bias
    assert config.has_mlp_bias == expected.mlp_bias
    assert config.rope.theta == expected.rope_parameters["rope_theta"]
    assert config.initializer_range == expected.initializer_range


def test_what_transformers_5_writes_is_read_without_findings():
    document = transformers.LlamaConfig(**LLAMA32_1B).to_dict()
    assert "rope_parameters" in document and "rope_theta" not in document
    assert read_config(document).config == read_config(LLAMA32_1B).config
    assert read_config(document).findings == ()


@pytest.mark.parametrize("spelling", ["transformers4", "transformers5"])
@pytest.mark.parametrize("document", [LLAMA32_1B, SMOLLM2, LLAMA1])
def test_round_trip_through_both_spellings(document, spelling):
    config = read_config(document).config
    written = write_config(config, dtype="bfloat16", spelling=spelling)
    assert written["torch_dtype" if spelling == "transformers4" else "dtype"] == "bfloat16"
    # An unset head_dim is written out; that is the same model.
    assert read_config(written).config == dataclasses.replace(config, head_dim=config.HeadSize.size)
    ours, theirs = transformers.LlamaConfig(**written).to_dict(), transformers.LlamaConfig(**document).to_dict()
    for name in ("architectures", "transformers_version", "dtype", "bos_token_id", "eos_token_id", "pad_token_id"):
        ours.pop(name, None), theirs.pop(name, None)
    unknown = {"is_llama_config", "rope_interleaved", "transformers.js_config", "max_sequence_length"}
    assert ours == {name: value for name, value in theirs.items() if name not in unknown}


def test_parts_without_a_place_in_a_hugging_face_llama():
    config = dataclasses.replace(read_config(CONFIG).config, use_qk_norm=True)
    with pytest.raises(ValueError, match=r"model\.use_qk_norm True has no place in a Hugging Face Llama"):
        write_config(config)
    open_vocabulary = dataclasses.replace(read_config(CONFIG).config, vocab_size=None)
    with pytest.raises(ValueError, match=r"model\.vocab_size must be known to write config\.json"):
        write_config(open_vocabulary)
    assert write_config(open_vocabulary, vocab_size=7)["vocab_size"] == 7


def refusal(error=CheckpointError, **fields) -> str:
    document = {name: value for name, value in (CONFIG | fields).items() if value is not ...}
    with pytest.raises(error) as caught:
        read_config(document, where="m/config.json")
    return str(caught.value).removeprefix("m/config.json: ")


KNOWN = ", ".join(sorted(families_of_config_json("llama")))


def test_unknown_model_types():
    assert refusal(UnknownModelError, model_type="lama") == (
        f"unknown model type 'lama'; known model types: {KNOWN}\n  → the nearest known one is 'llama'"
    )
    assert refusal(UnknownModelError, model_type="t5") == f"unknown model type 't5'; known model types: {KNOWN}"
    assert refusal(UnknownModelError, model_type=...) == f"model_type is missing; known model types: {KNOWN}"
    assert refusal(UnknownModelError, model_type=["llama"]).startswith("unknown model type ['llama']")


def test_everything_wrong_in_a_config_is_listed_together():
    found = refusal(hidden_size=..., num_hidden_layers="two", vocab_size=0, tie_word_embeddings="yes", rope_theta=True)
    assert found == (
        "5 problems:\n"
        "  [1] field 'hidden_size' is missing\n"
        "  [2] field 'num_hidden_layers' is 'two', expected int\n"
        "  [3] field 'vocab_size': must be at least 1, got 0\n"
        "  [4] field 'tie_word_embeddings' is 'yes', expected bool\n"
        "  [5] field 'rope.rope_theta' is True, expected float"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "field 'quantization_config' is {'quant_method': 'gptq'}: quantized weights are not read; "
            "dequantize the checkpoint first",
        ),
        (
            {"rope_interleaved": True},
            "field 'rope_interleaved' is True: interleaved rotary pairs need a different layout",
        ),
        ({"sliding_window": 4096}, "field 'sliding_window' is 4096: this Llama does not have it, so the model is of"),
        ({"num_local_experts": 8}, "field 'num_local_experts' is 8: this Llama does not have it"),
        ({"logits_scaling": 8.0}, "field 'logits_scaling' is 8.0: this Llama does not have it"),
        ({"num_key_value_heads": 3}, "model.num_kv_heads 3 does not divide num_heads 4; legal: [1, 2, 4]"),
        ({"hidden_act": "siluu"}, "model.activation_function 'siluu' is not one of ["),
    ],
)
def test_fields_that_change_the_arithmetic_are_refused(fields, message):
    assert refusal(**fields).startswith(message)


def test_fields_that_nobody_knows_are_reported():
    document = CONFIG | {"attention_dropout": 0.1, "frobnicate": 3, "pretraining_tp": 2, "_private": 1, "prefix": "x"}
    document |= {"architectures": ["LlamaForSequenceClassification"]}
    assert [str(finding) for finding in read_config(document).findings] == [
        "attention_dropout: 0.1: dropout is ignored (it matters only in training)",
        "pretraining_tp: 2: matmuls are not split by it here, so sums round slightly differently",
        "architectures: ['LlamaForSequenceClassification']: read as LlamaForCausalLM",
        "frobnicate: 3: not understood and ignored; the results will differ if it matters",
    ]


def infos(arrays) -> dict[str, TensorInfo]:
    return {name: TensorInfo(name, a.shape, a.dtype, a.nbytes) for name, a in arrays.items()}


def test_tensors_that_fit_the_config():
    for extra in ({}, {"tie_word_embeddings": False, "num_attention_heads": 8, "head_dim": 16}):
        document = CONFIG | extra
        arrays = tensors(CONFIG)
        if extra:
            for n in range(2):
                arrays[f"model.layers.{n}.self_attn.q_proj.weight"] = np.zeros((128, 32), ml_dtypes.bfloat16)
                arrays[f"model.layers.{n}.self_attn.o_proj.weight"] = np.zeros((32, 128), ml_dtypes.bfloat16)
                for part in "kv":
                    arrays[f"model.layers.{n}.self_attn.{part}_proj.weight"] = np.zeros((32, 32), ml_dtypes.bfloat16)
        arrays["model.norm.weight"] = arrays["model.norm.weight"].astype(np.float32)
        check_tensors(document, read_config(document), infos(arrays), where="config.json")


def test_every_shape_that_disagrees_is_listed_together():
    document = CONFIG | {"intermediate_size": 64, "vocab_size": 321, "num_key_value_heads": 4}
    with pytest.raises(ConfigMismatchError) as caught:
        check_tensors(document, read_config(document), infos(tensors(CONFIG)), where="m/config.json")
    assert str(caught.value) == (
        "m/config.json: 6 problems:\n"
        "  [1] tensor 'model.embed_tokens.weight' has shape [320, 32], config.json says [321, 32] "
        "(vocab_size 321 by hidden_size 32)\n"
        "  [2] tensor 'model.layers.0.self_attn.k_proj.weight' (and 1 more) has shape [16, 32], config.json says "
        "[32, 32] (num_key_value_heads 4 × head_dim 8 by hidden_size 32)\n"
        "  [3] tensor 'model.layers.0.self_attn.v_proj.weight' (and 1 more) has shape [16, 32], config.json says "
        "[32, 32] (num_key_value_heads 4 × head_dim 8 by hidden_size 32)\n"
        "  [4] tensor 'model.layers.0.mlp.gate_proj.weight' (and 1 more) has shape [48, 32], config.json says "
        "[64, 32] (intermediate_size 64 by hidden_size 32)\n"
        "  [5] tensor 'model.layers.0.mlp.up_proj.weight' (and 1 more) has shape [48, 32], config.json says "
        "[64, 32] (intermediate_size 64 by hidden_size 32)\n"
        "  [6] tensor 'model.layers.0.mlp.down_proj.weight' (and 1 more) has shape [32, 48], config.json says "
        "[32, 64] (hidden_size 32 by intermediate_size 64)\n"
        "  → config.json and the weights do not belong to the same model"
    )


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_other_dtypes_are_noted_and_integers_refused(key):
    document = {name: value for name, value in CONFIG.items() if name != "torch_dtype"} | {key: "bfloat16"}
    arrays = tensors(CONFIG)
    arrays["model.embed_tokens.weight"] = arrays["model.embed_tokens.weight"].astype(np.float16)
    (finding,) = check_tensors(document, read_config(document), infos(arrays), where="m/config.json")
    assert str(finding) == (
        f"{key}: 'bfloat16': tensor 'model.embed_tokens.weight' is stored as float16, and is read as it is stored"
    )
    arrays["model.layers.1.mlp.up_proj.weight"] = np.zeros((48, 32), np.int8)
    with pytest.raises(ConfigMismatchError) as caught:
        check_tensors(document, read_config(document), infos(arrays), where="m/config.json")
    assert str(caught.value) == (
        "m/config.json: tensor 'model.layers.1.mlp.up_proj.weight' has dtype int8: quantized or packed weights are "
        "not read\n"
        "  → config.json and the weights do not belong to the same model"
    )


def test_a_model_block_that_agrees_or_leaves_things_open():
    bridged = read_config(LLAMA32_1B)
    check_model_block({}, bridged.config)
    check_model_block(
        {"type": "llama", "max_seq_len": 1024, "attn_backend": "blockwise", "head_dim": None}, bridged.config
    )
    rope = {"type": "llama3", "theta": 500000, "factor": 32}
    check_model_block({"hidden_dim": 2048, "layer_norm_epsilon": 1e-5, "head_dim": 64, "rope": rope}, bridged.config)
    check_model_block({"layer_norm_epsilon": float(np.float32(1e-5))}, bridged.config)


def test_a_model_block_that_disagrees_names_both_sides():
    block = {"type": "llama", "hidden_dim": 4096, "num_layers": 16, "rope": {"type": "default", "theta": 10000.0}}
    block |= {"tie_word_embeddings": False}
    with pytest.raises(ConfigMismatchError) as caught:
        check_model_block(block, read_config(LLAMA32_1B).config, where="meta-llama/Llama-3.2-1B/config.json")
    assert str(caught.value) == (
        "model: contradicts meta-llama/Llama-3.2-1B/config.json: 4 problems:\n"
        "  [1] model.hidden_dim is 4096, meta-llama/Llama-3.2-1B/config.json says 2048\n"
        "  [2] model.tie_word_embeddings is False, meta-llama/Llama-3.2-1B/config.json says True\n"
        "  [3] model.rope.type is 'default', meta-llama/Llama-3.2-1B/config.json says 'llama3'\n"
        "  [4] model.rope.theta is 10000.0, meta-llama/Llama-3.2-1B/config.json says 500000.0\n"
        "  → remove these keys to use the checkpoint's own"
    )
    with pytest.raises(ConfigMismatchError, match=r"model\.type is 'gpt2', the checkpoint's model is 'llama'"):
        check_model_block({"type": "gpt2"}, read_config(LLAMA32_1B).config)
