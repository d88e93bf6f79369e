"""Llama 1 to 3.2, SmolLM2 and whatever else says `model_type: llama`."""

from typing import Any

from levanter.compat.hf.families.base import Family, Fields, Spelling
from levanter.compat.hf.families.decoder import read_decoder, write_decoder
from levanter.models.llama.config import LlamaConfig
from levanter.models.registry import LmConfig

_ARCHITECTURE = "LlamaForCausalLM"


def _read(fields: Fields) -> LmConfig | None:
    return read_decoder(fields, LlamaConfig, name="Llama", architecture=_ARCHITECTURE)


def _write(config: LlamaConfig, spelling: Spelling) -> dict[str, Any]:
    return write_decoder(config, spelling, name="Llama") | {"pretraining_tp": 1}


FAMILY = Family(
    model_type="llama",
    architecture=_ARCHITECTURE,
    config_class=LlamaConfig,
    read=_read,
    write=_write,
)
