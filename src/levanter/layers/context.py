"""`ForwardContext`: what a forward pass knows beside the residual stream; the same for all layers.

Every part of a layer may read it: mixers, feed-forward parts, residual rules. It is closed over by the scan over layers
and is not in its carry, so it is saved once for the backward pass and not once per layer.

A *constant* is an array that the pass computes once and later layers read: the embedded tokens, the output of a layer
in the middle. A config names those that its parts read in `captures` (`models.decoder.config`).
"""

import dataclasses
from collections.abc import Mapping

import equinox as eqx
from haliax import NamedArray

from levanter.layers.attention.kv_cache import NewPositions
from levanter.layers.attention.mask import AttentionMask

RotaryTables = Mapping[str, tuple[NamedArray, NamedArray]]
"""Name of a rotary table, as layers refer to it → cosines and sines (`RotaryConfig.tables`)."""


class ForwardContext(eqx.Module):
    """The inputs that are the same for all layers of a forward pass.

    A mixer is called as `mixer(x, context, state)` and returns its output and its new state. The state is what a layer
    keeps from one call to the next (keys and values, a recurrence); it is None if a call has the whole sequence.

    Attributes:
        mask: which positions see which.
        tables: the rotary tables for these positions.
        positions: the position of each token, `[…, position]`; None if it is the index.
        new: the cache positions of the tokens; None if a call has whole sequences.
        token_ids: the ids of the tokens, `[…, position]`; None unless the config says that some part reads them.
        constants: the arrays that the pass computed so far for later layers, by name.
    """

    mask: AttentionMask
    tables: RotaryTables
    positions: NamedArray | None = None
    new: NewPositions | None = None
    token_ids: NamedArray | None = None
    constants: Mapping[str, NamedArray] = eqx.field(default_factory=dict[str, NamedArray])

    @property
    def segments(self) -> NamedArray | None:
        """The segment of each token, `[…, position]`; None if every sequence is one."""
        return self.mask.query_segments

    def with_constants(self, constants: Mapping[str, NamedArray]) -> "ForwardContext":
        """This context with more constants."""
        return dataclasses.replace(self, constants={**self.constants, **constants}) if constants else self
