"""Llama 1 to 3.2, SmolLM2 and whatever else says `model_type: llama`."""

from typing import Any

from levanter.compat.hf.families.base import ExpectedTensor, Family, Fields
from levanter.compat.hf.rope import read_rope
from levanter.models.llama.config import LlamaConfig

_OTHER_MODEL = "this Llama does not have it, so the model is of another kind than its model_type says"


def _read(fields: Fields) -> LlamaConfig | None:
    hidden = fields.size("hidden_size", required=True)
    intermediate = fields.size("intermediate_size", required=True)
    layers = fields.size("num_hidden_layers", required=True)
    heads = fields.size("num_attention_heads", required=True)
    vocab = fields.size("vocab_size", required=True)
    kv_heads = fields.size("num_key_value_heads", heads)
    head_dim = fields.get("head_dim", int)
    # Llama 1 conversions of early 2023 used the second name.
    context = fields.size("max_position_embeddings", fields.size("max_sequence_length", 2048))
    epsilon = fields.get("rms_norm_eps", float, 1e-6)
    activation = fields.get("hidden_act", str, "silu")
    tied = fields.get("tie_word_embeddings", bool, False)
    attention_bias = fields.get("attention_bias", bool, False)
    mlp_bias = fields.get("mlp_bias", bool, False)
    initializer_range = fields.get("initializer_range", float, 0.02)
    rope = read_rope(fields, max_position_embeddings=context)

    fields.forbid("rope_interleaved", [False], "interleaved rotary pairs are another layout of q and k")
    fields.forbid("quantization_config", [], "quantized weights are not read; dequantize the checkpoint first")
    fields.forbid("is_encoder_decoder", [False], "a decoder-only model is expected")
    for name in ("sliding_window", "clip_qkv", "final_logit_softcapping", "attn_logit_softcapping", "layer_types"):
        fields.forbid(name, [], _OTHER_MODEL)
    for name in ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"):
        fields.forbid(name, [1, 1.0], _OTHER_MODEL)
    for name in ("qk_norm", "use_qk_norm", "qk_layernorm", "alibi", "parallel_residual"):
        fields.forbid(name, [False], _OTHER_MODEL)
    for name in ("num_experts", "num_local_experts"):
        fields.forbid(name, [0, 1], _OTHER_MODEL)
    fields.note("attention_dropout", [0, 0.0], "dropout is left out (it matters in training only)")
    fields.note("pretraining_tp", [1], "matmuls are not split by it here, so sums round a little otherwise")
    fields.note("architectures", [None, ["LlamaForCausalLM"], ["LLaMAForCausalLM"]], "read as LlamaForCausalLM")
    fields.note("is_llama_config", [True], "a Llama is read all the same")
    fields.note("auto_map", [], "code that comes with a checkpoint is never run; its plain Llama is read")
    if fields.problems or rope is None:
        return None
    try:
        return LlamaConfig(
            max_seq_len=context,
            hidden_dim=hidden,
            intermediate_dim=intermediate,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            activation_function=activation,
            initializer_range=initializer_range,
            layer_norm_epsilon=epsilon,
            tie_word_embeddings=tied,
            attention_bias=attention_bias,
            mlp_bias=mlp_bias,
            rope=rope,
            vocab_size=vocab,
            reference_checkpoint=None,
        )
    except ValueError as error:
        fields.problems += str(error).split("\n")
        return None


def _write(config: LlamaConfig) -> dict[str, Any]:
    for name, plain in (
        ("use_qk_norm", False),
        ("hybrid_norm", False),
        ("input_embedding_norm", False),
        ("use_layer_norm_weight", True),
    ):
        if getattr(config, name) != plain:
            raise ValueError(f"model.{name} {getattr(config, name)} has no place in a Hugging Face Llama")
    if config.vocab_size is None:
        raise ValueError("model.vocab_size must be known to write config.json")
    return {
        "hidden_size": config.hidden_dim,
        "intermediate_size": config.intermediate_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.HeadSize.size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.layer_norm_epsilon,
        "hidden_act": config.activation_function,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.has_attention_bias,
        "mlp_bias": config.has_mlp_bias,
        "initializer_range": config.initializer_range,
        "attention_dropout": 0.0,
        "pretraining_tp": 1,
        "use_cache": True,
    }


def _shapes(config: LlamaConfig) -> tuple[ExpectedTensor, ...]:
    hidden, mlp, head = config.hidden_dim, config.intermediate_dim, config.HeadSize.size
    q, kv, vocab = config.num_heads * head, config.num_kv_heads * head, config.vocab_size
    assert vocab is not None
    words = {
        "hidden": f"hidden_size {hidden}",
        "mlp": f"intermediate_size {mlp}",
        "q": f"num_attention_heads {config.num_heads} × head_dim {head}",
        "kv": f"num_key_value_heads {config.num_kv_heads} × head_dim {head}",
        "vocab": f"vocab_size {vocab}",
    }
    sizes = {"hidden": hidden, "mlp": mlp, "q": q, "kv": kv, "vocab": vocab}

    def tensor(template: str, *axes: str, layers: int = 0, optional: bool = False) -> ExpectedTensor:
        reason = " by ".join(words[axis] for axis in axes)
        return ExpectedTensor(template, tuple(sizes[axis] for axis in axes), reason, optional, layers)

    found = [tensor("model.embed_tokens.weight", "vocab", "hidden"), tensor("model.norm.weight", "hidden")]
    # A tied head may be stored a second time; it must then have the right shape.
    found.append(tensor("lm_head.weight", "vocab", "hidden", optional=config.tie_word_embeddings))
    block = "model.layers.{}."
    for name, out, in_ in (
        ("self_attn.q_proj", "q", "hidden"),
        ("self_attn.k_proj", "kv", "hidden"),
        ("self_attn.v_proj", "kv", "hidden"),
        ("self_attn.o_proj", "hidden", "q"),
        ("mlp.gate_proj", "mlp", "hidden"),
        ("mlp.up_proj", "mlp", "hidden"),
        ("mlp.down_proj", "hidden", "mlp"),
    ):
        found.append(tensor(f"{block}{name}.weight", out, in_, layers=config.num_layers))
        if config.has_mlp_bias if name.startswith("mlp.") else config.has_attention_bias:
            found.append(tensor(f"{block}{name}.bias", out, layers=config.num_layers))
    for name in ("input_layernorm", "post_attention_layernorm"):
        found.append(tensor(f"{block}{name}.weight", "hidden", layers=config.num_layers))
    return tuple(found)


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    config_class=LlamaConfig,
    read=_read,
    write=_write,
    shapes=_shapes,
    architecture_fields=(
        "hidden_dim",
        "intermediate_dim",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "activation_function",
        "layer_norm_epsilon",
        "tie_word_embeddings",
        "use_bias",
        "attention_bias",
        "mlp_bias",
        "use_qk_norm",
        "hybrid_norm",
        "input_embedding_norm",
        "use_layer_norm_weight",
        "vocab_size",
        "rope",
    ),
)
