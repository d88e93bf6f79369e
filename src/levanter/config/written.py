"""Which keys the user wrote: a default and the same value written down are equal, but they do not say the same.

A checkpoint's own config fills in what was not written and must agree with what was. The keys are kept beside the
dataclass's fields, so they take no part in equality, hashing or dumps, and `dataclasses.replace` forgets them.
"""

from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from typing import Any

_ATTRIBUTE = "_levanter_written_keys"


def remember_written(config: Any, keys: Iterable[str]) -> None:
    """Notes the keys that `config` was decoded from."""
    object.__setattr__(config, _ATTRIBUTE, frozenset(keys))


def written(config: Any) -> frozenset[str]:
    """The fields of a config dataclass that were written down.

    For a config that was made in Python: those that differ from their defaults.
    """
    noted = getattr(config, _ATTRIBUTE, None)
    if noted is not None:
        return noted
    return frozenset(one.name for one in fields(config) if getattr(config, one.name) != _default(one))


def _default(one: Field) -> Any:
    if one.default is not MISSING:
        return one.default
    return MISSING if one.default_factory is MISSING else one.default_factory()
