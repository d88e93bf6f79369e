"""OLMo 2 and OLMo 3: config.json and weight rules."""

from typing import Any

from haliax import Axis

from haliax_ext.rules import WeightRules
from levanter.layers.rotary import DefaultRotaryConfig
from levanter.models.config_json import ConfigJson, ConfigJsonReader, Spelling
from levanter.models.decoder.config_json import (
    NO_TOKENS,
    MissingFieldDefaults,
    layer_types,
    read_decoder,
    read_layer_types,
)
from levanter.models.decoder.model import DecoderLmHeadModel
from levanter.models.decoder.rope_json import read_rope_by_layer_type, write_rope_by_layer_type
from levanter.models.decoder.weights import (
    ATTENTION,
    FEED_FORWARD,
    attention_biases,
    decoder_rules,
    norms,
    projections,
    query_norms,
)
from levanter.models.family import Family
from levanter.models.llama.config_json import write_llama
from levanter.models.olmo.config import Olmo2Config, Olmo3Config

_THETA = 500_000.0
_BIASES = ("attention_bias",)


def _read_2(fields: ConfigJsonReader) -> Olmo2Config | None:
    return read_decoder(
        fields,
        Olmo2Config,
        name="OLMo 2",
        transformers_class="Olmo2ForCausalLM",
        absent=MissingFieldDefaults(epsilon=1e-5),
        biases=_BIASES,
    )


def _read_3(fields: ConfigJsonReader) -> Olmo3Config | None:
    # An explicit null means no window; a missing field means transformers' default.
    window = fields.unless_null("sliding_window", int, 4096)
    # Read by `read_layer_types` below, after the config exists.
    fields.seen.add("layer_types")
    context = fields.size("max_position_embeddings", 2048)
    flat = fields.get("rope_theta", float, _THETA)
    # A flat base is ambiguous for this family, and a wrong base would change results silently.
    if flat != _THETA and not fields.document.get("rope_parameters"):
        fields.problems.append(
            f"field 'rope_theta' is {flat}: versions of transformers differ in whether it applies to layers with a "
            "window too; write rope_parameters with both layer types"
        )
    whole, windowed = read_rope_by_layer_type(
        fields, max_position_embeddings=context, theta=_THETA, theta_of_windows=_THETA
    )
    # None, not an equal value, so that configs read from both spellings are equal.
    same = whole is not None and windowed == DefaultRotaryConfig(theta=whole.theta)
    config = read_decoder(
        fields,
        Olmo3Config,
        name="OLMo 3",
        transformers_class="Olmo3ForCausalLM",
        absent=MissingFieldDefaults(epsilon=1e-5),
        rope=whole,
        reads_rope=True,
        biases=_BIASES,
        rope_sliding=None if same else windowed,
        sliding_window=window,
    )
    return read_layer_types(fields, config)


def _write_2(config: Olmo2Config, spelling: Spelling) -> dict[str, Any]:
    return write_llama(config, spelling, name="OLMo 2", biases=_BIASES) | NO_TOKENS


def _write_3(config: Olmo3Config, spelling: Spelling) -> dict[str, Any]:
    document = write_llama(config, spelling, name="OLMo 3", biases=_BIASES, with_rope=False) | NO_TOKENS
    document |= {"sliding_window": config.sliding_window, "layer_types": layer_types(config)}
    return document | write_rope_by_layer_type(
        config.rope, config.rope_local, max_position_embeddings=config.max_seq_len, spelling=spelling
    )


# OLMo has no pre-norms, so the checkpoint's `post_attention_layernorm` is on attention's output, unlike Llama's.
NORMS = {"post_attn_layernorm": "post_attention_layernorm", "post_mlp_layernorm": "post_feedforward_layernorm"}
"""Our name of a norm's place → its name in the checkpoint."""


def rules(config: Olmo2Config, Vocab: Axis | None = None) -> WeightRules:
    """The weight rules of an OLMo 2 or 3.

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


OLMO_2 = Family(
    name="olmo2",
    config_class=Olmo2Config,
    build=DecoderLmHeadModel.init,
    weight_rules=rules,
    config_json=(ConfigJson(model_type="olmo2", transformers_class="Olmo2ForCausalLM", read=_read_2, write=_write_2),),
)
OLMO_3 = Family(
    name="olmo3",
    config_class=Olmo3Config,
    build=DecoderLmHeadModel.init,
    weight_rules=rules,
    config_json=(ConfigJson(model_type="olmo3", transformers_class="Olmo3ForCausalLM", read=_read_3, write=_write_3),),
)
