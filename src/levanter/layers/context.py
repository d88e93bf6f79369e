"""`MixerContext`: the inputs of a forward pass that all mixers of a stack share, besides activations."""

from collections.abc import Mapping

import equinox as eqx
from haliax import NamedArray

from levanter.layers.attention.kv_cache import NewPositions
from levanter.layers.attention.mask import AttentionMask

RotaryTables = Mapping[str, tuple[NamedArray, NamedArray]]
"""Name of a rotary table, as layers refer to it → cosines and sines (`RotaryConfig.tables`)."""


class MixerContext(eqx.Module):
    """The inputs that are the same for all layers of a forward pass.

    A mixer is called as `mixer(x, context, state)` and returns its output and its new state. The state is what a layer
    keeps from one call to the next (keys and values, a recurrence); it is None if a call has the whole sequence.

    Attributes:
        mask: which positions see which.
        tables: the rotary tables for these positions.
        positions: the position of each token, `[…, position]`; None if it is the index.
        new: the cache positions of the tokens; None if a call has whole sequences.
    """

    mask: AttentionMask
    tables: RotaryTables
    positions: NamedArray | None = None
    new: NewPositions | None = None
