"""`AttentionMask`: which keys a query may see, as a rule and not as an array.

The rule is the conjunction of its parts: causality, a sliding window, segments, and an explicit array. Causality and
windows compare *positions*. Where none are given, the position of a query or a key is its index, which backends know
when they compile; positions that are arrays may be in any order, may begin anywhere and may differ from row to row, and
there need not be as many queries as keys.

Backends ask for the part they need: all of it at once (`materialize`), or a block of keys (`visible`). A query that
sees no key at all gets zeros from every backend.
"""

import dataclasses

import equinox as eqx
import haliax as hax
from haliax import Axis, NamedArray

from levanter.layers.attention.zigzag import positions as zigzag_positions


class AttentionMask(eqx.Module):
    """A conjunction of visibility rules; the empty one shows everything.

    Attributes:
        query_segments: integers, `[…, position]`; queries see keys of their own segment. None for one segment.
        key_segments: the keys' segments, `[…, key_position]`; None where there are as many keys as queries, and each
            has the segment of the query with its index.
        query_trunks: integers, `[…, position]`: a further segment whose keys queries see, the one that theirs goes on
            from. None for none.
        explicit_mask: boolean `[…, position, key_position]`.
        query_positions: integers, `[…, position]`; without that axis, the position of the first query, which the
            others follow. None for `offset` and the index.
        key_positions: likewise of the keys, `[…, key_position]`; None for the index.
        is_causal: queries see keys at their own position and before.
        sliding_window: queries see keys less than this many positions before them.
        offset: the position of the first query where `query_positions` are not given; known when compiling.
        zigzag: over how many parts queries and keys lie in zigzag order (`order`); their index is then not their
            position. 1 for their own order.
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
        if self.zigzag > 1 and (self.explicit_mask is not None or self.moves_queries or self.key_positions is not None):
            raise ValueError("in zigzag order a mask is a rule by index: no array, no offset, no positions of its own")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"a sliding window must have at least one key, got {self.sliding_window}")
        if self.key_segments is not None and self.query_segments is None:
            raise ValueError("the mask has segments for keys but not for queries; give both")
        if self.query_trunks is not None and self.query_segments is None:
            raise ValueError("the mask has trunks but no segments that go on from them; give both")
        if self.offset and self.query_positions is not None:
            raise ValueError(
                f"the mask has both query positions and an offset of {self.offset}; add the offset to the positions"
            )

    @staticmethod
    def causal(*, offset: int | NamedArray = 0, sliding_window: int | None = None) -> "AttentionMask":
        """Queries see what is not after them.

        Args:
            offset: the position of the first query, the first key's being 0; an array for an offset of each row.
            sliding_window: how many positions back they see, their own included; None for all.
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
        """This rule, and queries see only their own segment.

        Args:
            segment_ids: of the queries, `[…, position]`.
            key_segment_ids: of the keys, `[…, key_position]`; None where each key has that of the query at its index.
        """
        assert self.query_segments is None, "this mask has segments already"
        return dataclasses.replace(self, query_segments=segment_ids, key_segments=key_segment_ids)

    def with_trunks(self, trunks: NamedArray) -> "AttentionMask":
        """This rule, and queries see a second segment: several that go on from one trunk need it once.

        Where each token is, positions must say: segments that go on from the same trunk have the same ones.

        Args:
            trunks: of the queries, `[…, position]`: the segment of its trunk; for the trunk's own tokens, their own.
        """
        assert self.query_trunks is None, "this mask has trunks already"
        return dataclasses.replace(self, query_trunks=trunks)

    def with_positions(
        self, query_positions: NamedArray | None = None, key_positions: NamedArray | None = None
    ) -> "AttentionMask":
        """This rule at explicit positions; what is None stays as it is."""
        return self & AttentionMask(query_positions=query_positions, key_positions=key_positions)

    def __and__(self, other: "AttentionMask") -> "AttentionMask":
        windows = [w for w in (self.sliding_window, other.sliding_window) if w is not None]
        assert self.query_segments is None or other.query_segments is None, "both masks have segments"
        assert not (self.moves_queries and other.moves_queries), "both masks have query positions"
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
            offset=self.offset or other.offset,
            zigzag=max(self.zigzag, other.zigzag),
        )

    def in_zigzag(self, parts: int) -> "AttentionMask":
        """This rule where queries and keys lie in zigzag order over so many parts."""
        return dataclasses.replace(self, zigzag=parts)

    @property
    def moves_queries(self) -> bool:
        """Whether queries are elsewhere than their index says."""
        return self.offset != 0 or self.query_positions is not None

    @property
    def compares_positions(self) -> bool:
        """Whether it depends on positions at all."""
        return self.is_causal or self.sliding_window is not None

    def is_by_index(self, Pos: Axis, KeyPos: Axis) -> bool:
        """Whether queries and keys are the same tokens in the same order: every query then sees itself, if no explicit
        array hides it."""
        return (
            Pos.size == KeyPos.size
            and not self.moves_queries
            and self.key_positions is None
            and self.key_segments is None
            and self.zigzag == 1
        )

    def positions_of_queries(self, Pos: Axis) -> NamedArray:
        """The position of each query, `[…, position]`."""
        if self.query_positions is not None:
            return _each(self.query_positions, Pos)
        if self.zigzag > 1:
            return zigzag_positions(Pos, self.zigzag)
        return hax.arange(Pos) + self.offset if self.offset else hax.arange(Pos)

    def positions_of_keys(self, KeyPos: Axis) -> NamedArray:
        """The position of each key, `[…, key_position]`."""
        if self.zigzag > 1:
            return zigzag_positions(KeyPos, self.zigzag)
        return hax.arange(KeyPos) if self.key_positions is None else _each(self.key_positions, KeyPos)

    def segments_of_keys(self, Pos: Axis, KeyPos: Axis) -> NamedArray | None:
        """The segment of each key, `[…, key_position]`; None where there is one segment.

        Raises:
            ValueError: there are other keys than queries, and nothing says which segments they have.
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
        """The rule for some keys.

        Args:
            queries: positions of the queries, `[…, position]`.
            keys: positions of the keys, `[…, key_position]`.
            key_segments: segments of these keys, where the mask has segments.
            explicit: the explicit part for these keys, where the mask has one.
        """
        rule = explicit
        if self.compares_positions:
            queries, keys = _over_both(queries, keys)
            distance = queries - keys
            if self.is_causal:
                rule = _and(rule, hax.named(distance.array >= 0, distance.axes))
            if self.sliding_window is not None:
                rule = _and(rule, hax.named(distance.array < self.sliding_window, distance.axes))
        if self.query_segments is not None:
            assert key_segments is not None
            mine, theirs = _over_both(self.query_segments, key_segments)
            same = mine == theirs
            assert isinstance(same, NamedArray)
            if self.query_trunks is not None:
                trunks, theirs = _over_both(self.query_trunks, key_segments)
                of_trunk = trunks == theirs
                assert isinstance(of_trunk, NamedArray)
                same = hax.logical_or(same, of_trunk)
                assert isinstance(same, NamedArray)
            rule = _and(rule, same)
        return rule


def _each(positions: NamedArray, Along: Axis) -> NamedArray:
    """Positions along an axis; consecutive ones where only the first is given."""
    if Along.name in [axis.name for axis in positions.axes]:
        return positions
    return positions.broadcast_axis(Along).rearrange((..., Along)) + hax.arange(Along)


def _over_both(queries: NamedArray, keys: NamedArray) -> tuple[NamedArray, NamedArray]:
    """The first over the axes of both, the keys' behind its own; the second so that it broadcasts to that."""
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
