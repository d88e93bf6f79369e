"""`AttentionMask`: which keys a query may see, as a rule and not as an array.

The rule is the conjunction of its parts: causality, a sliding window, segments, and an explicit array. Backends ask for
the part they need: all of it at once (`materialize`), or a block of keys (`visible`). A query that sees no key at all
gets zeros from every backend.
"""

import dataclasses

import equinox as eqx
import haliax as hax
from haliax import Axis, NamedArray


class AttentionMask(eqx.Module):
    """A conjunction of visibility rules; the empty one shows everything.

    Attributes:
        segment_ids: `[…, position]`; queries see keys of their own segment.
        explicit: boolean `[…, position, key_position]`.
        is_causal: queries see keys at their own index and before.
        sliding_window: queries see keys less than this many places before them.
    """

    segment_ids: NamedArray | None = None
    explicit: NamedArray | None = None
    is_causal: bool = eqx.field(static=True, default=False)
    sliding_window: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"a sliding window holds at least one key, got {self.sliding_window}")

    @staticmethod
    def causal(*, sliding_window: int | None = None) -> "AttentionMask":
        """Queries see what is not after them."""
        return AttentionMask(is_causal=True, sliding_window=sliding_window)

    @staticmethod
    def of_array(visible: NamedArray) -> "AttentionMask":
        """Queries see where the boolean array `[…, position, key_position]` is true."""
        return AttentionMask(explicit=visible)

    def with_segment_ids(self, segment_ids: NamedArray) -> "AttentionMask":
        """This rule, and queries see only their own segment."""
        assert self.segment_ids is None, "this mask has segments already"
        return dataclasses.replace(self, segment_ids=segment_ids)

    def __and__(self, other: "AttentionMask") -> "AttentionMask":
        assert self.segment_ids is None or other.segment_ids is None, "both masks have segments"
        windows = [w for w in (self.sliding_window, other.sliding_window) if w is not None]
        return AttentionMask(
            segment_ids=other.segment_ids if self.segment_ids is None else self.segment_ids,
            explicit=_and(self.explicit, other.explicit),
            is_causal=self.is_causal or other.is_causal,
            sliding_window=min(windows, default=None),
        )

    def materialize(self, Pos: Axis, KeyPos: Axis) -> NamedArray | None:
        """The whole rule as a boolean array over `Pos` and `KeyPos`, or None if everything is visible."""
        segments = None if self.segment_ids is None else self.segment_ids.rename({Pos.name: KeyPos.name})
        return self.visible(hax.arange(Pos), hax.arange(KeyPos), key_segments=segments, explicit=self.explicit)

    def visible(
        self,
        queries: NamedArray,
        keys: NamedArray,
        *,
        key_segments: NamedArray | None,
        explicit: NamedArray | None,
    ) -> NamedArray | None:
        """The rule for some keys.

        Args:
            queries: indices of the queries, along one axis.
            keys: indices of the keys, along one axis of another name.
            key_segments: segments of these keys, where the mask has segments.
            explicit: the explicit part for these keys, where the mask has one.
        """
        (Keys,) = keys.axes
        rule = explicit
        if self.is_causal or self.sliding_window is not None:
            distance = queries.broadcast_axis(Keys).rearrange((..., Keys)) - keys
            if self.is_causal:
                rule = _and(rule, hax.named(distance.array >= 0, distance.axes))
            if self.sliding_window is not None:
                rule = _and(rule, hax.named(distance.array < self.sliding_window, distance.axes))
        if self.segment_ids is not None:
            assert key_segments is not None
            mine = self.segment_ids.broadcast_axis(Keys).rearrange((..., Keys))
            same = mine == key_segments
            assert isinstance(same, NamedArray)
            rule = _and(rule, same)
        return rule


def _and(a: NamedArray | None, b: NamedArray | None) -> NamedArray | None:
    if a is None or b is None:
        return b if a is None else a
    both = hax.logical_and(a, b)
    assert isinstance(both, NamedArray)
    return both
