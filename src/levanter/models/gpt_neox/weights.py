"""Weights of GPT-NeoX in Hugging Face checkpoints: one tensor holds q, k and v of head after head."""

from haliax import Axis

from haliax_ext.rules import FusedPart, WeightRules
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
from levanter.models.gpt_neox.config import GptNeoxConfig

NAMES = CheckpointNames(
    embedding="gpt_neox.embed_in", layers="gpt_neox.layers", norm="gpt_neox.final_layer_norm", head="embed_out"
)


def rules(config: GptNeoxConfig, Vocab: Axis | None = None) -> WeightRules:
    """Where each leaf of a GPT-NeoX comes from.

    Args:
        config: the architecture.
        Vocab: the model's vocabulary axis; see `decoder_rules`.
    """
    head = config.HeadSize.size
    block = []

    def linear(
        target: str,
        source: str,
        Out: tuple[str, ...],
        In: tuple[str, ...],
        *,
        bias: bool,
        part: FusedPart | None = None,
    ) -> None:
        block.append(BlockTensor(target=f"{target}.weight", source=f"{source}.weight", axes=(Out, In), part=part))
        if bias:
            block.append(BlockTensor(target=f"{target}.bias", source=f"{source}.bias", axes=(Out,), part=part))

    for third, (name, axes) in enumerate({"q_proj": Q_HEADS, "k_proj": KV_HEADS, "v_proj": KV_HEADS}.items()):
        part = FusedPart(axis=0, start=third * head, size=head, of=3 * head, repeats_over=axes[:-1])
        linear(f"self_attn.{name}", "attention.query_key_value", axes, EMBED, bias=config.attention_bias, part=part)
    linear("self_attn.o_proj", "attention.dense", EMBED, Q_HEADS, bias=config.attention_bias)
    linear("mlp.up_proj", "mlp.dense_h_to_4h", MLP, EMBED, bias=True)
    linear("mlp.down_proj", "mlp.dense_4h_to_h", EMBED, MLP, bias=True)
    tied = config.tie_word_embeddings
    return decoder_rules(
        config,
        Vocab,
        [*block, *norms(config)],
        names=NAMES,
        # The bare transformer; transformers 5 calls the head as everywhere.
        aliases=(("gpt_neox.*", "*"), ("embed_out.weight", "lm_head.weight")),
        ignored=("*.attention.bias", "*.attention.masked_bias", *(("lm_head.weight",) if tied else ())),
    )
