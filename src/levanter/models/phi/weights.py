"""Weights of Phi-3 and Phi-4 in Hugging Face checkpoints, where some projections lie in one tensor."""

from haliax import Axis

from haliax_ext.rules import FusedPart, WeightRules
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
from levanter.models.phi.config import Phi3Config


def rules(config: Phi3Config, Vocab: Axis | None = None) -> WeightRules:
    """Where each leaf of a Phi-3 comes from.

    Args:
        config: the architecture; its projections have no biases.
        Vocab: the model's vocabulary axis; see `decoder_rules`.
    """
    head, mlp = config.HeadSize.size, config.intermediate_dim
    q, kv = config.num_heads * head, config.num_kv_heads * head

    def part_of(source: str, target: str, axes: tuple[str, ...], start: int, size: int, of: int) -> BlockTensor:
        part = FusedPart(axis=0, start=start, size=size, of=of)
        return BlockTensor(target=f"{target}.weight", source=f"{source}.weight", axes=(axes, EMBED), part=part)

    block = [
        part_of("self_attn.qkv_proj", "self_attn.q_proj", Q_HEADS, 0, q, q + 2 * kv),
        part_of("self_attn.qkv_proj", "self_attn.k_proj", KV_HEADS, q, kv, q + 2 * kv),
        part_of("self_attn.qkv_proj", "self_attn.v_proj", KV_HEADS, q + kv, kv, q + 2 * kv),
        part_of("mlp.gate_up_proj", "mlp.gate_proj", MLP, 0, mlp, 2 * mlp),
        part_of("mlp.gate_up_proj", "mlp.up_proj", MLP, mlp, mlp, 2 * mlp),
        *projections({"self_attn.o_proj": (EMBED, Q_HEADS), "mlp.down_proj": (EMBED, MLP)}),
        *norms(config),
    ]
    return decoder_rules(config, Vocab, block)
