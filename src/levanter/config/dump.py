"""The canonical dump: a configuration with every resolved value, as YAML that reads back to an equal one.

Fields are in the order of their classes, `type:` first. Nothing is omitted, so the dump of a run keeps its meaning when
a default changes later.
"""

import enum
from collections.abc import Mapping
from dataclasses import is_dataclass
from datetime import timedelta
from pathlib import PurePath
from typing import Any

import draccus
import yaml

from levanter.config.durations import format_duration
from levanter.config.schema import TYPE_KEY, config_fields, is_text_value, registered_name
from levanter.config.yaml_nodes import scalar_value

WIDTH = 110
_BREAKS = ("\x85", "\u2028", "\u2029", "\r")


def dump(config: object) -> str:
    """The YAML of a configuration.

    Raises:
        TypeError: a field holds a value that no YAML reads back to (our own bug).
    """
    return yaml.dump(plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=WIDTH)


def plain(value: object) -> Any:
    """A configuration as dicts, lists, strings, numbers and None, ready for YAML or JSON.

    >>> plain({"save_interval": timedelta(minutes=15), "steps": (1, 2)})
    {'save_interval': '15m', 'steps': [1, 2]}
    """
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, enum.Enum)):
        # A subclass of str has no YAML representation of its own.
        return str(value) if isinstance(value, str) else value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, timedelta):
        return format_duration(value)
    if isinstance(value, PurePath) or (is_text_value(type(value)) and not isinstance(value, Mapping)):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        # Choices name their type first, because it decides which other keys are valid.
        name = registered_name(type(value))
        type_entry = {} if name is None else {TYPE_KEY: name}
        return type_entry | {key: plain(getattr(value, key)) for key in config_fields(type(value))}
    if isinstance(value, Mapping):
        return {_key(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        # Sorted, so that equal configurations have equal dumps; by `repr`, because the items may be of several types.
        return sorted((plain(item) for item in value), key=repr)
    if draccus.encode.dispatch(type(value)) is not None:  # type: ignore[attr-defined]
        return draccus.encode(value)
    raise TypeError(f"a configuration cannot hold {value!r} of type {type(value).__name__}")


def _key(key: object) -> str | int | float:
    return key.name if isinstance(key, enum.Enum) else key if isinstance(key, (str, int, float)) else str(key)


class _Dumper(yaml.SafeDumper):
    """Quotes whatever this reader or a YAML 1.1 reader would take for something else than text."""

    def ignore_aliases(self, data: object) -> bool:
        del data
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        del indentless  # list items stand one step to the right of their key
        return super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = None
    if any(break_ in text for break_ in _BREAKS):
        style = '"'  # PyYAML folds these line breaks in every other style
    # Text that reads as a number, a boolean or null is quoted.
    elif not isinstance(scalar_value(text), str):
        style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
