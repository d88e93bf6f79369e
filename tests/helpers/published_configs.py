"""config.json of well-known models, as published (what `transformers` needs of it), and their parameter counts."""

from collections.abc import Mapping
from typing import Any

_GEMMA3_27B = dict(
    model_type="gemma3_text", hidden_size=5376, intermediate_size=21504, num_hidden_layers=62, num_attention_heads=32,
    num_key_value_heads=16, head_dim=128, vocab_size=262208, query_pre_attn_scalar=168, sliding_window=1024,
    max_position_embeddings=131072, rope_local_base_freq=10000.0, rope_theta=1000000.0,
    rope_scaling={"factor": 8.0, "rope_type": "linear"}, sliding_window_pattern=6, rms_norm_eps=1e-6,
    hidden_activation="gelu_pytorch_tanh",
)  # fmt: skip

PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "GPT-2 XL": dict(
        model_type="gpt2", architectures=["GPT2LMHeadModel"], activation_function="gelu_new", attn_pdrop=0.1,
        bos_token_id=50256, embd_pdrop=0.1, eos_token_id=50256, initializer_range=0.02, layer_norm_epsilon=1e-5,
        n_ctx=1024, n_embd=1600, n_head=25, n_layer=48, n_positions=1024, output_past=True, resid_pdrop=0.1,
        summary_activation=None, summary_first_dropout=0.1, summary_proj_to_labels=True, summary_type="cls_index",
        summary_use_proj=True, task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}},
        vocab_size=50257,
    ),
    "GPT-NeoX 20B": dict(
        model_type="gpt_neox", architectures=["GPTNeoXForCausalLM"], attention_probs_dropout_prob=0, bos_token_id=0,
        eos_token_id=0, hidden_act="gelu_fast", hidden_dropout_prob=0, hidden_size=6144, initializer_range=0.02,
        intermediate_size=24576, layer_norm_eps=1e-5, max_position_embeddings=2048, num_attention_heads=64,
        num_hidden_layers=44, rotary_emb_base=10000, rotary_pct=0.25, tie_word_embeddings=False,
        torch_dtype="float16", use_cache=True, vocab_size=50432,
    ),
    "Pythia 12B": dict(
        model_type="gpt_neox", architectures=["GPTNeoXForCausalLM"], bos_token_id=0, eos_token_id=0,
        hidden_act="gelu", hidden_size=5120, initializer_range=0.02, intermediate_size=20480, layer_norm_eps=1e-5,
        max_position_embeddings=2048, num_attention_heads=40, num_hidden_layers=36, rotary_emb_base=10000,
        rotary_pct=0.25, tie_word_embeddings=False, torch_dtype="float16", use_cache=True,
        use_parallel_residual=True, vocab_size=50688,
    ),
    "Mistral 7B v0.1": dict(
        model_type="mistral", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=32000, max_position_embeddings=32768, rms_norm_eps=1e-5, rope_theta=10000.0,
        sliding_window=4096, hidden_act="silu", tie_word_embeddings=False,
    ),
    "Qwen2.5 72B": dict(
        model_type="qwen2", hidden_size=8192, intermediate_size=29568, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=152064, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_theta=1000000.0, sliding_window=131072, use_sliding_window=False, max_window_layers=80, hidden_act="silu",
        tie_word_embeddings=False,
    ),
    "Qwen3 8B": dict(
        model_type="qwen3", hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=40960, rms_norm_eps=1e-6,
        rope_theta=1000000, rope_scaling=None, sliding_window=None, use_sliding_window=False, max_window_layers=36,
        attention_bias=False, hidden_act="silu", tie_word_embeddings=False,
    ),
    "Mixtral 8x22B": dict(
        model_type="mixtral", hidden_size=6144, intermediate_size=16384, num_hidden_layers=56, num_attention_heads=48,
        num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, vocab_size=32000,
        max_position_embeddings=65536, rms_norm_eps=1e-5, rope_theta=1000000.0, sliding_window=None, hidden_act="silu",
        router_aux_loss_coef=0.001, output_router_logits=False, tie_word_embeddings=False,
    ),
    "Qwen3 235B-A22B": dict(
        model_type="qwen3_moe", hidden_size=4096, intermediate_size=12288, moe_intermediate_size=1536,
        num_hidden_layers=94, num_attention_heads=64, num_key_value_heads=4, head_dim=128, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], vocab_size=151936,
        max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1000000.0, rope_scaling=None, sliding_window=None,
        use_sliding_window=False, max_window_layers=94, attention_bias=False, hidden_act="silu",
        router_aux_loss_coef=0.001, tie_word_embeddings=False,
    ),
    "Gemma 2B": dict(
        model_type="gemma", hidden_size=2048, intermediate_size=16384, num_hidden_layers=18, num_attention_heads=8,
        num_key_value_heads=1, head_dim=256, vocab_size=256000, max_position_embeddings=8192, rms_norm_eps=1e-6,
        rope_theta=10000.0, rope_scaling=None, hidden_act="gelu", hidden_activation=None, attention_bias=False,
    ),
    "Gemma 2 9B": dict(
        model_type="gemma2", hidden_size=3584, intermediate_size=14336, num_hidden_layers=42, num_attention_heads=16,
        num_key_value_heads=8, head_dim=256, vocab_size=256000, max_position_embeddings=8192, rms_norm_eps=1e-6,
        rope_theta=10000.0, sliding_window=4096, sliding_window_size=4096, query_pre_attn_scalar=256,
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0, hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh", attention_bias=False, cache_implementation="hybrid",
    ),
    "Gemma 3 27B": _GEMMA3_27B,
    "OLMo 2 7B": dict(
        model_type="olmo2", hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, vocab_size=100352, max_position_embeddings=4096, rms_norm_eps=1e-6,
        rope_theta=500000, rope_scaling=None, hidden_act="silu", attention_bias=False, tie_word_embeddings=False,
    ),
    "OLMo 3 7B": dict(
        model_type="olmo3", hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, vocab_size=100278, max_position_embeddings=65536, rms_norm_eps=1e-6,
        rope_theta=500000, sliding_window=4096, hidden_act="silu", attention_bias=False, tie_word_embeddings=False,
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8,
        rope_scaling={
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0,
            "beta_slow": 1.0, "attention_factor": 1.2079441541679836,
        },
    ),
    "Phi-4 mini": dict(
        model_type="phi3", hidden_size=3072, intermediate_size=8192, num_hidden_layers=32, num_attention_heads=24,
        num_key_value_heads=8, vocab_size=200064, max_position_embeddings=131072,
        original_max_position_embeddings=4096, rms_norm_eps=1e-5, rope_theta=10000.0, partial_rotary_factor=0.75,
        sliding_window=262144, hidden_act="silu", attention_bias=False, tie_word_embeddings=True, mlp_bias=False,
        rope_scaling={"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0 + n for n in range(48)]},
        bos_token_id=199999, eos_token_id=199999, pad_token_id=199999,
    ),
    "SmolLM3 3B": dict(
        model_type="smollm3", hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16,
        num_key_value_heads=4, vocab_size=128256, max_position_embeddings=65536, rms_norm_eps=1e-6,
        rope_theta=5000000.0, rope_scaling=None, sliding_window=None, use_sliding_window=False, max_window_layers=28,
        no_rope_layers=[1, 1, 1, 0] * 9, no_rope_layer_interval=4, hidden_act="silu", attention_bias=False,
        mlp_bias=False, layer_types=["full_attention"] * 36,
    ),
}  # fmt: skip
"""By name."""

PARAMETERS: Mapping[str, int] = {
    "GPT-NeoX 20B": 20_554_567_680,
    "Pythia 12B": 11_846_072_320,
    "Mistral 7B v0.1": 7_241_732_096,
    "Qwen2.5 72B": 72_706_203_648,
    "Qwen3 8B": 8_190_735_360,
    "Gemma 2B": 2_506_172_416,
    "Gemma 2 9B": 9_241_705_984,
    "SmolLM3 3B": 3_075_098_624,
}
"""The counts on their pages in the Hub, where they say one."""

GEMMA3_27B_WITH_VISION: Mapping[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "model_type": "gemma3_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
"""config.json of google/gemma-3-27b-it."""
