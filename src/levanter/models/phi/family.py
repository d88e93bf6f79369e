"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini (`model_type: phi3`): config.json and weight rules.

Their checkpoints fuse q, k and v into one tensor, and gate and up into another.
"""

from types import MappingProxyType
from typing import Any

from haliax import Axis

from haliax_ext.rules import FusedPart, WeightRules
from levanter.layers.rotary import LongRotaryConfig
from levanter.models.config_json import ConfigJson, ConfigJsonReader, Spelling
from levanter.models.decoder.config_json import NO_TOKENS, MissingFieldDefaults, read_decoder
from levanter.models.decoder.model import DecoderLmHeadModel
from levanter.models.decoder.rope_json import read_rope
from levanter.models.decoder.weights import (
    EMBED,
    KV_HEADS,
    MLP,
    Q_HEADS,
    BlockTensor,
    decoder_rules,
    norms,
    projections,
)
from levanter.models.family import Family
from levanter.models.llama.config_json import write_llama
from levanter.models.phi.config import Phi3Config

_CLASS = "Phi3ForCausalLM"
_CONTEXT = 4096
_RENAMED = MappingProxyType({"su": "longrope", "yarn": "longrope"})
"""Early Phi-3 files use other names for LongRoPE."""


def _read(fields: ConfigJsonReader) -> Phi3Config | None:
    window = fields.get("sliding_window", int)
    context = fields.size("max_position_embeddings", _CONTEXT)
    original = fields.size("original_max_position_embeddings", _CONTEXT)
    rope = read_rope(
        # transformers defaults the original context to 4096, whatever max_position_embeddings is.
        fields,
        max_position_embeddings=context,
        partial=True,
        original=original,
        renamed=_RENAMED,
        only=("longrope",),
    )
    return read_decoder(
        fields,
        Phi3Config,
        name="Phi-3",
        transformers_class=_CLASS,
        absent=MissingFieldDefaults(context=_CONTEXT, epsilon=1e-5),
        rope=rope,
        reads_rope=True,
        biases=(),
        sliding_window=window,
    )


def _write(config: Phi3Config, spelling: Spelling) -> dict[str, Any]:
    document = write_llama(config, spelling, name="Phi-3", biases=(), partial=True) | NO_TOKENS
    document["sliding_window"] = config.sliding_window
    if isinstance(config.rope, LongRotaryConfig):
        # transformers reads the original context from the top level in this family, not from the rotary block.
        document["original_max_position_embeddings"] = config.rope.original_max_position_embeddings
    return document


def rules(config: Phi3Config, Vocab: Axis | None = None) -> WeightRules:
    """The weight rules of a Phi-3.

    Args:
        config: the architecture; its projections have no biases.
        Vocab: the model's vocabulary axis; see `decoder_rules`.
    """
    head, mlp = config.HeadSize.size, config.intermediate_dim
    # Rows of qkv_proj: all query heads, then all key heads,
    # then all value heads. Rows of gate_up_proj: gate, then up.
    q, kv = config.num_heads * head, config.num_kv_heads * head

    def fused_tensor(source: str, target: str, axes: tuple[str, ...], start: int, size: int, of: int) -> BlockTensor:
        part = FusedPart(axis=0, start=start, size=size, of=of)
        return BlockTensor(target=f"{target}.weight", source=f"{source}.weight", axes=(axes, EMBED), part=part)

    block = [
        fused_tensor("self_attn.qkv_proj", "self_attn.q_proj", Q_HEADS, 0, q, q + 2 * kv),
        fused_tensor("self_attn.qkv_proj", "self_attn.k_proj", KV_HEADS, q, kv, q + 2 * kv),
        fused_tensor("self_attn.qkv_proj", "self_attn.v_proj", KV_HEADS, q + kv, kv, q + 2 * kv),
        fused_tensor("mlp.gate_up_proj", "mlp.gate_proj", MLP, 0, mlp, 2 * mlp),
        fused_tensor("mlp.gate_up_proj", "mlp.up_proj", MLP, mlp, mlp, 2 * mlp),
        *projections({"self_attn.o_proj": (EMBED, Q_HEADS), "mlp.down_proj": (EMBED, MLP)}),
        *norms(config),
    ]
    return decoder_rules(config, Vocab, block)


PHI_3 = Family(
    name="phi3",
    config_class=Phi3Config,
    build=DecoderLmHeadModel.init,
    weight_rules=rules,
    config_json=(ConfigJson(model_type="phi3", transformers_class=_CLASS, read=_read, write=_write),),
)
