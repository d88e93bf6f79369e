"""Checks of unsupported options: each is an error or a note of the plan, never ignored silently.

There are two kinds. Planned options are keys of the configuration classes and are refused here if they are set.
Upstream's options that are not supported are in no class: `levanter.config.upstream.unsupported` reads them, and
`ExplicitKeys` keeps their values.
"""

from collections.abc import Mapping
from typing import Any

from levanter.config import ExplicitKeys
from levanter.config.upstream.unsupported import is_requested
from levanter.runplan import Check

_UPLOAD = "uploading is not supported; upload the folder afterwards"

REFUSED: Mapping[str, str] = {
    "peft_hf_upload": _UPLOAD,
    "merged_hf_upload": _UPLOAD,
    "labeled_eval": "evaluation by labels is not implemented yet; data.components with tags are evaluated one by one",
}
"""Key → the reason of the refusal if it is set (neither null, false nor `none`)."""


def unsupported_option_checks(config: Any, written: ExplicitKeys) -> list[Check]:
    """Errors for unsupported options that are set, and notes on keys without effect."""
    # Null, false and `none` ask for nothing.
    refused = [f"{key}: {why}" for key, why in REFUSED.items() if is_requested(_value(config, key))]
    refused += [row.message for row in written.not_carried if row.refused]
    checks = [Check(name="config", status="error", message=message, error=ValueError(message)) for message in refused]
    notes = [row.message for row in written.not_carried if not row.refused]
    return checks + [Check(name="config", status="note", message=message) for message in notes]


def _value(config: Any, key: str) -> Any:
    """The value at a dotted key; None if the configuration has no such key."""
    for part in key.split("."):
        config = config.get(part) if isinstance(config, Mapping) else getattr(config, part, None)
    return config
