"""`AttentionMask`: which keys a query may see, as a rule instead of an array.

The mask is the conjunction of causality, a sliding window, segments, and an explicit array. Causality and windows
compare *positions*. By default the position of a query or a key is its index, which backends know at compile time.
Positions given as arrays may be in any order, start anywhere and differ between rows, and the numbers of queries and
keys may differ.

Backends materialize the whole mask (`materialize`) or evaluate it for a block of keys (`visible`). A query that sees no
key gets zeros from every backend.
"""

import dataclasses

import equinox as eqx
import haliax as hax
from haliax import Axis, NamedArray

from levanter.layers.attention.zigzag import positions as zigzag_positions


class AttentionMask(eqx.Module):
    """A conjunction of visibility rules; the default shows everything.

    Attributes:
        query_segments: integers, `[…, position]`; queries see keys of their own segment. None for one segment.
        key_segments: the keys' segments, `[…, key_position]`; None where there are as many keys as queries, and each
            has the segment of the query with its index.
        query_trunks: integers, `[…, position]`: a second segment whose keys the queries see, the prefix that their own
            segment continues. None for none.
        explicit_mask: boolean `[…, position, key_position]`.
        query_positions: integers, `[…, position]`; without the axis `position`, the position of the first of
            consecutive queries. None for `offset` plus the index.
        key_positions: the same for keys, `[…, key_position]`; None for the index.
        is_causal: queries see keys at their own position and before.
        sliding_window: queries see keys less than this many positions before them.
        offset: static position of the first query, without `query_positions`.
        zigzag: number of shards over which queries and keys are in zigzag order (`attention.zigzag`), so that an index
            is not a position. 1 for natural order.
    """

    query_segments: NamedArray | None = None
    key_segments: NamedArray | None = None
    query_trunks: NamedArray | None = None
    explicit_mask: NamedArray | None = None
    query_positions: NamedArray | None = None
    key_positions: NamedArray | None = None
    is_causal: bool = eqx.field(static=True, default=False)
    sliding_window: int | None = eqx.field(static=True, default=None)
    offset: int = eqx.field(static=True, default=0)
    zigzag: int = eqx.field(static=True, default=1)

    def __check_init__(self):
        # In zigzag order the number of shards determines every position; a second source of positions would contradict
        # it.
        if self.zigzag > 1 and (self.explicit_mask is not None or self.moves_queries or self.key_positions is not None):
            raise ValueError("a mask in zigzag order is a rule by index: no array, no offset, no explicit positions")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"a sliding window must have at least one key, got {self.sliding_window}")
        if self.key_segments is not None and self.query_segments is None:
            raise ValueError("the mask has segments for keys but not for queries; give both")
        if self.query_trunks is not None and self.query_segments is None:
            raise ValueError("the mask has trunks but no segments that continue them; give both")
        if self.offset and self.query_positions is not None:
            raise ValueError(
                f"the mask has both query positions and an offset of {self.offset}; add the offset to the positions"
            )

    @staticmethod
    def causal(*, offset: int | NamedArray = 0, sliding_window: int | None = None) -> "AttentionMask":
        """Queries see keys at their own position and before.

        Args:
            offset: the position of the first query, relative to the first key; an array for one offset per row.
            sliding_window: how many positions back a query sees, its own included; None for all.
        """
        if isinstance(offset, NamedArray):
            return AttentionMask(is_causal=True, sliding_window=sliding_window, query_positions=offset)
        return AttentionMask(is_causal=True, sliding_window=sliding_window, offset=offset)

    @staticmethod
    def of_array(visible: NamedArray) -> "AttentionMask":
        """Queries see where the boolean array `[…, position, key_position]` is true."""
        return AttentionMask(explicit_mask=visible)

    @staticmethod
    def explicit(mask: NamedArray) -> "AttentionMask":
        """`of_array`, as upstream calls it."""
        return AttentionMask.of_array(mask)

    def with_segment_ids(self, segment_ids: NamedArray, key_segment_ids: NamedArray | None = None) -> "AttentionMask":
        """This mask, and queries see only their own segment.

        Args:
            segment_ids: segments of the queries, `[…, position]`.
            key_segment_ids: segments of the keys, `[…, key_position]`; None if key i is the token of query i.
        """
        assert self.query_segments is None, "this mask has segments already"
        return dataclasses.replace(self, query_segments=segment_ids, key_segments=key_segment_ids)

    def with_trunks(self, trunks: NamedArray) -> "AttentionMask":
        """This mask, and queries see a second segment: several continuations share the tokens of one trunk.

        Positions must be explicit, since the continuations of a trunk have the same positions.

        Args:
            trunks: `[…, position]`: the segment of the query's trunk; for tokens of the trunk, its own segment.
        """
        assert self.query_trunks is None, "this mask has trunks already"
        return dataclasses.replace(self, query_trunks=trunks)

    def with_positions(
        self, query_positions: NamedArray | None = None, key_positions: NamedArray | None = None
    ) -> "AttentionMask":
        """This mask with explicit positions; None keeps the present ones."""
        return self & AttentionMask(query_positions=query_positions, key_positions=key_positions)

    def __and__(self, other: "AttentionMask") -> "AttentionMask":
        # Two windows have a conjunction, the narrower one. Two segmentations or two sets of positions have none in this
        # representation, so they are refused.
        windows = [w for w in (self.sliding_window, other.sliding_window) if w is not None]
        assert self.query_segments is None or other.query_segments is None, "both masks have segments"
        assert not (self.moves_queries and other.moves_queries), "both masks have query positions"
        # Segments of queries, keys and trunks are numbered together: all three come from the same mask.
        segmented = other if self.query_segments is None else self
        return AttentionMask(
            query_segments=segmented.query_segments,
            key_segments=segmented.key_segments,
            query_trunks=segmented.query_trunks,
            explicit_mask=_and(self.explicit_mask, other.explicit_mask),
            query_positions=_one(self.query_positions, other.query_positions, "query positions"),
            key_positions=_one(self.key_positions, other.key_positions, "key positions"),
            is_causal=self.is_causal or other.is_causal,
            sliding_window=min(windows, default=None),
            # At most one of the two offsets is nonzero (asserted above), and 1 is natural order.
            offset=self.offset or other.offset,
            zigzag=max(self.zigzag, other.zigzag),
        )

    def in_zigzag(self, num_shards: int) -> "AttentionMask":
        """This mask for queries and keys in zigzag order over `num_shards` shards."""
        return dataclasses.replace(self, zigzag=num_shards)

    @property
    def moves_queries(self) -> bool:
        """Whether the position of a query differs from its index."""
        return self.offset != 0 or self.query_positions is not None

    @property
    def compares_positions(self) -> bool:
        """Whether the mask compares positions."""
        return self.is_causal or self.sliding_window is not None

    def is_by_index(self, Pos: Axis, KeyPos: Axis) -> bool:
        """Whether queries and keys are the same tokens in the same order.

        Every query then sees itself, unless an explicit array hides it.
        """
        return (
            Pos.size == KeyPos.size
            and not self.moves_queries
            and self.key_positions is None
            # Segments of keys are given only where the keys are other tokens than the queries.
            and self.key_segments is None
            and self.zigzag == 1
        )

    def positions_of_queries(self, Pos: Axis) -> NamedArray:
        """The position of each query, `[…, position]`."""
        if self.query_positions is not None:
            return _positions_along(self.query_positions, Pos)
        if self.zigzag > 1:
            return zigzag_positions(Pos, self.zigzag)
        return hax.arange(Pos) + self.offset if self.offset else hax.arange(Pos)

    def positions_of_keys(self, KeyPos: Axis) -> NamedArray:
        """The position of each key, `[…, key_position]`."""
        if self.zigzag > 1:
            return zigzag_positions(KeyPos, self.zigzag)
        return hax.arange(KeyPos) if self.key_positions is None else _positions_along(self.key_positions, KeyPos)

    def segments_of_keys(self, Pos: Axis, KeyPos: Axis) -> NamedArray | None:
        """The segment of each key, `[…, key_position]`; None without segments.

        Raises:
            ValueError: the keys are not the queries' tokens and have no segments.
        """
        if self.query_segments is None or self.key_segments is not None:
            return self.key_segments
        if Pos.size != KeyPos.size:
            raise ValueError(
                f"attention of {Pos.size} queries to {KeyPos.size} keys: the mask has segments for queries only; give "
                "those of the keys too: with_segment_ids(segment_ids, key_segment_ids)"
            )
        return self.query_segments.rename({Pos.name: KeyPos.name})

    def materialize(self, Pos: Axis, KeyPos: Axis) -> NamedArray | None:
        """The full mask as a boolean array over `Pos` and `KeyPos`, or None if everything is visible."""
        return self.visible(
            self.positions_of_queries(Pos),
            self.positions_of_keys(KeyPos),
            key_segments=self.segments_of_keys(Pos, KeyPos),
            explicit=self.explicit_mask,
        )

    def visible(
        self,
        queries: NamedArray,
        keys: NamedArray,
        *,
        key_segments: NamedArray | None,
        explicit: NamedArray | None,
    ) -> NamedArray | None:
        """Evaluates the mask for a block of keys.

        Args:
            queries: positions of the queries, `[…, position]`.
            keys: positions of these keys, `[…, key_position]`.
            key_segments: segments of these keys, if the mask has segments.
            explicit: the explicit array for these keys, if the mask has one.
        """
        rule = explicit
        if self.compares_positions:
            # Both over `[…, position, key_position]`; the distance is positive for keys before the query.
            queries, keys = _over_both(queries, keys)
            distance = queries - keys
            if self.is_causal:
                rule = _and(rule, hax.named(distance.array >= 0, distance.axes))
            if self.sliding_window is not None:
                rule = _and(rule, hax.named(distance.array < self.sliding_window, distance.axes))
        # Equal ids, not ordered ones: segments may be numbered arbitrarily, and `-1` for padding sees only padding.
        if self.query_segments is not None:
            assert key_segments is not None
            query_segments, aligned_key_segments = _over_both(self.query_segments, key_segments)
            same = query_segments == aligned_key_segments
            assert isinstance(same, NamedArray)
            if self.query_trunks is not None:
                trunks, aligned_key_segments = _over_both(self.query_trunks, key_segments)
                # A key is visible if it is in the query's segment or in its trunk.
                # Trunks share the numbering of segments, so the same key ids are compared a second time.
                of_trunk = trunks == aligned_key_segments
                assert isinstance(of_trunk, NamedArray)
                same = hax.logical_or(same, of_trunk)
                assert isinstance(same, NamedArray)
            rule = _and(rule, same)
        return rule


def _positions_along(positions: NamedArray, Along: Axis) -> NamedArray:
    """Positions along an axis; a position without the axis is that of the first of consecutive entries."""
    if Along.name in [axis.name for axis in positions.axes]:
        return positions
    # The new axis goes last, where backends expect positions; `arange` counts from the first entry's position.
    return positions.broadcast_axis(Along).rearrange((..., Along)) + hax.arange(Along)


def _over_both(queries: NamedArray, keys: NamedArray) -> tuple[NamedArray, NamedArray]:
    """`queries` over the union of both sets of axes, with those of the keys last; `keys` ordered to broadcast to it."""
    # Haliax broadcasts only if one array has all axes of the other, and here each has one that the other lacks.
    missing = tuple(axis for axis in keys.axes if axis.name not in [mine.name for mine in queries.axes])
    whole = queries.broadcast_axis(missing).rearrange((..., *missing))
    return whole, keys.rearrange(tuple(axis for axis in whole.axes if axis in keys.axes))


def _one(a: NamedArray | None, b: NamedArray | None, what: str) -> NamedArray | None:
    assert a is None or b is None, f"both masks have {what}"
    return b if a is None else a


def _and(a: NamedArray | None, b: NamedArray | None) -> NamedArray | None:
    if a is None or b is None:
        return b if a is None else a
    both = hax.logical_and(a, b)
    assert isinstance(both, NamedArray)
    return both
