"""The Llama family: Llama 1 to 3.2, SmolLM2 and other models with `model_type: llama`."""

from typing import Any

from levanter.models.config_json import ConfigJson, ConfigJsonReader, Spelling
from levanter.models.decoder.config_json import read_decoder
from levanter.models.decoder.model import DecoderLmHeadModel
from levanter.models.family import Family
from levanter.models.llama.config import LlamaConfig
from levanter.models.llama.config_json import write_llama
from levanter.models.llama.weights import rules

_CLASS = "LlamaForCausalLM"


def _read(fields: ConfigJsonReader) -> LlamaConfig | None:
    return read_decoder(fields, LlamaConfig, name="Llama", transformers_class=_CLASS)


def _write(config: LlamaConfig, spelling: Spelling) -> dict[str, Any]:
    # Llama's files have it; 1 means that matmuls are not split.
    return write_llama(config, spelling, name="Llama") | {"pretraining_tp": 1}


LLAMA = Family(
    name="llama",
    config_class=LlamaConfig,
    build=DecoderLmHeadModel.init,
    weight_rules=rules,
    config_json=(ConfigJson(model_type="llama", transformers_class=_CLASS, read=_read, write=_write),),
)
