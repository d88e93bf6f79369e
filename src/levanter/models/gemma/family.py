"""Gemma 1, 2 and 3: `model_type` gemma, gemma2, gemma3_text, and the text model of gemma3."""

from typing import Any

from levanter.layers.rotary import DefaultRotaryConfig
from levanter.models.config_json import HARMLESS, ConfigJson, ConfigJsonReader, Spelling
from levanter.models.decoder.config_json import (
    DIFFERENT_LAYERS,
    MissingFieldDefaults,
    layer_types,
    read_decoder,
    read_layer_types,
)
from levanter.models.decoder.model import DecoderLmHeadModel
from levanter.models.decoder.rope_json import read_rope_by_layer_type, write_rope_by_layer_type
from levanter.models.family import Family
from levanter.models.gemma.config import Gemma2Config, Gemma3Config, GemmaConfig
from levanter.models.gemma.weights import rules
from levanter.models.llama.config_json import PLAIN, write_llama
from levanter.models.llama.weights import rules as llama_rules

_GEMMA_3 = "Gemma3ForCausalLM"
_GELU = "gelu_pytorch_tanh"
_BIASES = ("attention_bias",)
_SIZES = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}


def _activation(fields: ConfigJsonReader) -> str:
    """The gate's activation in Gemma 2 and 3, whose class in transformers does not look at `hidden_act`."""
    found: str = fields.get("hidden_activation", str, _GELU)
    fields.note("hidden_act", [found], f"hidden_activation is read ({found})")
    return found


def _activation_of_1(fields: ConfigJsonReader) -> str:
    """The gate's activation in the first Gemma: its files say `gelu`, and mean its tanh approximation.

    transformers 4 reads `hidden_activation`, transformers 5 `hidden_act`.
    """
    given = [fields.get(name, str) for name in ("hidden_activation", "hidden_act")]
    meant = {_GELU if name == "gelu" else name for name in given if name is not None}
    if len(meant) > 1:
        fields.problems.append(
            f"hidden_activation is {given[0]!r} but hidden_act is {given[1]!r}; versions of transformers differ in "
            "which one they read"
        )
    return next(iter(meant), _GELU)


def _read_1(fields: ConfigJsonReader) -> GemmaConfig | None:
    return read_decoder(
        fields,
        GemmaConfig,
        name="Gemma",
        transformers_class="GemmaForCausalLM",
        absent=MissingFieldDefaults(kv_heads=None, head_dim=256, context=8192, tied=True),
        activation=_activation_of_1(fields),
        biases=_BIASES,
    )


def _windowed(fields: ConfigJsonReader) -> dict[str, Any]:
    return {
        "sliding_window": fields.unless_null("sliding_window", int, 4096),
        "query_pre_attn_scalar": fields.get("query_pre_attn_scalar", float, 256.0),
    }


def _read_2(fields: ConfigJsonReader) -> Gemma2Config | None:
    more = _windowed(fields)
    for name, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
        more[name] = fields.unless_null(name, float, default)
    fields.seen.add("layer_types")
    found = read_decoder(
        fields,
        Gemma2Config,
        name="Gemma 2",
        transformers_class="Gemma2ForCausalLM",
        absent=MissingFieldDefaults(sizes=_SIZES, kv_heads=4, head_dim=256, context=8192, tied=True),
        activation=_activation(fields),
        biases=_BIASES,
        **more,
    )
    return read_layer_types(fields, found)


def _read_3(fields: ConfigJsonReader) -> Gemma3Config | None:
    more = _windowed(fields)
    fields.forbid("use_bidirectional_attention", [False], "only causal attention is supported here")
    fields.forbid("attn_logit_softcapping", [], "transformers reads it but does not apply it")
    more["final_logit_softcapping"] = fields.get("final_logit_softcapping", float)
    pattern = fields.get("sliding_window_pattern", int)
    more["sliding_window_pattern"] = None if pattern == 6 else pattern
    fields.seen.add("layer_types")
    context = fields.size("max_position_embeddings", 131_072)
    whole, windowed = read_rope_by_layer_type(
        fields,
        max_position_embeddings=context,
        theta=1_000_000.0,
        theta_of_windows=fields.get("rope_local_base_freq", float, 10_000.0),
    )
    if windowed is not None and windowed != DefaultRotaryConfig(theta=windowed.theta):
        fields.problems.append("rope_parameters.sliding_attention is scaled; no published Gemma 3 is")
    found = read_decoder(
        fields,
        Gemma3Config,
        name="Gemma 3",
        transformers_class=_GEMMA_3,
        absent=MissingFieldDefaults(
            sizes={**_SIZES, "vocab_size": 262_208}, kv_heads=4, head_dim=256, context=131_072, tied=True
        ),
        activation=_activation(fields),
        biases=_BIASES,
        rope=whole,
        reads_rope=True,
        rope_local_base_freq=10_000.0 if windowed is None else windowed.theta,
        **more,
    )
    return read_layer_types(fields, found)


def _read_3_with_vision(fields: ConfigJsonReader) -> Gemma3Config | None:
    """The text model of one that also sees; the rest of the document is about the other half."""
    text = fields.get("text_config", dict, required=True)
    if text is None:
        return None
    for name in ("vision_config", "mm_tokens_per_image", "eoi_token_index", "boi_token_index", "image_token_index"):
        fields.seen.add(name)
    for name in ("boi_token_id", "eoi_token_id", "image_token_id", "tie_word_embeddings"):
        fields.seen.add(name)
    fields.forbid("per_layer_config", [{}], DIFFERENT_LAYERS)
    fields.forbid("is_encoder_decoder", [False], "a decoder-only model is expected")
    fields.note("architectures", [["Gemma3ForConditionalGeneration"]], "read as Gemma3ForConditionalGeneration")
    inner = ConfigJsonReader(
        {"tie_word_embeddings": fields.document.get("tie_word_embeddings"), **text, "architectures": None},
        problems=fields.problems,
        findings=fields.findings,
    )
    found = _read_3(inner)
    inner.leftovers(HARMLESS)
    return found


def _write_1(config: GemmaConfig, spelling: Spelling) -> dict[str, Any]:
    if config.activation_function == "gelu":
        raise ValueError(f"model.activation_function 'gelu': in a Gemma's config.json it means {_GELU}")
    plain = {**PLAIN, "query_pre_attn_scalar": None}
    document = _renamed(write_llama(config, spelling, name="Gemma", plain=plain, biases=_BIASES))
    # The first Gemma's own field is this one; both are read by one version of transformers or the other.
    return document | {"hidden_act": document["hidden_activation"]}


def _renamed(document: dict[str, Any]) -> dict[str, Any]:
    """The fields that Gemmas call otherwise."""
    activation = document.pop("hidden_act")
    return document | {"hidden_activation": _GELU if activation == "gelu_new" else activation}


def _write_2(config: Gemma2Config, spelling: Spelling) -> dict[str, Any]:
    document = _renamed(write_llama(config, spelling, name="Gemma 2", biases=_BIASES))
    return document | _window_fields(config)


def _window_fields(config: Gemma2Config) -> dict[str, Any]:
    scalar = config.HeadSize.size if config.query_pre_attn_scalar is None else config.query_pre_attn_scalar
    return {
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
        "sliding_window": config.sliding_window,
        "layer_types": layer_types(config),
    }


def _write_3(config: Gemma3Config, spelling: Spelling) -> dict[str, Any]:
    plain = {**PLAIN, "use_qk_norm": True, "attn_logit_softcapping": None}
    document = _renamed(write_llama(config, spelling, name="Gemma 3", plain=plain, biases=_BIASES, with_rope=False))
    document |= _window_fields(config)
    document |= write_rope_by_layer_type(
        config.rope, config.rope_local, max_position_embeddings=config.max_seq_len, spelling=spelling
    )
    if spelling == "transformers4":
        document["rope_local_base_freq"] = config.rope_local_base_freq
    return document


GEMMA_1 = Family(
    name="gemma",
    config_class=GemmaConfig,
    build=DecoderLmHeadModel.init,
    weight_rules=llama_rules,
    config_json=(ConfigJson(model_type="gemma", transformers_class="GemmaForCausalLM", read=_read_1, write=_write_1),),
)
GEMMA_2 = Family(
    name="gemma2",
    config_class=Gemma2Config,
    build=DecoderLmHeadModel.init,
    weight_rules=rules,
    config_json=(
        ConfigJson(model_type="gemma2", transformers_class="Gemma2ForCausalLM", read=_read_2, write=_write_2),
    ),
)
GEMMA_3 = Family(
    name="gemma3",
    config_class=Gemma3Config,
    build=DecoderLmHeadModel.init,
    weight_rules=rules,
    config_json=(
        # A Gemma 3 is written as text only.
        ConfigJson(model_type="gemma3_text", transformers_class=_GEMMA_3, read=_read_3, write=_write_3),
        ConfigJson(model_type="gemma3", transformers_class=_GEMMA_3, read=_read_3_with_vision, write=_write_3),
    ),
)
