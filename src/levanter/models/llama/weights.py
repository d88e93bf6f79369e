"""Weight rules of Llama in Hugging Face checkpoints, and of families with the same tensor names."""

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
    """The weight rules of a Llama with this config.

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
        # An option of upstream; Hugging Face's own Llama has no such norm.
        more.append(WeightRule(target="embeddings.norm.weight", source="model.embed_norm.weight", axes=(EMBED,)))
    return decoder_rules(config, Vocab, block, more=more)
