"""Weights of Mixtral, and of Qwen3 with experts, in Hugging Face checkpoints: each expert's matrix is a tensor."""

from haliax import Axis

from haliax_ext.rules import WeightRules
from levanter.models.decoder.config import DecoderConfig
from levanter.models.decoder.weights import (
    ATTENTION,
    EMBED,
    MLP,
    BlockTensor,
    attention_biases,
    decoder_rules,
    norms,
    projections,
    query_norms,
)
from levanter.models.mixtral.config import MixtralConfig, Qwen3MoeConfig


def mixtral_rules(config: MixtralConfig, Vocab: Axis | None = None) -> WeightRules:
    """Where each leaf of a Mixtral comes from.

    Args:
        config: the architecture.
        Vocab: the model's vocabulary axis; see `decoder_rules`.
    """
    return _rules(config, Vocab, "block_sparse_moe", gate="w1", up="w3", down="w2")


def qwen3_moe_rules(config: Qwen3MoeConfig, Vocab: Axis | None = None) -> WeightRules:
    """Where each leaf of a Qwen3 with experts comes from.

    Args:
        config: the architecture.
        Vocab: the model's vocabulary axis; see `decoder_rules`.
    """
    return _rules(config, Vocab, "mlp", gate="gate_proj", up="up_proj", down="down_proj")


def _rules(config: DecoderConfig, Vocab: Axis | None, part: str, *, gate: str, up: str, down: str) -> WeightRules:
    def of_experts(target: str, name: str, *axes: tuple[str, ...]) -> BlockTensor:
        return BlockTensor(target=f"mlp.{target}.weight", source=f"{part}.experts.{{expert}}.{name}.weight", axes=axes)

    block = [
        *projections(ATTENTION, biases=attention_biases(config)),
        BlockTensor(target="mlp.router.weight", source=f"{part}.gate.weight", axes=(("expert",), EMBED)),
        of_experts("gate_proj", gate, MLP, EMBED),
        of_experts("up_proj", up, MLP, EMBED),
        of_experts("down_proj", down, EMBED, MLP),
        *norms(config),
        *query_norms(config),
    ]
    return decoder_rules(config, Vocab, block)
