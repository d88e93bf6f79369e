"""SmolLM3: `model_type: smollm3`."""

from typing import Any

from levanter.models.config_json import ConfigJson, ConfigJsonReader, Spelling
from levanter.models.decoder.config_json import (
    NO_TOKENS,
    MissingFieldDefaults,
    layer_types,
    read_decoder,
    read_layer_types,
)
from levanter.models.decoder.model import DecoderLmHeadModel
from levanter.models.family import Family
from levanter.models.llama.config_json import write_llama
from levanter.models.llama.weights import rules
from levanter.models.smollm3.config import SmolLM3Config

_CLASS = "SmolLM3ForCausalLM"


def _read(fields: ConfigJsonReader) -> SmolLM3Config | None:
    interval = fields.size("no_rope_layer_interval", 4)
    layers = fields.size("num_hidden_layers", required=True)
    flags = fields.get("no_rope_layers", list)
    default_flags = [int((n + 1) % interval != 0) for n in range(layers)]
    # Read by `read_layer_types`, which needs the config's own pattern.
    fields.seen.add("layer_types")
    config = read_decoder(
        fields,
        SmolLM3Config,
        name="SmolLM3",
        transformers_class=_CLASS,
        absent=MissingFieldDefaults(kv_heads=4, context=32768, tied=True, theta=2_000_000.0),
        no_rope_layer_interval=interval,
        # The default pattern stays None, so that it follows a changed number of layers.
        no_rope_layers=None if flags is None or list(flags) == default_flags else tuple(flags),
        use_sliding_window=fields.get("use_sliding_window", bool, False),
        sliding_window=fields.get("sliding_window", int),
    )
    return read_layer_types(fields, config)


def _write(config: SmolLM3Config, spelling: Spelling) -> dict[str, Any]:
    return (
        write_llama(config, spelling, name="SmolLM3")
        | NO_TOKENS
        | {
            # Always written: transformers reads the flags first and the interval only without them.
            "no_rope_layers": [int(config.rotary(n) is not None) for n in range(config.num_layers)],
            "no_rope_layer_interval": config.no_rope_layer_interval,
            "use_sliding_window": config.use_sliding_window,
            "sliding_window": config.sliding_window,
            "layer_types": layer_types(config),
        }
    )


SMOLLM3 = Family(
    name="smollm3",
    config_class=SmolLM3Config,
    build=DecoderLmHeadModel.init,
    weight_rules=rules,
    config_json=(ConfigJson(model_type="smollm3", transformers_class=_CLASS, read=_read, write=_write),),
)
