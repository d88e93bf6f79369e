"""Weights of Gemma 2 and 3 in Hugging Face checkpoints. Those of Gemma 1 are Llama's."""

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
from levanter.models.gemma.config import Gemma2Config

NORMS = {
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "post_attn_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
"""Our name of a norm's place → its name in the checkpoint. Theirs says what comes before a norm, or what follows it."""


def rules(config: Gemma2Config, Vocab: Axis | None = None) -> WeightRules:
    """Where each leaf of a Gemma 2 or 3 comes from.

    The larger Gemma 3s are published together with a vision model: the text model's tensors are then a level deeper,
    and the others are left out.

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
    return decoder_rules(
        config,
        Vocab,
        block,
        aliases=(
            ("model.*", "language_model.model.*"),
            ("model.*", "model.language_model.*"),
            ("lm_head.*", "language_model.lm_head.*"),
        ),
        ignored=(
            "*vision_tower.*",
            "*multi_modal_projector.*",
            *(("language_model.lm_head.weight",) if config.tie_word_embeddings else ()),
        ),
    )
