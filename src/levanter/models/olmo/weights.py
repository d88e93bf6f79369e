"""Weights of OLMo 2 and 3 in Hugging Face checkpoints."""

from haliax import Axis

from haliax_ext.rules import WeightRules
from levanter.models.decoder.weights import (
    ATTENTION,
    FEED_FORWARD,
    attention_biases,
    decoder_rules,
    norms,
    projections,
    query_norms,
)
from levanter.models.olmo.config import Olmo2Config

NORMS = {"post_attn_layernorm": "post_attention_layernorm", "post_mlp_layernorm": "post_feedforward_layernorm"}
"""Our name of a norm's place → its name in the checkpoint."""


def rules(config: Olmo2Config, Vocab: Axis | None = None) -> WeightRules:
    """Where each leaf of an OLMo 2 or 3 comes from.

    Args:
        config: the architecture.
        Vocab: the model's vocabulary axis; see `decoder_rules`.
    """
    block = [
        *projections(ATTENTION, biases=attention_biases(config)),
        *projections(FEED_FORWARD, biases=FEED_FORWARD if config.has_mlp_bias else ()),
        *norms(config, NORMS),
        *query_norms(config),
    ]
    return decoder_rules(config, Vocab, block)
