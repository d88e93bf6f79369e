"""Gemma 1, 2 and 3: config.json (`model_type` gemma, gemma2, gemma3_text, and the text model of gemma3) and weight
rules.
"""

from typing import Any

from haliax import Axis

from haliax_ext.rules import WeightRules
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
from levanter.models.gemma.config import Gemma2Config, Gemma3Config, GemmaConfig
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
    """The gate's activation in Gemma 2 and 3, whose class in transformers ignores `hidden_act`."""
    activation: str = fields.get("hidden_activation", str, _GELU)
    fields.note("hidden_act", [activation], f"hidden_activation is read ({activation})")
    return activation


def _activation_of_1(fields: ConfigJsonReader) -> str:
    """The gate's activation in the first Gemma: its files say `gelu` but mean the tanh approximation.

    transformers 4 reads `hidden_activation`, transformers 5 `hidden_act`.
    """
    names = [fields.get(name, str) for name in ("hidden_activation", "hidden_act")]
    # A set: both fields may be present if they agree.
    activations = {_GELU if name == "gelu" else name for name in names if name is not None}
    if len(activations) > 1:
        fields.problems.append(
            f"hidden_activation is {names[0]!r} but hidden_act is {names[1]!r}; versions of transformers differ in "
            "which one they read"
        )
    return next(iter(activations), _GELU)


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
        # An explicit null means no window; a missing field means transformers' default of 4096.
        "sliding_window": fields.unless_null("sliding_window", int, 4096),
        "query_pre_attn_scalar": fields.get("query_pre_attn_scalar", float, 256.0),
    }


def _read_2(fields: ConfigJsonReader) -> Gemma2Config | None:
    more = _windowed(fields)
    for name, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
        more[name] = fields.unless_null(name, float, default)
    # `read_layer_types` reads it after the config exists; until then `forbid_foreign` must not refuse it.
    fields.seen.add("layer_types")
    config = read_decoder(
        fields,
        Gemma2Config,
        name="Gemma 2",
        transformers_class="Gemma2ForCausalLM",
        absent=MissingFieldDefaults(sizes=_SIZES, kv_heads=4, head_dim=256, context=8192, tied=True),
        activation=_activation(fields),
        biases=_BIASES,
        **more,
    )
    return read_layer_types(fields, config)


def _read_3(fields: ConfigJsonReader) -> Gemma3Config | None:
    more = _windowed(fields)
    fields.forbid("use_bidirectional_attention", [False], "only causal attention is supported here")
    fields.forbid("attn_logit_softcapping", [], "transformers reads it but does not apply it")
    more["final_logit_softcapping"] = fields.get("final_logit_softcapping", float)
    pattern = fields.get("sliding_window_pattern", int)
    # 6 is the default pattern of the class: None keeps the config equal to one that was read without the field.
    more["sliding_window_pattern"] = None if pattern == 6 else pattern
    fields.seen.add("layer_types")
    context = fields.size("max_position_embeddings", 131_072)
    whole, windowed = read_rope_by_layer_type(
        fields,
        max_position_embeddings=context,
        theta=1_000_000.0,
        theta_of_windows=fields.get("rope_local_base_freq", float, 10_000.0),
    )
    # Our config has only a base for these layers, so a scaling would be lost.
    if windowed is not None and windowed != DefaultRotaryConfig(theta=windowed.theta):
        fields.problems.append("rope_parameters.sliding_attention is scaled; no published Gemma 3 is")
    config = read_decoder(
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
    return read_layer_types(fields, config)


def _read_3_with_vision(fields: ConfigJsonReader) -> Gemma3Config | None:
    """The text model of a vision-language Gemma 3; fields about vision are skipped."""
    text = fields.get("text_config", dict, required=True)
    if text is None:
        return None
    for name in ("vision_config", "mm_tokens_per_image", "eoi_token_index", "boi_token_index", "image_token_index"):
        fields.seen.add(name)
    for name in ("boi_token_id", "eoi_token_id", "image_token_id", "tie_word_embeddings"):
        fields.seen.add(name)
    # The outer document has fields of any transformers config; those that change results are checked here, too.
    fields.forbid("per_layer_config", [{}], DIFFERENT_LAYERS)
    fields.forbid("is_encoder_decoder", [False], "a decoder-only model is expected")
    fields.note("architectures", [["Gemma3ForConditionalGeneration"]], "read as Gemma3ForConditionalGeneration")
    inner = ConfigJsonReader(
        # The outer document may set the tying; the text config wins if it has the field. `architectures` was checked
        # above, for the whole model.
        {"tie_word_embeddings": fields.document.get("tie_word_embeddings"), **text, "architectures": None},
        problems=fields.problems,
        findings=fields.findings,
    )
    config = _read_3(inner)
    inner.leftovers(HARMLESS)
    return config


def _write_1(config: GemmaConfig, spelling: Spelling) -> dict[str, Any]:
    if config.activation_function == "gelu":
        raise ValueError(f"model.activation_function 'gelu': in a Gemma's config.json it means {_GELU}")
    # Gemma 1's config.json has no query_pre_attn_scalar: only the default scale can be written.
    plain = {**PLAIN, "query_pre_attn_scalar": None}
    document = _renamed(write_llama(config, spelling, name="Gemma", plain=plain, biases=_BIASES))
    # transformers 4 reads `hidden_activation`, transformers 5 `hidden_act`: both are written.
    return document | {"hidden_act": document["hidden_activation"]}


def _renamed(document: dict[str, Any]) -> dict[str, Any]:
    """Renames the activation field as Gemmas name it."""
    activation = document.pop("hidden_act")
    # Our `gelu_new` is the same function as HF's `gelu_pytorch_tanh`.
    return document | {"hidden_activation": _GELU if activation == "gelu_new" else activation}


def _write_2(config: Gemma2Config, spelling: Spelling) -> dict[str, Any]:
    document = _renamed(write_llama(config, spelling, name="Gemma 2", biases=_BIASES))
    return document | _window_fields(config)


def _window_fields(config: Gemma2Config) -> dict[str, Any]:
    # In HF the field is required to be a number; None here means the head size.
    scalar = config.HeadSize.size if config.query_pre_attn_scalar is None else config.query_pre_attn_scalar
    return {
        # Published files have integers; 256.0 would be a needless difference.
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
    # In the flat spelling `rope_theta` is the base of the full layers only; see `write_rope_by_layer_type`.
    if spelling == "transformers4":
        document["rope_local_base_freq"] = config.rope_local_base_freq
    return document


NORMS = {
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "post_attn_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
"""Our name of a norm's place → its name in the checkpoint. Beware: their `post_attention_layernorm` norms attention's
output; ours is the one before the MLP, as in Llama."""


def rules(config: Gemma2Config, Vocab: Axis | None = None) -> WeightRules:
    """The weight rules of a Gemma 2 or 3.

    The larger Gemma 3s are published together with a vision model: the text model's tensors then have a longer prefix,
        and the vision tensors are ignored.

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
            # Prefixes of transformers 4 and 5, which changed the order of the two names.
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
        # The first entry is what an export writes: text only.
        ConfigJson(model_type="gemma3_text", transformers_class=_GEMMA_3, read=_read_3, write=_write_3),
        ConfigJson(model_type="gemma3", transformers_class=_GEMMA_3, read=_read_3_with_vision, write=_write_3),
    ),
)
