"""What every mixer of a stack reads beside its own activations, as one value."""

from collections.abc import Mapping

import equinox as eqx
from haliax import NamedArray

from levanter.layers.attention.kv_cache import NewPositions
from levanter.layers.attention.mask import AttentionMask

RotaryTables = Mapping[str, tuple[NamedArray, NamedArray]]
"""Cosines and sines (`RotaryConfig.tables`) by the names that layers know them by."""


class MixerContext(eqx.Module):
    """What is the same for all layers of a forward pass.

    A mixer is called as `mixer(x, context, state)` and returns what it mixed and its new state. The state is what a
    layer remembers from one call to the next (keys and values, a recurrence); it is None where a call sees the whole
    sequence, and then costs nothing.

    Attributes:
        mask: which positions see which.
        tables: the rotary tables of these positions.
        positions: the position of each token, `[…, position]`; None where it is its index.
        new: where the tokens belong in what layers remember; None where a call sees whole sequences.
    """

    mask: AttentionMask
    tables: RotaryTables
    positions: NamedArray | None = None
    new: NewPositions | None = None
