"""The Mistral family: Mistral 7B and other models with `model_type: mistral`."""

from typing import Any

from levanter.models.config_json import ConfigJson, ConfigJsonReader, Spelling
from levanter.models.decoder.config_json import MissingFieldDefaults, read_decoder
from levanter.models.decoder.model import DecoderLmHeadModel
from levanter.models.family import Family
from levanter.models.llama.config_json import write_llama
from levanter.models.llama.weights import rules
from levanter.models.mistral.config import MistralConfig

_CLASS = "MistralForCausalLM"


def _read(fields: ConfigJsonReader) -> MistralConfig | None:
    return read_decoder(
        fields,
        MistralConfig,
        name="Mistral",
        transformers_class=_CLASS,
        absent=MissingFieldDefaults(kv_heads=8, context=131_072),
        biases=(),
        # v0.1's files have 4096, v0.2's an explicit null; a missing field is transformers' default.
        sliding_window=fields.unless_null("sliding_window", int, 4096),
    )


def _write(config: MistralConfig, spelling: Spelling) -> dict[str, Any]:
    document = write_llama(config, spelling, name="Mistral", biases=())
    return document | {"sliding_window": config.sliding_window}


MISTRAL = Family(
    name="mistral",
    config_class=MistralConfig,
    build=DecoderLmHeadModel.init,
    weight_rules=rules,
    config_json=(ConfigJson(model_type="mistral", transformers_class=_CLASS, read=_read, write=_write),),
)
