"""OLMo 2 and OLMo 3."""

from typing import Any

from levanter.compat.hf.families.base import Family, Fields, Spelling
from levanter.compat.hf.families.decoder import (
    NO_TOKENS,
    Absent,
    layer_types,
    read_decoder,
    read_layer_types,
    write_decoder,
)
from levanter.compat.hf.rope import read_rope_by_layer_type, write_rope_by_layer_type
from levanter.layers.rotary import DefaultRotaryConfig
from levanter.models.olmo.config import Olmo2Config, Olmo3Config
from levanter.models.registry import LmConfig

_THETA = 500_000.0
_BIASES = ("attention_bias",)


def _read_2(fields: Fields) -> LmConfig | None:
    return read_decoder(
        fields,
        Olmo2Config,
        name="OLMo 2",
        architecture="Olmo2ForCausalLM",
        absent=Absent(epsilon=1e-5),
        biases=_BIASES,
    )


def _read_3(fields: Fields) -> LmConfig | None:
    window = fields.unless_null("sliding_window", int, 4096)
    fields.seen.add("layer_types")
    context = fields.size("max_position_embeddings", 2048)
    flat = fields.get("rope_theta", float, _THETA)
    if flat != _THETA and not fields.document.get("rope_parameters"):
        fields.problems.append(
            f"field 'rope_theta' is {flat}: versions of transformers differ in whether layers with a window have it "
            f"too; write rope_parameters with both layer types"
        )
    whole, windowed = read_rope_by_layer_type(
        fields, max_position_embeddings=context, theta=_THETA, theta_of_windows=_THETA
    )
    same = whole is not None and windowed == DefaultRotaryConfig(theta=whole.theta)
    found = read_decoder(
        fields,
        Olmo3Config,
        name="OLMo 3",
        architecture="Olmo3ForCausalLM",
        absent=Absent(epsilon=1e-5),
        rope=whole,
        reads_rope=True,
        biases=_BIASES,
        rope_sliding=None if same else windowed,
        sliding_window=window,
    )
    return read_layer_types(fields, found)


def _write_2(config: Olmo2Config, spelling: Spelling) -> dict[str, Any]:
    return write_decoder(config, spelling, name="OLMo 2", biases=_BIASES) | NO_TOKENS


def _write_3(config: Olmo3Config, spelling: Spelling) -> dict[str, Any]:
    document = write_decoder(config, spelling, name="OLMo 3", biases=_BIASES, with_rope=False) | NO_TOKENS
    document |= {"sliding_window": config.sliding_window, "layer_types": layer_types(config)}
    return document | write_rope_by_layer_type(
        config.rope, config.rope_local, max_position_embeddings=config.max_seq_len, spelling=spelling
    )


OLMO_2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    config_class=Olmo2Config,
    read=_read_2,
    write=_write_2,
)
OLMO_3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    config_class=Olmo3Config,
    read=_read_3,
    write=_write_3,
)
