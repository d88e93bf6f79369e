"""The kind of each layer, as a user may set it: a list of Hugging Face's names, or a pattern of letters.

    layer_types: [sliding_attention, sliding_attention, full_attention, …]     one word a layer
    pattern: SSSSSF                                                            repeated until every layer has a letter
    pattern: FF(SSF)                                                           only what is in parentheses is repeated

The last repetition may be cut off: 62 layers of `SSSSSF` end in `SS`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from haliax_ext.errors import nearest
from levanter.config.validators import PositiveInt
from levanter.models.decoder.config import DecoderConfig

_PATTERN = re.compile(r"(?P<once>[^()]*)\((?P<again>[^()]+)\)|(?P<all>[^()]+)")


def expand_pattern(pattern: str, *, kinds: Mapping[str, str], layers: int) -> tuple[str, ...]:
    """The kind of each layer.

    Args:
        pattern: letters; the part that is repeated in parentheses, or no parentheses to repeat all of them.
        kinds: letter → kind.
        layers: how many there are.

    Raises:
        ValueError: an unknown letter, misplaced parentheses, or more letters than layers.
    """
    match = _PATTERN.fullmatch(pattern)
    if match is None:
        raise ValueError(
            f"model.pattern {pattern!r}: expected letters, of which the last ones may be in parentheses to be "
            "repeated, e.g. SSSSSF or FF(SSF)"
        )
    once, again = (match["once"], match["again"]) if match["all"] is None else ("", match["all"])
    legend = ", ".join(f"{letter} {kind}" for letter, kind in kinds.items())
    if unknown := [letter for letter in dict.fromkeys(once + again) if letter not in kinds]:
        raise ValueError(f"model.pattern {pattern!r} has {', '.join(map(repr, unknown))}; letters are {legend}")
    if len(once + again) > layers:
        raise ValueError(f"model.pattern {pattern!r} has {len(once + again)} letters for model.num_layers {layers}")
    # Ceiling of the remaining layers over the period, then cut to length: the last repetition may be partial.
    letters = once + again * -(-(layers - len(once)) // len(again))
    return tuple(kinds[letter] for letter in letters[:layers])


def wrong_types(types: Sequence[str], *, kinds: Mapping[str, str], layers: int) -> list[str]:
    """The problems of a list of kinds, as messages."""
    names = list(kinds.values())
    problems = []
    for kind in dict.fromkeys(types):
        if kind not in names:
            close = nearest(kind, names)
            hint = f" (did you mean {' or '.join(close)}?)" if close else ""
            problems.append(f"model.layer_types has {kind!r}; a layer is {' or '.join(map(repr, names))}{hint}")
    if len(types) != layers:
        problems.append(f"model.layer_types has {len(types)} entries for model.num_layers {layers}")
    return problems


@dataclass(frozen=True, kw_only=True)
class PatternedConfig(DecoderConfig):
    """The config of a family whose layers are of several kinds.

    Attributes:
        layer_types: the kind of each layer; None for the kinds in `pattern`.
        pattern: the kinds as letters, repeated (see `models.decoder.pattern`); None for the family's own pattern.
    """

    layer_types: tuple[str, ...] | None = None
    pattern: str | None = None

    @property
    def kinds(self) -> Mapping[str, str]:
        """The letter of each kind that the family has, and its name in Hugging Face's words."""
        raise NotImplementedError

    def default_layer_type(self, layer: int) -> str:
        """The kind of a layer that the user has not set."""
        raise NotImplementedError

    def layer_type(self, layer: int) -> str:
        """The kind of a layer."""
        if self.layer_types is not None:
            return self.layer_types[layer]
        if self.pattern is not None:
            return expand_pattern(self.pattern, kinds=self.kinds, layers=self.num_layers)[layer]
        return self.default_layer_type(layer)

    @property
    def types(self) -> tuple[str, ...]:
        """The kind of every layer."""
        return tuple(self.layer_type(layer) for layer in range(self.num_layers))

    def _problems(self) -> list[str]:
        # Zero layers would make the patterns' own checks misleading; the base class reports the number.
        if self.num_layers < 1:
            return super()._problems()
        problems = []
        if self.layer_types is not None and self.pattern is not None:
            problems.append("model.layer_types and model.pattern both give the kinds of the layers; keep one")
        if self.layer_types is not None:
            problems += wrong_types(self.layer_types, kinds=self.kinds, layers=self.num_layers)
        if self.pattern is not None:
            try:
                expand_pattern(self.pattern, kinds=self.kinds, layers=self.num_layers)
            except ValueError as error:
                problems.append(str(error))
        # The base class builds every layer's spec, which needs valid
        # kinds: so problems of the pattern come first and alone.
        return problems or super()._problems()


FULL, SLIDING = "full_attention", "sliding_attention"
"""Hugging Face's names of layers that attend to all keys before them, and of layers that attend to the latest keys
only."""


@dataclass(frozen=True, kw_only=True)
class WindowedConfig(PatternedConfig):
    """The config of a family with some sliding-window layers.

    Attributes:
        sliding_window: how many keys a query of such a layer sees, itself included; None for all.
        layer_types: for each layer `full_attention` or `sliding_attention`; None for the kinds in `pattern`.
        pattern: F for `full_attention` and S for `sliding_attention`, repeated; None for the family's own pattern.
    """

    sliding_window: PositiveInt | None = None

    @property
    def kinds(self) -> Mapping[str, str]:
        return {"F": FULL, "S": SLIDING}

    def default_layer_type(self, layer: int) -> str:
        del layer
        return SLIDING if self.sliding_window is not None else FULL

    def window(self, layer: int) -> int | None:
        return self.sliding_window if self.layer_type(layer) == SLIDING else None

    def _problems(self) -> list[str]:
        problems = super()._problems()
        is_explicit = self.layer_types is not None or self.pattern is not None
        # A sliding layer without a window would silently attend to everything. The family's default pattern has no
        # such layers when sliding_window is null.
        if not problems and is_explicit and self.sliding_window is None and SLIDING in self.types:
            key = "layer_types" if self.pattern is None else "pattern"
            problems.append(f"model.{key} has sliding_attention, but model.sliding_window is null")
        return problems
