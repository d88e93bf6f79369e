"""The families Qwen2 and Qwen2.5 (`model_type: qwen2`), and Qwen3 (`qwen3`)."""

from typing import Any

from levanter.models.config_json import ConfigJson, ConfigJsonReader, Spelling
from levanter.models.decoder.config_json import MissingFieldDefaults, layer_types, read_decoder, read_layer_types
from levanter.models.decoder.model import DecoderLmHeadModel
from levanter.models.family import Family
from levanter.models.llama.config_json import write_llama
from levanter.models.llama.weights import rules
from levanter.models.qwen.config import Qwen3Config, QwenConfig

_WINDOW = 4096
_FULL_LAYERS = 28


def _windows(fields: ConfigJsonReader) -> dict[str, Any]:
    used = fields.get("use_sliding_window", bool, False)
    config = {
        "use_sliding_window": used,
        "sliding_window": fields.unless_null("sliding_window", int, _WINDOW),
        "max_window_layers": fields.get("max_window_layers", int, _FULL_LAYERS),
    }
    # An unused window's numbers have no effect, and published files hold all kinds of them: they are dropped.
    return config if used else {"use_sliding_window": False}


def _read_2(fields: ConfigJsonReader) -> QwenConfig | None:
    windows = _windows(fields)
    fields.seen.add("layer_types")
    absent = MissingFieldDefaults(context=32768)
    config = read_decoder(
        fields,
        QwenConfig,
        name="Qwen2",
        transformers_class="Qwen2ForCausalLM",
        absent=absent,
        biases=(),
        **windows,
    )
    return read_layer_types(fields, config)


def _read_3(fields: ConfigJsonReader) -> Qwen3Config | None:
    windows = _windows(fields)
    fields.seen.add("layer_types")
    config = read_decoder(
        fields,
        Qwen3Config,
        name="Qwen3",
        transformers_class="Qwen3ForCausalLM",
        # Qwen3's class defaults to head_dim 128 even where hidden_size / heads is something else.
        absent=MissingFieldDefaults(context=32768, head_dim=128),
        biases=("attention_bias",),
        **windows,
    )
    return read_layer_types(fields, config)


def _write(config: QwenConfig | Qwen3Config, spelling: Spelling) -> dict[str, Any]:
    name, biases = ("Qwen2", ()) if isinstance(config, QwenConfig) else ("Qwen3", ("attention_bias",))
    return write_llama(config, spelling, name=name, biases=biases) | {
        "use_sliding_window": config.use_sliding_window,
        "sliding_window": config.sliding_window,
        "max_window_layers": config.max_window_layers,
        # Written from each layer's window, since transformers derives
        # the pattern from the numbers only if this is absent.
        "layer_types": layer_types(config),
    }


QWEN_2 = Family(
    name="qwen",
    config_class=QwenConfig,
    build=DecoderLmHeadModel.init,
    weight_rules=rules,
    config_json=(ConfigJson(model_type="qwen2", transformers_class="Qwen2ForCausalLM", read=_read_2, write=_write),),
)
QWEN_3 = Family(
    name="qwen3",
    config_class=Qwen3Config,
    build=DecoderLmHeadModel.init,
    weight_rules=rules,
    config_json=(ConfigJson(model_type="qwen3", transformers_class="Qwen3ForCausalLM", read=_read_3, write=_write),),
)
