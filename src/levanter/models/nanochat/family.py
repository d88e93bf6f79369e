"""The nanochat family: config.json and weight rules.

transformers' `NanoChat` is the form of October 2025. A model of that form is exported as one. Others are exported with
`model_type: levanter_nanochat`, a document of our own that transformers refuses: it would leave out the tables, scalars
and windows.
"""

import dataclasses
from typing import Any

from haliax import Axis

from haliax_ext.rules import WeightRule, WeightRules
from levanter.config.validators import FiniteFloat, PositiveFloat
from levanter.layers.layer import LayerSpec
from levanter.models.config_json import ConfigJson, ConfigJsonReader, Spelling
from levanter.models.decoder.config_json import EPSILON, NO_TOKENS, MissingFieldDefaults, read_decoder, write_sizes
from levanter.models.decoder.rope_json import write_rope
from levanter.models.decoder.weights import ATTENTION, EMBED, MLP, BlockTensor, decoder_rules, projections
from levanter.models.family import Family
from levanter.models.nanochat.config import PLAIN, NanochatConfig
from levanter.models.nanochat.initialization import initial_model

_CLASS = "NanoChatForCausalLM"
_TYPE, _EXTENDED = "nanochat", "levanter_nanochat"
_DEFAULTS = MissingFieldDefaults(
    sizes={
        "vocab_size": 50_304,
        "hidden_size": 768,
        "intermediate_size": 8192,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
    },
    activation="relu2",
)


def _read(fields: ConfigJsonReader) -> NanochatConfig | None:
    return _decoder(fields, _CLASS, **PLAIN)


def _decoder(fields: ConfigJsonReader, transformers_class: str, **more: Any) -> NanochatConfig | None:
    cap = fields.unless_null("final_logit_softcapping", PositiveFloat, 15.0)  # pyright: ignore[reportArgumentType]
    return read_decoder(
        fields,
        NanochatConfig,
        name="nanochat",
        transformers_class=transformers_class,
        absent=_DEFAULTS,
        biases=(),
        final_logit_softcapping=cap,
        **more,
    )


def _read_extended(fields: ConfigJsonReader) -> NanochatConfig | None:
    plain = NanochatConfig()
    more: dict[str, Any] = {}
    for name, kind in _EXTENDED_FIELDS.items():
        more[name] = fields.unless_null(name, kind, getattr(plain, name))
    for name in ("initial_stream_scales", "initial_x0_scales"):
        more[name] = tuple(fields.get(name, list, list(getattr(plain, name))))
    # Read as ours: a window that is null follows from the length of sequences.
    types = fields.get("layer_types", list)
    more["layer_types"] = None if types is None else tuple(types)
    return _decoder(fields, _EXTENDED, **more)


_EXTENDED_FIELDS: dict[str, Any] = {
    "pattern": str,
    "sliding_window": int,
    "window_divisor": int,
    "query_key_gain": PositiveFloat,
    "residual_scalars": bool,
    "value_embeddings": bool,
    "smear": bool,
    "backout": FiniteFloat,
}
"""Fields of our config that transformers' class does not have."""


def _write(config: NanochatConfig, spelling: Spelling) -> dict[str, Any]:
    document = write_sizes(config) | {
        "num_key_value_heads": config.num_kv_heads,
        EPSILON: config.layer_norm_epsilon,
        "attention_bias": False,
        "final_logit_softcapping": config.final_logit_softcapping,
    }
    if config.head_dim is not None:
        document["head_dim"] = config.head_dim
    document |= write_rope(config.rope, max_position_embeddings=config.max_seq_len, spelling=spelling) | NO_TOKENS
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if all(values[name] == value for name, value in PLAIN.items()) and config.layer_types is None:
        return document
    more = {name: values[name] for name in _EXTENDED_FIELDS}
    more |= {name: list(values[name]) for name in ("initial_stream_scales", "initial_x0_scales")}
    types = None if config.layer_types is None else list(config.layer_types)
    return document | more | {"model_type": _EXTENDED, "architectures": [_EXTENDED], "layer_types": types}


def rules(config: NanochatConfig, Vocab: Axis | None = None) -> WeightRules:
    """The weight rules of a nanochat: transformers' names, and names of ours for what its class does not have.

    Args:
        config: the architecture.
        Vocab: the model's vocabulary axis; see `decoder_rules`.
    """

    def block(spec: LayerSpec) -> list[BlockTensor]:
        tensors = [
            *projections(ATTENTION),
            BlockTensor(target="mlp.up_proj.weight", source="mlp.fc1.weight", axes=(MLP, EMBED)),
            BlockTensor(target="mlp.down_proj.weight", source="mlp.fc2.weight", axes=(EMBED, MLP)),
        ]
        if config.residual_scalars:
            tensors += [
                BlockTensor(target="residual.0.stream_scale", source="stream_scale", axes=()),
                BlockTensor(target="residual.0.x0_scale", source="x0_scale", axes=()),
            ]
        if getattr(spec.mixer, "value_embedding", None) is not None:
            tensors += [
                BlockTensor(
                    target="self_attn.value_embedding.table",
                    source="self_attn.value_embedding.table",
                    axes=(("table_row",), ("kv_head", "head_size")),
                ),
                BlockTensor(target="self_attn.value_embedding.gate.weight", axes=(("kv_head",), ("gate_channel",))),
            ]
        return tensors

    more = []
    if config.smear:
        more += [
            WeightRule(target="transformer.ends.smear.scale", source="model.smear.scale", axes=()),
            WeightRule(
                target="transformer.ends.smear.gate.weight", source="model.smear.gate.weight", axes=(("gate_channel",),)
            ),
        ]
    if config.backout is not None:
        more.append(WeightRule(target="transformer.ends.backout_scale", source="model.backout_scale", axes=()))
    return decoder_rules(config, Vocab, block, more=more)


NANOCHAT = Family(
    name="nanochat",
    config_class=NanochatConfig,
    build=initial_model,
    weight_rules=rules,
    config_json=(
        ConfigJson(model_type=_TYPE, transformers_class=_CLASS, read=_read, write=_write),
        ConfigJson(model_type=_EXTENDED, transformers_class=_EXTENDED, read=_read_extended, write=_write),
    ),
)
