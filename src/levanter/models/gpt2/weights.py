"""Weights of GPT-2 in Hugging Face checkpoints: matrices are `[in, out]`, and q, k and v lie in one."""

from haliax import Axis

from haliax_ext.rules import FusedPart, WeightRule, WeightRules
from levanter.models.decoder.weights import (
    EMBED,
    KV_HEADS,
    MLP,
    Q_HEADS,
    BlockTensor,
    CheckpointNames,
    decoder_rules,
    norms,
)
from levanter.models.gpt2.config import Gpt2Config

NAMES = CheckpointNames(embedding="transformer.wte", layers="transformer.h", norm="transformer.ln_f")


def rules(config: Gpt2Config, Vocab: Axis | None = None) -> WeightRules:
    """Where each leaf of a GPT-2 comes from.

    Args:
        config: the architecture.
        Vocab: the model's vocabulary axis; see `decoder_rules`.
    """
    width = config.num_heads * config.HeadSize.size
    block = []

    def projection(
        target: str, source: str, In: tuple[str, ...], Out: tuple[str, ...], third: int | None = None
    ) -> None:
        def part(axis: int) -> FusedPart | None:
            return None if third is None else FusedPart(axis=axis, start=third * width, size=width, of=3 * width)

        tensor = BlockTensor(target=f"{target}.weight", source=f"{source}.weight", axes=(In, Out), part=part(1))
        block.append(tensor)
        if config.use_bias:
            block.append(BlockTensor(target=f"{target}.bias", source=f"{source}.bias", axes=(Out,), part=part(0)))

    projection("self_attn.q_proj", "attn.c_attn", EMBED, Q_HEADS, 0)
    projection("self_attn.k_proj", "attn.c_attn", EMBED, KV_HEADS, 1)
    projection("self_attn.v_proj", "attn.c_attn", EMBED, KV_HEADS, 2)
    projection("self_attn.o_proj", "attn.c_proj", Q_HEADS, EMBED)
    projection("mlp.up_proj", "mlp.c_fc", EMBED, MLP)
    projection("mlp.down_proj", "mlp.c_proj", MLP, EMBED)
    block += norms(config, {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"})
    positions = WeightRule(
        target="embeddings.position_embeddings.weight", source="transformer.wpe.weight", axes=(("position",), EMBED)
    )
    return decoder_rules(
        config,
        Vocab,
        block,
        names=NAMES,
        more=[positions],
        # OpenAI's own files were saved without the head.
        aliases=(("transformer.", ""),),
        ignored=("*.attn.bias", "*.attn.masked_bias"),
    )
