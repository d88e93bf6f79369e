"""Qwen2 and Qwen2.5 (`model_type: qwen2`), and Qwen3 (`qwen3`)."""

import dataclasses
from types import MappingProxyType
from typing import Any

from levanter.compat.hf.families.base import Family, Fields, Spelling
from levanter.compat.hf.families.decoder import (
    PLAIN,
    Absent,
    expected_tensors,
    layer_types,
    read_decoder,
    read_layer_types,
    write_decoder,
)
from levanter.models.qwen.config import Qwen3Config, QwenConfig
from levanter.models.registry import LmConfig

_WINDOW = 4096
_FULL_LAYERS = 28


def _windows(fields: Fields) -> dict[str, Any]:
    used = fields.get("use_sliding_window", bool, False)
    found = {
        "use_sliding_window": used,
        # transformers: null is no window, absent is its default.
        "sliding_window": fields.get("sliding_window", int, None if "sliding_window" in fields.document else _WINDOW),
        "max_window_layers": fields.get("max_window_layers", int, _FULL_LAYERS),
    }
    # Numbers of a window that is not used mean nothing, and published files have all kinds of them.
    return found if used else {"use_sliding_window": False}


def _read_2(fields: Fields) -> LmConfig | None:
    windows = _windows(fields)
    fields.seen.add("layer_types")
    absent = Absent(context=32768)
    found = read_decoder(
        fields,
        QwenConfig,
        name="Qwen2",
        architecture="Qwen2ForCausalLM",
        absent=absent,
        biases=False,
        **windows,
    )
    return read_layer_types(fields, found)


def _read_3(fields: Fields) -> LmConfig | None:
    windows = _windows(fields)
    fields.seen.add("layer_types")
    fields.forbid("mlp_bias", [False], "a Qwen3 does not have it")
    found = read_decoder(
        fields,
        Qwen3Config,
        name="Qwen3",
        architecture="Qwen3ForCausalLM",
        absent=Absent(context=32768, head_dim=128),
        **windows,
    )
    return read_layer_types(fields, found)


def _write(config: QwenConfig | Qwen3Config, spelling: Spelling) -> dict[str, Any]:
    name = "Qwen2" if isinstance(config, QwenConfig) else "Qwen3"
    plain = MappingProxyType({**PLAIN, "mlp_bias": False, "use_bias": False})
    if isinstance(config, QwenConfig):
        plain = MappingProxyType({**plain, "attention_bias": False})
    document = write_decoder(config, spelling, name=name, plain=plain)
    document |= {
        "use_sliding_window": config.use_sliding_window,
        "sliding_window": config.sliding_window,
        "max_window_layers": config.max_window_layers,
        "layer_types": layer_types(config),
    }
    for field in ("mlp_bias", *(("attention_bias",) if name == "Qwen2" else ())):
        del document[field]
    return document


QWEN_2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    config_class=QwenConfig,
    read=_read_2,
    write=_write,
    shapes=expected_tensors,
)
QWEN_3 = dataclasses.replace(
    QWEN_2, model_type="qwen3", architecture="Qwen3ForCausalLM", config_class=Qwen3Config, read=_read_3
)
