"""Translates keywords of configuration classes from earlier generations to today's.

    TrainerConfig(tensor_parallel_axes=["mlp", "heads"], model_axis_size=2)      # today: mesh=MeshConfig(…)
    LlamaConfig(seq_len=2048)                                                   # today: max_seq_len=2048

The translation is the one that documents get (`levanter.config.upstream`); contradictions and unknown keywords stay
errors.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import yaml

from levanter.config import ConfigError, parse_text, plain
from levanter.config.upstream import old_keys, translate_plain
from levanter.config.upstream.unsupported import is_requested, unsupported_rows
from levanter.models.registry import LmConfig
from levanter.trainer.config import TrainerConfig
from levanter.upstream.imports import warn_once


def translate_keywords(cls: type, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Translates earlier keywords of `cls` to the current ones.

    Raises:
        ConfigError: a value cannot be understood, or contradicts another one.
        ValueError: a requested feature is not carried over, or two keywords set the same thing.
    """
    # Translation rules are written for documents, so they need the block that the class stands for.
    block = "model" if issubclass(cls, LmConfig) else "trainer" if issubclass(cls, TrainerConfig) else ""
    keys = _carried(cls, block, keys)
    if not block:
        return dict(keys)
    earlier = {name: value for name, value in keys.items() if name in old_keys((block,)) and name not in _known(cls)}
    if not earlier:
        return dict(keys)  # a misspelt keyword raises the class's own error
    # Dataclass values become plain mappings, as a document would hold them.
    old_values = {name: plain(value) if is_dataclass(value) else value for name, value in earlier.items()}
    document, translation = translate_plain({block: old_values}, source=f"{cls.__name__}(…)")
    if translation.problems:
        raise ConfigError(translation.problems)
    for change in translation.changes:
        warn_once(f"{cls.__name__}: {change.key}", f"{cls.__name__}: {change}", stacklevel=4)
    new: dict[str, Any] = document[block]
    if block == "trainer":
        # Parsed through TrainerConfig, so that nested blocks become the dataclasses that its constructor expects.
        read = parse_text(TrainerConfig, yaml.safe_dump(new), source=f"{cls.__name__}(…)")
        # Only the translated keys: the others must keep the caller's values or the class's defaults.
        new = {name: getattr(read, name) for name in new}
    today = {name: value for name, value in keys.items() if name not in earlier}
    if duplicates := sorted(set(today) & set(new)):
        raise ValueError(
            f"{cls.__name__}: {', '.join(duplicates)} and {', '.join(sorted(earlier))} set the same thing; keep one"
        )
    return {**today, **new}


def _carried(cls: type, block: str, keys: Mapping[str, Any]) -> Mapping[str, Any]:
    """Removes keywords that no class has any more.

    Raises:
        ValueError: one of them requests a feature that is not carried over.
    """
    known = _known(cls)
    rows = {name: row for name, row in unsupported_rows((block,) if block else (), known).items() if name in keys}
    # A keyword with a neutral value (false, 0, None) requests nothing and is dropped without a word.
    unsupported = [row for name, row in rows.items() if name not in known and is_requested(keys[name], row)]
    if refused := [row.message for row in unsupported if row.refused]:
        raise ValueError("\n".join(f"{cls.__name__}(…): {message}" for message in refused))
    for row in unsupported:
        warn_once(f"{cls.__name__}: {row.key}", f"{cls.__name__}(…): {row.message}", stacklevel=5)
    return {name: value for name, value in keys.items() if name not in rows or name in known}


def _known(cls: type) -> set[str]:
    return {one.name for one in fields(cls)}
