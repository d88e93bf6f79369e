"""config.json of well-known checkpoints, so that a plan that names one of them needs no network.

    known_config("meta-llama/Llama-3.1-8B")      {"model_type": "llama", "hidden_size": 4096, …}

Only plans use the table: a run reads the checkpoint's own files. The values are those of the published config.json, as
far as they decide shapes and arithmetic. `tests/levanter/compat/hf/test_known_configs.py` compares the number of
parameters of each with the number that its publisher states.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from levanter.compat.hf.refs import RepoRef

# Blocks of keys that the sizes of one family share; a later block overrides keys of the one that it extends.
# Llama 2 was published in float16, all later ones in bfloat16, which is the default of `known_config`.
_LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu"}
_LLAMA_2 = _LLAMA | {"vocab_size": 32_000, "max_position_embeddings": 4096, "rope_theta": 1e4, "torch_dtype": "float16"}
_LLAMA_3 = _LLAMA | {"vocab_size": 128_256, "max_position_embeddings": 8192, "rope_theta": 5e5}


def _stretched(factor: float) -> dict[str, Any]:
    """Llama 3.1's rotary scaling, to 131,072 positions."""
    scaling = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"factor": factor, "original_max_position_embeddings": 8192}
    return _LLAMA_3 | {"max_position_embeddings": 131_072, "rope_scaling": scaling}


_LLAMA_31, _LLAMA_32 = _stretched(8.0), _stretched(32.0) | {"tie_word_embeddings": True}
# Llama by its config.json, with the head tied at every size; only the rotary base depends on the size.
_SMOLLM_2 = _LLAMA | {"vocab_size": 49_152, "max_position_embeddings": 8192, "tie_word_embeddings": True}
# Version 0.1 alone has a sliding window, and the smaller rotary base; its row says so.
_MISTRAL = {
    "model_type": "mistral",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32_768,
    "sliding_window": None,
    "rope_theta": 1e6,
    "vocab_size": 32_000,
}
_MIXTRAL = _MISTRAL | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
# Heads are tied up to 3B; larger ones have more rows, a multiple of 512, than the tokenizer has ids. Lengths differ
# between base and Instruct: 131,072 positions of the base models from 1.5B on, except 3B.
_QWEN_25 = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "vocab_size": 151_936,
}
_QWEN_25_LARGE = _QWEN_25 | {"tie_word_embeddings": False, "vocab_size": 152_064}
_LONG = {"max_position_embeddings": 131_072}
# Qwen3 has no biases of attention, norms of queries and keys, and heads of 128 features whatever the width.
_QWEN_3 = _QWEN_25 | {
    "model_type": "qwen3",
    "head_dim": 128,
    "attention_bias": False,
    "max_position_embeddings": 40_960,
}
_QWEN_3_MOE = _QWEN_3 | {
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# `hidden_act` of Gemma 1 says gelu, and transformers computes its tanh form, which `hidden_activation` names.
_GEMMA = {
    "model_type": "gemma",
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "vocab_size": 256_000,
}
# Scores are scaled by 256 features at every size but 27B, whose heads have 128 and whose scale is 4608 / 32.
_GEMMA_2 = _GEMMA | {
    "model_type": "gemma2",
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "torch_dtype": "float32",
}
# Every sixth layer is global, with the base of `rope_theta`; the others see 512 positions, with the local base.
_GEMMA_3 = _GEMMA | {
    "model_type": "gemma3_text",
    "query_pre_attn_scalar": 256,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 32_768,
    "vocab_size": 262_144,
}
# Stored in float32 at every size; the vocabulary is padded to a multiple of 128.
_OLMO_2 = {
    "model_type": "olmo2",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "max_position_embeddings": 4096,
    "vocab_size": 100_352,
    "torch_dtype": "float32",
}
_PHI_3 = {
    "model_type": "phi3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "sliding_window": 2047,
    "vocab_size": 32_064,
}
# A Phi-3 by its config.json, with another tokenizer and no window.
_PHI_4 = _PHI_3 | {
    "rope_theta": 2.5e5,
    "max_position_embeddings": 16_384,
    "original_max_position_embeddings": 16_384,
    "sliding_window": None,
    "vocab_size": 100_352,
}
_GPT_2 = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "n_positions": 1024,
    "vocab_size": 50_257,
    "torch_dtype": "float32",
}

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_ROWS: tuple[tuple[str, Mapping[str, Any], tuple[int, int, int, int, int]], ...] = (
    # A regular expression over the id in lower case; what its family shares; the sizes.
    (r"(meta-llama|nousresearch)/llama-2-7b(-chat)?-hf", _LLAMA_2, (4096, 11_008, 32, 32, 32)),
    (r"(meta-llama|nousresearch)/llama-2-13b(-chat)?-hf", _LLAMA_2, (5120, 13_824, 40, 40, 40)),
    (r"(meta-llama|nousresearch)/llama-2-70b(-chat)?-hf", _LLAMA_2, (8192, 28_672, 80, 64, 8)),
    (r"(meta-llama|nousresearch)/meta-llama-3-8b(-instruct)?", _LLAMA_3, (4096, 14_336, 32, 32, 8)),
    (r"(meta-llama|nousresearch)/meta-llama-3-70b(-instruct)?", _LLAMA_3, (8192, 28_672, 80, 64, 8)),
    (r"(meta-llama|nousresearch)/(meta-)?llama-3\.1-8b(-instruct)?", _LLAMA_31, (4096, 14_336, 32, 32, 8)),
    (r"meta-llama/(meta-)?llama-3\.[13]-70b(-instruct)?", _LLAMA_31, (8192, 28_672, 80, 64, 8)),
    (r"meta-llama/(meta-)?llama-3\.1-405b(-instruct)?", _LLAMA_31, (16_384, 53_248, 126, 128, 8)),
    (r"meta-llama/llama-3\.2-1b(-instruct)?", _LLAMA_32 | {"head_dim": 64}, (2048, 8192, 16, 32, 8)),
    (r"meta-llama/llama-3\.2-3b(-instruct)?", _LLAMA_32 | {"head_dim": 128}, (3072, 8192, 28, 24, 8)),
    (r"huggingfacetb/smollm2-135m(-instruct)?", _SMOLLM_2 | {"rope_theta": 1e5}, (576, 1536, 30, 9, 3)),
    (r"huggingfacetb/smollm2-360m(-instruct)?", _SMOLLM_2 | {"rope_theta": 1e5}, (960, 2560, 32, 15, 5)),
    (r"huggingfacetb/smollm2-1\.7b(-instruct)?", _SMOLLM_2 | {"rope_theta": 1.3e5}, (2048, 8192, 24, 32, 32)),
    (
        r"mistralai/mistral-7b-v0\.1",
        _MISTRAL | {"sliding_window": 4096, "rope_theta": 1e4},
        (4096, 14_336, 32, 32, 8),
    ),
    (r"mistralai/mistral-7b-(instruct-)?v0\.3", _MISTRAL | {"vocab_size": 32_768}, (4096, 14_336, 32, 32, 8)),
    (r"mistralai/mixtral-8x7b-(instruct-)?v0\.1", _MIXTRAL, (4096, 14_336, 32, 32, 8)),
    (r"qwen/qwen2\.5-0\.5b(-instruct)?", _QWEN_25, (896, 4864, 24, 14, 2)),
    (r"qwen/qwen2\.5-1\.5b", _QWEN_25 | _LONG, (1536, 8960, 28, 12, 2)),
    (r"qwen/qwen2\.5-1\.5b-instruct", _QWEN_25, (1536, 8960, 28, 12, 2)),
    (r"qwen/qwen2\.5-3b(-instruct)?", _QWEN_25, (2048, 11_008, 36, 16, 2)),
    (r"qwen/qwen2\.5-7b", _QWEN_25_LARGE | _LONG, (3584, 18_944, 28, 28, 4)),
    (r"qwen/qwen2\.5-7b-instruct", _QWEN_25_LARGE, (3584, 18_944, 28, 28, 4)),
    (r"qwen/qwen2\.5-14b", _QWEN_25_LARGE | _LONG | {"rms_norm_eps": 1e-5}, (5120, 13_824, 48, 40, 8)),
    (r"qwen/qwen2\.5-32b", _QWEN_25_LARGE | _LONG | {"rms_norm_eps": 1e-5}, (5120, 27_648, 64, 40, 8)),
    (r"qwen/qwen3-0\.6b", _QWEN_3, (1024, 3072, 28, 16, 8)),
    (r"qwen/qwen3-1\.7b", _QWEN_3, (2048, 6144, 28, 16, 8)),
    (r"qwen/qwen3-4b", _QWEN_3, (2560, 9728, 36, 32, 8)),
    (r"qwen/qwen3-8b", _QWEN_3 | {"tie_word_embeddings": False}, (4096, 12_288, 36, 32, 8)),
    (r"qwen/qwen3-14b", _QWEN_3 | {"tie_word_embeddings": False}, (5120, 17_408, 40, 40, 8)),
    (r"qwen/qwen3-32b", _QWEN_3 | {"tie_word_embeddings": False}, (5120, 25_600, 64, 64, 8)),
    (r"qwen/qwen3-30b-a3b", _QWEN_3_MOE, (2048, 6144, 48, 32, 4)),
    (r"google/gemma-2b(-it)?", _GEMMA, (2048, 16_384, 18, 8, 1)),
    (r"google/gemma-7b(-it)?", _GEMMA, (3072, 24_576, 28, 16, 16)),
    (r"google/gemma-2-2b", _GEMMA_2, (2304, 9216, 26, 8, 4)),
    (r"google/gemma-2-9b", _GEMMA_2, (3584, 14_336, 42, 16, 8)),
    (r"google/gemma-2-27b", _GEMMA_2 | {"query_pre_attn_scalar": 144, "head_dim": 128}, (4608, 36_864, 46, 32, 16)),
    (r"google/gemma-3-1b-(pt|it)", _GEMMA_3, (1152, 6912, 26, 4, 1)),
    (r"allenai/olmo-2-0425-1b", _OLMO_2, (2048, 8192, 16, 16, 16)),
    (r"allenai/olmo-2-1124-7b(-sft|-dpo|-instruct)?", _OLMO_2, (4096, 11_008, 32, 32, 32)),
    (r"allenai/olmo-2-1124-13b(-sft|-dpo|-instruct)?", _OLMO_2, (5120, 13_824, 40, 40, 40)),
    (r"allenai/olmo-2-0325-32b", _OLMO_2, (5120, 27_648, 64, 40, 8)),
    (r"microsoft/phi-3-mini-4k-instruct", _PHI_3, (3072, 8192, 32, 32, 32)),
    (r"microsoft/phi-4", _PHI_4, (5120, 17_920, 40, 40, 10)),
)
_GPT_SIZES = {"gpt2": (768, 12, 12), "gpt2-medium": (1024, 24, 16), "gpt2-large": (1280, 36, 20)} | {
    "gpt2-xl": (1600, 48, 25)
}


def known_config(reference: str | RepoRef) -> Mapping[str, Any] | None:
    """The config.json of a checkpoint of the Hub, from the table; None for one that is not in it.

    Args:
        reference: what a config names; of alternatives, the first with an entry. Folders and URLs have none, whatever
            they are called.
    """
    if isinstance(reference, str) and "|" in reference:
        return next(filter(None, map(known_config, reference.split("|"))), None)
    parsed = RepoRef.parse(reference)
    if parsed.kind != "hub" or parsed.file is not None:
        return None
    name = parsed.location.lower()
    short = name.removeprefix("openai-community/")
    if short in _GPT_SIZES:
        # GPT-2's config.json has other names for the sizes, and the feed-forward part is four times as wide.
        embed, layers, heads = _GPT_SIZES[short]
        return MappingProxyType(_GPT_2 | {"n_embd": embed, "n_layer": layers, "n_head": heads})
    for pattern, shared, sizes in _ROWS:
        if re.fullmatch(pattern, name):
            return MappingProxyType({"torch_dtype": "bfloat16", **shared, **dict(zip(_SIZES, sizes, strict=True))})
    return None
