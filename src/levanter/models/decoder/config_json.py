"""Reads what the config.json files of all decoder families share: sizes, and fields that must be absent or neutral.

`read_decoder` reads Llama's fields, under Llama's names. Every field that changes results in some other family and that
no reader has read is a problem. A family reads its own fields first and passes their values on.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

from levanter.config.validators import Epsilon, NonNegativeFloat
from levanter.layers.rotary import RotaryConfig
from levanter.models.config_json import ConfigJsonReader
from levanter.models.decoder.config import DecoderConfig
from levanter.models.decoder.pattern import FULL, SLIDING, WindowedConfig
from levanter.models.decoder.rope_json import DEFAULT_THETA, read_rope

C = TypeVar("C", bound=DecoderConfig)
W = TypeVar("W", bound=WindowedConfig)

# Values that leave a model unchanged differ by field: () allows null only, a
# factor may be 1, a switch may be false, a count of experts may be 0 or 1.
FOREIGN: Mapping[str, Sequence[Any]] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "sliding_window",
                "sliding_window_pattern",
                "layer_types",
                "clip_qkv",
                "final_logit_softcapping",
                "attn_logit_softcapping",
                "query_pre_attn_scalar",
                "rope_local_base_freq",
                "no_rope_layers",
                "no_rope_layer_interval",
                "attention_chunk_size",
                "kv_lora_rank",
                "q_lora_rank",
                "dual_chunk_attention_config",
                "text_config",
            ),
            (),
        ),
        **dict.fromkeys(
            (
                *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
                *("logit_scale", "routed_scaling_factor"),
            ),
            (1, 1.0),
        ),
        **dict.fromkeys(
            (
                "qk_norm",
                "use_qk_norm",
                "qk_layernorm",
                "alibi",
                "parallel_residual",
                "use_parallel_residual",
                "use_sliding_window",
                "use_bidirectional_attention",
                "mup",
            ),
            (False,),
        ),
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_nextn_predict_layers"), (0, 1)),
        **dict.fromkeys(("n_shared_experts", "shared_expert_intermediate_size", "first_k_dense_replace"), (0,)),
    }
)
"""Fields that change results in some family → values that change nothing. They must be neutral unless the family reads
them."""

DIFFERENT_LAYERS = "layers with settings of their own are not supported"
"""Why `per_layer_config`, which transformers 5 accepts for any family, is refused."""

BIASES = ("attention_bias", "mlp_bias")
"""What Llama's config.json says about biases. A family may have only some of these fields."""

EPSILON = "rms_norm_eps"
"""The field of most families for the epsilon of their norms."""


@dataclass(frozen=True, kw_only=True)
class MissingFieldDefaults:
    """The values of fields that a family's config.json lacks: transformers' own defaults.

    Attributes:
        sizes: of fields that are otherwise required.
        kv_heads: None is as many as query heads.
        head_dim: None is `hidden_size / num_attention_heads`.
        context: `max_position_embeddings`.
        epsilon: of the norms.
        activation: the gate's.
        tied: `tie_word_embeddings`.
        theta: `rope_theta`.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    kv_heads: int | None = None
    head_dim: int | None = None
    context: int = 2048
    epsilon: float = 1e-6
    activation: str = "silu"
    tied: bool = False
    theta: float = DEFAULT_THETA


def read_decoder(
    fields: ConfigJsonReader,
    config_class: type[C],
    *,
    name: str,
    transformers_class: str,
    absent: MissingFieldDefaults = MissingFieldDefaults(),
    epsilon_field: str = EPSILON,
    rope: RotaryConfig | None = None,
    reads_rope: bool = False,
    activation: str | None = None,
    biases: Sequence[str] = BIASES,
    **more: Any,
) -> C | None:
    """A decoder's config; None after a problem, which is then in `fields`.

    Args:
        fields: the document.
        config_class: the class of this package to build.
        name: the family's name in messages.
        transformers_class: the class in transformers that this is.
        absent: defaults of missing fields.
        epsilon_field: the family's field for the epsilon of its norms.
        rope: the rotary embeddings, if the family reads them.
        reads_rope: whether the family reads them, so that `rope` is used.
        activation: the gate's, if the family reads it.
        biases: those of `BIASES` that the family has, false by default.
        more: our fields that the family has read.
    """

    def size(name: str) -> int:
        # A size without a family default is required; the others fall back to transformers' class default.
        default = absent.sizes.get(name)
        return fields.size(name, default, required=default is None)

    hidden = size("hidden_size")
    intermediate = size("intermediate_size")
    layers = size("num_hidden_layers")
    heads = size("num_attention_heads")
    vocab = size("vocab_size")
    # In transformers a missing num_key_value_heads is the class default, or else one for each query head.
    kv_heads = fields.size("num_key_value_heads", absent.kv_heads or heads)
    head_dim = fields.get("head_dim", int, absent.head_dim)
    # Llama 1 conversions of early 2023 used the second name.
    context = fields.size("max_position_embeddings", fields.size("max_sequence_length", absent.context))
    epsilon = fields.get(epsilon_field, Epsilon, absent.epsilon)
    gate: str = activation or fields.get("hidden_act", str, absent.activation)
    tied = fields.get("tie_word_embeddings", bool, absent.tied)
    # A bias the family does not have must be false or absent: silently dropping stored biases would change results.
    for bias in BIASES:
        if bias in biases:
            more[bias] = fields.get(bias, bool, False)
        elif bias not in fields.seen:
            fields.forbid(bias, [False], f"a {name} does not have it")
    initializer_range = fields.get("initializer_range", NonNegativeFloat, 0.02)
    if not reads_rope:
        rope = read_rope(fields, max_position_embeddings=context, theta=absent.theta)

    fields.forbid("rope_interleaved", [False], "interleaved rotary pairs need a different layout of q and k")
    fields.forbid("quantization_config", [], "quantized weights are not read; dequantize the checkpoint first")
    fields.forbid("per_layer_config", [{}], DIFFERENT_LAYERS)
    fields.forbid("is_encoder_decoder", [False], "a decoder-only model is expected")
    forbid_foreign(fields, name=name, layers=layers)
    fields.note("attention_dropout", [0, 0.0], "dropout is ignored (it matters only in training)")
    for unread in ("embd_pdrop", "resid_pdrop"):
        fields.note(unread, [0, 0.0], "dropout is ignored (it matters only in training)")
    fields.note("pretraining_tp", [1], "matmuls are not split by it here, so sums round slightly differently")
    # A misspelling of early Llama conversions.
    known = [None, [transformers_class], [transformers_class.replace("Llama", "LLaMA")]]
    fields.note("architectures", known, f"read as {transformers_class}")
    fields.note("is_llama_config", [True], "it is read as a Llama all the same")
    fields.note("auto_map", [], f"code that comes with a checkpoint is never run; its plain {name} is read")
    if fields.problems or rope is None:
        return None
    try:
        return config_class(
            max_seq_len=context,
            hidden_dim=hidden,
            intermediate_dim=intermediate,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            activation_function=gate,
            initializer_range=initializer_range,
            layer_norm_epsilon=epsilon,
            tie_word_embeddings=tied,
            rope=rope,
            vocab_size=vocab,
            reference_checkpoint=None,
            **more,
        )
    except ValueError as error:
        fields.problems += str(error).split("\n")
        return None


def forbid_foreign(fields: ConfigJsonReader, *, name: str, layers: int) -> None:
    """Turns every field that changes numbers in some other family, and that no reader has read, into a problem."""
    for unread, harmless in FOREIGN.items():
        if unread not in fields.seen:
            other = f"this {name} does not have it, so the model is of a different kind than its model_type says"
            # layer_types is harmless only if it calls every layer a full-attention layer.
            fields.forbid(unread, [[FULL] * layers] if unread == "layer_types" else harmless, other)


def read_layer_types(fields: ConfigJsonReader, config: W | None) -> W | None:
    """`config` with the document's `layer_types`, if they differ from the family's own pattern."""
    types = fields.get("layer_types", list)
    if config is None or types is None:
        return config
    # The default pattern stays None in the config, so that it still adapts when a user changes num_layers.
    if list(types) == [config.default_layer_type(n) for n in range(config.num_layers)]:
        return config
    try:
        return dataclasses.replace(config, layer_types=tuple(types))
    except ValueError as error:
        fields.problems += str(error).split("\n")
        return None


def layer_types(config: WindowedConfig) -> list[str]:
    """`layer_types` for config.json, from each layer's window."""
    return [FULL if config.window(n) is None else SLIDING for n in range(config.num_layers)]


NO_TOKENS: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
"""For families whose transformers class defaults to the special tokens of one published tokenizer. Null prevents that
default; an export with a tokenizer overwrites them."""


def write_sizes(config: DecoderConfig) -> dict[str, Any]:
    """The config.json fields that every family writes under the same names."""
    return {
        "hidden_size": config.hidden_dim,
        "intermediate_size": config.intermediate_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "hidden_act": config.activation_function,
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
        "attention_dropout": 0.0,
        "use_cache": True,
    }
