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
import jax.numpy as jnp
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
        earlier_embedded: the embedding of the last of `earlier_ids`, `[…, embed]`; None for whole sequences, and unless
            the config says that the ends of the stream read it.
    """

    mask: AttentionMask
    tables: RotaryTables
    positions: NamedArray | None = None
    new: NewPositions | None = None
    token_ids: NamedArray | None = None
    constants: Mapping[str, NamedArray] = eqx.field(default_factory=dict[str, NamedArray])
    earlier_ids: NamedArray | None = None
    earlier_embedded: NamedArray | None = None

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
        same_segment = self._same_segment(Pos, distance)
        return before if same_segment is None else hax.where(same_segment, before, NO_TOKEN)

    def _same_segment(self, Pos: Axis, distance: int) -> NamedArray | None:
        """Whether the token so many positions before a token is of the same segment; None without segments."""
        segments = self.segments
        if segments is None:
            return None
        # The first tokens of a segment follow tokens of another one, which they must not see.
        return (hax.roll(segments, distance, "position") == segments) & (hax.arange(Pos) >= distance)

    def embedded_before(self, x: NamedArray) -> NamedArray:
        """The embedding of the token before each token, `[…, position, embed]`; zeros where its sequence has none.

        Args:
            x: the embedded tokens, `[…, position, embed]`.
        """
        Pos = x.resolve_axis("position")
        trunks = self.mask.query_trunks
        if trunks is not None:
            return self._embedded_before_in_branches(x, trunks)
        if self.earlier_embedded is None:
            first = hax.zeros(tuple(axis for axis in x.axes if axis.name != "position"), dtype=x.dtype)
        else:
            assert self.earlier_ids is not None
            # A row that has no token yet has no embedding either, whatever was looked up for it.
            exists = self.earlier_ids[EARLIER, -1] != NO_TOKEN
            first = hax.where(exists, self.earlier_embedded.astype(x.dtype), jnp.zeros((), x.dtype))
        # A shift by one position: where positions are sharded, each shard sends its last token to the next one.
        joined = hax.concatenate("position", [first.broadcast_axis(Pos.resize(1)).rearrange(x.axes), x])
        before = joined["position", 0 : Pos.size]
        same_segment = self._same_segment(Pos, 1)
        return before if same_segment is None else hax.where(same_segment, before, jnp.zeros((), x.dtype))

    def _embedded_before_in_branches(self, x: NamedArray, trunks: NamedArray) -> NamedArray:
        """`embedded_before` where segments continue others, their trunks: a branch follows its trunk's last token."""
        segments = self.segments
        assert segments is not None
        Pos = x.resolve_axis("position")
        # Branches of one trunk lie one after the other, so before a branch's first token in the row is a token of
        # another branch. Comparing all pairs of positions costs less than the scores of one head.
        Other, index = Pos.alias("key_position"), hax.arange(Pos)
        others = segments.rename({"position": Other.name})
        before = hax.arange(Other).broadcast_axis(Pos) < index
        # The last position before a token that is of its segment; without any, the last one of its trunk.
        in_segment = hax.max(hax.where((others == segments) & before, hax.arange(Other), -1), Other)
        in_trunk = hax.max(hax.where((others == trunks) & before, hax.arange(Other), -1), Other)
        source = hax.where(in_segment >= 0, in_segment, in_trunk)
        moved = hax.take(x.rename({"position": Other.name}), Other, hax.where(source >= 0, source, 0))
        return hax.where(source >= 0, moved, jnp.zeros((), x.dtype)).rearrange(x.axes)
