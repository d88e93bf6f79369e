"""Writes config.json for families with Llama's fields: Llama's document with small changes."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from levanter.models.config_json import Spelling
from levanter.models.decoder.config_json import BIASES, EPSILON, write_sizes
from levanter.models.decoder.rope_json import write_rope
from levanter.models.llama.config import LlamaConfig

PLAIN: Mapping[str, Any] = MappingProxyType(
    {"use_qk_norm": False, "hybrid_norm": False, "input_embedding_norm": False, "use_layer_norm_weight": True}
)
"""Fields of ours that config.json cannot express, and the value that it implies."""


def write_llama(
    config: LlamaConfig,
    spelling: Spelling,
    *,
    name: str,
    plain: Mapping[str, Any] = PLAIN,
    biases: Sequence[str] = BIASES,
    partial: bool = False,
    with_rope: bool = True,
) -> dict[str, Any]:
    """The config.json fields of a family with Llama's fields.

    Args:
        config: our config, with its vocabulary size set.
        spelling: the version of transformers to write for.
        name: the family's name in messages.
        plain: our fields that its config.json cannot express, and the value that it implies.
        biases: those of `BIASES` that the family has.
        partial: whether the family can rotate a part of each head.
        with_rope: whether the rotary embeddings are written, the same for all layers.

    Raises:
        ValueError: the model has a part that a Hugging Face config cannot describe.
    """
    # An export that drops a setting would be another model: refuse instead.
    for name_, value in plain.items():
        if getattr(config, name_) != value:
            raise ValueError(f"model.{name_} {getattr(config, name_)} has no place in a Hugging Face {name}")
    # Our `use_bias` is both of HF's flags.
    has = {"attention_bias": config.has_attention_bias, "mlp_bias": config.has_mlp_bias}
    if unsupported := [bias for bias in BIASES if has[bias] and bias not in biases]:
        raise ValueError(f"model.{unsupported[0]} (or use_bias) has no place in a Hugging Face {name}")
    document = write_sizes(config) | {
        "num_key_value_heads": config.num_kv_heads,
        # Always written: transformers' default, hidden_size / heads, is wrong for several families.
        "head_dim": config.HeadSize.size,
        EPSILON: config.layer_norm_epsilon,
    }
    document |= {bias: has[bias] for bias in biases}
    if with_rope:
        document |= write_rope(
            config.rope, max_position_embeddings=config.max_seq_len, spelling=spelling, partial=partial
        )
    return document
