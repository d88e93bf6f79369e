"""Keys of `model:` whose default differs from upstream's: ours is the published model's value.

Upstream's configs of these families inherit the defaults of another model (Gemma 2 and 3 have the sizes of Gemma 2B).
A plan notes each such key that a config omits, with both values; an explicit key, or a checkpoint's config, gives no
note.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import yaml

from levanter.config import plain
from levanter.models.registry import LmConfig
from levanter.runplan import Check

_ROPE: Mapping[str, Any] = {"theta": 10000, "factor": 1.0, "type": "default"}

UPSTREAM: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {
        "hidden_dim": 2048,
        "intermediate_dim": 16384,
        "num_layers": 18,
        "num_kv_heads": 1,
        "sliding_window": None,
    },
    "gemma3": {
        "max_seq_len": 8192,
        "hidden_dim": 2048,
        "intermediate_dim": 16384,
        "vocab_size": 256_000,
        "num_layers": 18,
        "num_kv_heads": 1,
        "rope": _ROPE,
        "sliding_window": None,
    },
    "mistral": {"layer_norm_epsilon": 1e-6},
    "olmo3": {"max_seq_len": 2048, "layer_norm_epsilon": 1e-5, "rope": _ROPE},
}
"""`model.type` → key → upstream's default."""


def changed_defaults(kind: str, keys: Collection[str]) -> Iterator[str]:
    """A line for each key that a `model:` block omits and whose default differs from upstream's.

    Args:
        kind: `type` of the block.
        keys: the keys that the block sets.
    """
    if kind not in UPSTREAM:
        return
    # The defaults of the family's config class.
    ours = plain(LmConfig.get_choice_class(kind)())
    for key, theirs in UPSTREAM[kind].items():
        if key not in keys:
            yield (
                f"model.{key} is not set: {format_value(ours[key])} here ({kind} as published), "
                f"{format_value(theirs)} upstream; set it to choose"
            )


def default_notes(model: LmConfig, keys: Collection[str]) -> list[Check]:
    """`changed_defaults` for a config, as notes of a plan."""
    kind = plain(model)["type"]
    return [Check(name="model", status="note", message=line) for line in changed_defaults(kind, keys)]


def format_value(value: object) -> str:
    """Formats a value on one line; of a RoPE config only the keys that upstream also has."""
    if isinstance(value, Mapping):
        # Our RoPE configs have more fields than upstream's.
        value = {key: value[key] for key in ("type", "theta", "factor")}
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000)
    # PyYAML ends a bare scalar with a document end marker.
    return text.strip().removesuffix("...").strip()
