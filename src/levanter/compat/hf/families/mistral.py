"""Mistral 7B and whatever else says `model_type: mistral`."""

from typing import Any

from levanter.compat.hf.families.base import Family, Fields, Spelling
from levanter.compat.hf.families.decoder import Absent, read_decoder, write_decoder
from levanter.models.mistral.config import MistralConfig
from levanter.models.registry import LmConfig

_ARCHITECTURE = "MistralForCausalLM"


def _read(fields: Fields) -> LmConfig | None:
    return read_decoder(
        fields,
        MistralConfig,
        name="Mistral",
        architecture=_ARCHITECTURE,
        absent=Absent(kv_heads=8, context=131_072),
        biases=(),
        sliding_window=fields.unless_null("sliding_window", int, 4096),
    )


def _write(config: MistralConfig, spelling: Spelling) -> dict[str, Any]:
    document = write_decoder(config, spelling, name="Mistral", biases=())
    return document | {"sliding_window": config.sliding_window}


FAMILY = Family(
    model_type="mistral",
    architecture=_ARCHITECTURE,
    config_class=MistralConfig,
    read=_read,
    write=_write,
)
