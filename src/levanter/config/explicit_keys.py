"""The keys that the user wrote, as opposed to defaults of the same value.

The config of a checkpoint replaces values that the user did not write and must agree with those that the user wrote.
`ExplicitKeys` is a separate value that is passed together with the config; the config itself records nothing, so a copy
of it loses nothing.
"""

from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any

from levanter.config.upstream.unsupported import NotCarried


@dataclass(frozen=True)
class ExplicitKeys:
    """The keys of a configuration that were written down, as dotted paths; a block's own key is among them.

    Attributes:
        keys: `trainer`, `trainer.mesh`, `trainer.mesh.axes`, …
        not_carried: unsupported options of upstream that the document requests: refused, or without effect.
    """

    keys: frozenset[str]
    not_carried: tuple[NotCarried, ...] = ()

    @classmethod
    def in_python(cls, config: object) -> "ExplicitKeys":
        """Of a config that was made in Python: the fields that differ from their defaults, at every depth."""
        return cls(frozenset(_differing(config, "")))

    def __contains__(self, key: str) -> bool:
        return key in self.keys

    @property
    def top(self) -> frozenset[str]:
        """The keys that were written at the top."""
        return frozenset(key for key in self.keys if "." not in key)

    def below(self, block: str) -> frozenset[str]:
        """The keys that were written directly in a block, by their own names."""
        prefix = f"{block}."
        return ExplicitKeys(frozenset(key.removeprefix(prefix) for key in self.keys if key.startswith(prefix))).top


def _differing(config: object, prefix: str) -> Iterator[str]:
    assert is_dataclass(config) and not isinstance(config, type)
    for config_field in fields(config):
        value, path = getattr(config, config_field.name), f"{prefix}{config_field.name}"
        # A value that equals its default counts as not written: in Python there is no other evidence.
        if value != _default(config_field):
            yield path
        if is_dataclass(value) and not isinstance(value, type):
            yield from _differing(value, f"{path}.")


def _default(config_field: Field[Any]) -> object:
    if config_field.default is not MISSING:
        return config_field.default
    # MISSING equals no value, so a field without a default always counts as written.
    return MISSING if config_field.default_factory is MISSING else config_field.default_factory()
