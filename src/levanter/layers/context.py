"""`ForwardContext`: what a forward pass knows beside the residual stream; the same for all layers.

Every part of a layer may read it: mixers, feed-forward parts, residual rules. It is closed over by the scan over layers
and is not in its carry, so it is saved once for the backward pass and not once per layer.

A *constant* is an array that the pass computes once and later layers read: the embedded tokens, the output of a layer
in the middle. A config names those that its parts read in `captures` (`models.decoder.config`).
"""

import dataclasses
from collections.abc import Mapping

import equinox as eqx
import haliax as hax
from haliax import Axis, NamedArray

from levanter.layers.attention.kv_cache import NewPositions
from levanter.layers.attention.mask import AttentionMask
from levanter.layers.decode_state import EARLIER, NO_TOKEN

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
        earlier_ids: the ids before the first of `token_ids`, `[…, earlier]`, the oldest first; None for whole
            sequences.
    """

    mask: AttentionMask
    tables: RotaryTables
    positions: NamedArray | None = None
    new: NewPositions | None = None
    token_ids: NamedArray | None = None
    constants: Mapping[str, NamedArray] = eqx.field(default_factory=dict[str, NamedArray])
    earlier_ids: NamedArray | None = None

    @property
    def segments(self) -> NamedArray | None:
        """The segment of each token, `[…, position]`; None if every sequence is one."""
        return self.mask.query_segments

    def with_constants(self, constants: Mapping[str, NamedArray]) -> "ForwardContext":
        """This context with more constants."""
        return dataclasses.replace(self, constants={**self.constants, **constants}) if constants else self

    def ids_before(self, distance: int) -> NamedArray:
        """The id so many tokens before each token, `[…, position]`; `NO_TOKEN` where its sequence has none.

        It is the same whether a call has whole sequences, packed in segments or not, or continues them.

        Args:
            distance: at least 1, and while text is generated at most the model's `earlier_token_ids`.
        """
        ids, earlier = self.token_ids, self.earlier_ids
        assert ids is not None, "a part reads token ids, and `reads_token_ids` of its config is false"
        Pos = ids.resolve_axis("position")
        if earlier is None:
            earlier = hax.full(hax.eliminate_axes(ids.axes, "position"), NO_TOKEN, dtype=ids.dtype)
            earlier = earlier.broadcast_axis(Axis(EARLIER, distance))
        count = earlier.axis_size(EARLIER)
        assert 1 <= distance <= count, f"{distance} tokens before a token, and {count} are kept"
        joined = hax.concatenate("position", [earlier.rename({EARLIER: "position"}), ids])
        before = joined["position", hax.ds(count - distance, Pos.size)]
        segments = self.segments
        if segments is None:
            return before
        # The first tokens of a segment follow tokens of another one, which they must not see.
        moved = hax.roll(segments, distance, "position")
        same_segment = (moved == segments) & (hax.arange(Pos) >= distance)
        return hax.where(same_segment, before, NO_TOKEN)
