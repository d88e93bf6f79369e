"""Llama's weights in Hugging Face checkpoints, and those of families that call everything the same."""

from haliax import Axis

from haliax_ext.rules import WeightRule, WeightRules
from levanter.models.decoder.weights import (
    ATTENTION,
    EMBED,
    FEED_FORWARD,
    attention_biases,
    decoder_rules,
    norms,
    projections,
    query_norms,
)
from levanter.models.llama.config import LlamaConfig


def rules(config: LlamaConfig, Vocab: Axis | None = None) -> WeightRules:
    """Where each leaf of a Llama with this config comes from.

    Args:
        config: the architecture.
        Vocab: the model's vocabulary axis; see `decoder_rules`.
    """
    block = [
        *projections(ATTENTION, biases=attention_biases(config)),
        *projections(FEED_FORWARD, biases=FEED_FORWARD if config.has_mlp_bias else ()),
        *norms(config),
        *query_norms(config),
    ]
    more = []
    if config.input_embedding_norm and config.use_layer_norm_weight:
        more.append(WeightRule(target="embeddings.norm.weight", source="model.embed_norm.weight", axes=(EMBED,)))
    return decoder_rules(config, Vocab, block, more=more)
