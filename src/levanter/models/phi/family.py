"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: `model_type: phi3`."""

from types import MappingProxyType
from typing import Any

from levanter.layers.rotary import LongRotaryConfig
from levanter.models.config_json import ConfigJson, ConfigJsonReader, Spelling
from levanter.models.decoder.config_json import NO_TOKENS, MissingFieldDefaults, read_decoder
from levanter.models.decoder.model import DecoderLmHeadModel
from levanter.models.decoder.rope_json import read_rope
from levanter.models.family import Family
from levanter.models.llama.config_json import write_llama
from levanter.models.phi.config import Phi3Config
from levanter.models.phi.weights import rules

_CLASS = "Phi3ForCausalLM"
_CONTEXT = 4096
_RENAMED = MappingProxyType({"su": "longrope", "yarn": "longrope"})
"""Early Phi-3 files use other names for LongRoPE."""


def _read(fields: ConfigJsonReader) -> Phi3Config | None:
    window = fields.get("sliding_window", int)
    context = fields.size("max_position_embeddings", _CONTEXT)
    original = fields.size("original_max_position_embeddings", _CONTEXT)
    rope = read_rope(
        fields, max_position_embeddings=context, partial=True, original=original, renamed=_RENAMED, only=("longrope",)
    )
    return read_decoder(
        fields,
        Phi3Config,
        name="Phi-3",
        transformers_class=_CLASS,
        absent=MissingFieldDefaults(context=_CONTEXT, epsilon=1e-5),
        rope=rope,
        reads_rope=True,
        biases=(),
        sliding_window=window,
    )


def _write(config: Phi3Config, spelling: Spelling) -> dict[str, Any]:
    document = write_llama(config, spelling, name="Phi-3", biases=(), partial=True) | NO_TOKENS
    document["sliding_window"] = config.sliding_window
    if isinstance(config.rope, LongRotaryConfig):
        document["original_max_position_embeddings"] = config.rope.original_max_position_embeddings
    return document


PHI_3 = Family(
    name="phi3",
    config_class=Phi3Config,
    build=DecoderLmHeadModel.init,
    weight_rules=rules,
    config_json=(ConfigJson(model_type="phi3", transformers_class=_CLASS, read=_read, write=_write),),
)
