"""Which keys the user wrote: a default and the same value written down are equal, but they do not say the same.

A checkpoint's own config fills in what was not written and must agree with what was. `ExplicitKeys` is a value of its
own that goes wherever the config goes; nothing is kept in the config, so a copy of it loses nothing and knows nothing
more.
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
        not_carried: what was asked for by keys that no configuration has: refused, or without effect.
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
    for one in fields(config):
        value, path = getattr(config, one.name), f"{prefix}{one.name}"
        if value != _default(one):
            yield path
        if is_dataclass(value) and not isinstance(value, type):
            yield from _differing(value, f"{path}.")


def _default(one: Field[Any]) -> object:
    if one.default is not MISSING:
        return one.default
    return MISSING if one.default_factory is MISSING else one.default_factory()
