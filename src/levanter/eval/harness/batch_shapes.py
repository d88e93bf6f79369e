"""Rows that suit what is asked, where all of it is known: as long as they are filled, and as many as there are.

The lengths of `packing.row_shapes` are made for anything. A few documents fill them badly: a row of 128 positions for
102 tokens, four rows where two are used. Where every request was seen, each length that is used becomes that of its
fullest row, and lengths that split the requests into equal parts are tried as well.
"""

import bisect
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from levanter.eval.harness.encoding import Query
from levanter.eval.harness.packing import (
    SHARE,
    PackedQueries,
    Piece,
    RowShape,
    best,
    branching_room,
    items_of,
    pieces_of,
)

MOST = 6
"""Lengths, of sparse and of dense rows together."""
WORTH = 0.004
"""What a further length has to save: it is a Program that has to be compiled."""
_TRIED = 64
"""Weights of which lengths are made."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """What rows may be on some devices.

    Attributes:
        ways: shards of a batch: its rows are a multiple of them.
        unit: lengths are multiples of it.
        fewer: for the sake of fewer empty rows there may be so many times as many batches,
        larger: or so many times as many rows in one.
    """

    ways: int
    unit: int = 1
    fewer: float = 1.0
    larger: float = 1.0


def fitted(
    asked: Sequence[Sequence[Query]], shapes: Sequence[RowShape], cost: Callable[[RowShape], float], room: Room
) -> tuple[RowShape, ...]:
    """The shapes for lists of questions that are all there will be; those given where there is no question.

    Args:
        asked: the questions of each table.
        shapes: made for anything, with as many rows as may be.
        cost: of a batch, in any unit.
        room: what rows may be.
    """
    tried = [_fitted(asked, shapes, cost, room)]
    if branching_room(shapes) is not None:
        # Few questions with trunks may leave rows emptier than all of them without.
        tried.append(_fitted(asked, [replace(shape, branches=0) for shape in shapes], cost, room))
    return min(tried, key=lambda each: each[0])[1]


def _fitted(
    asked: Sequence[Sequence[Query]], shapes: Sequence[RowShape], cost: Callable[[RowShape], float], room: Room
) -> tuple[float, tuple[RowShape, ...]]:
    """Shapes with branches as they are; and what all batches cost then."""
    branches = branching_room(shapes)
    tables = [pieces_of(items_of(questions, room=branches), shapes) for questions in asked if questions]
    if not tables:
        return 0.0, tuple(shapes)
    price, found = 0.0, []
    kinds = [dense for dense in (False, True) if any(table[dense] for table in tables)]
    for dense in kinds:
        most = MOST - len(found) if dense == kinds[-1] else MOST - 2
        pieces = [sorted(table[dense], reverse=True) for table in tables if table[dense]]
        mine = [shape for shape in shapes if shape.is_dense == dense]
        tokens = max(shape.rows * shape.length for shape in mine) // room.ways

        def of(length: int, dense: bool = dense, tokens: int = tokens) -> RowShape:
            slots, rows = length if dense else length // SHARE, room.ways * max(1, tokens // length)
            return RowShape(length=length, slots=slots, rows=rows, branches=branches or 0)

        @functools.cache
        def used(length: int, count: int, most: int = tokens) -> int:
            rows = fewest_rows(room.ways * max(1, most // length), [count], room)
            return -(-count // rows) * rows

        weights = sorted(weight for table in pieces for weight, *_ in table)
        longest = max(shape.length for shape in mine)
        starts = [[shape.length for shape in mine], *closest(weights, most, used)]
        lengths = [sorted({_rounded(length, room.unit, longest) for length in some}) for some in starts]
        tried = [_settled(some, pieces, cost, room, of) for some in lengths]
        best_price, chosen = min(tried, key=lambda each: each[0])
        price, found = price + best_price, found + chosen
    return price, tuple(found)


def closest(weights: Sequence[int], most: int, rows: Callable[[int, int], int]) -> list[list[int]]:
    """The one, two and more lengths whose batches have the fewest tokens, were each weight alone in its row.

    Args:
        weights: ascending.
        most: lengths.
        rows: that batches of a length have together if so many are used.
    """
    # Weights as they are, where these are few; of many the lengths that split them into equal parts.
    step = -(-len(weights) // _TRIED)
    ends = sorted({*weights[step - 1 :: step], weights[-1]})
    upto = [0, *(bisect.bisect_right(weights, end) for end in ends)]
    # Of the weights up to each end: the tokens, and the lengths.
    least, chosen, found = [0.0, *[math.inf] * len(ends)], [[] for _ in upto], []
    for _ in range(min(most, len(ends))):
        further, longer = [math.inf] * len(upto), [[] for _ in upto]
        for last, end in enumerate(ends, 1):
            for n in range(last):
                if (tokens := least[n] + end * rows(end, upto[last] - upto[n])) < further[last]:
                    further[last], longer[last] = tokens, [*chosen[n], end]
        least, chosen = further, longer
        found.append(chosen[-1])
    return found


def fewest_rows(most: int, counts: Sequence[int], room: Room) -> int:
    """Rows of a batch with which the fewest are empty.

    Args:
        most: rows that a batch may have.
        counts: the rows of each table.
        room: how far it may be from that.
    """

    def batches(rows: int) -> int:
        return sum(-(-count // rows) for count in counts)

    allowed = int(batches(most) * room.fewer)
    usable = [rows for rows in range(room.ways, int(most * room.larger) + 1, room.ways) if batches(rows) <= allowed]
    return min(usable or [most], key=lambda rows: (batches(rows) * rows, batches(rows)))


def _settled(
    lengths: Sequence[int],
    pieces: Sequence[Sequence[Piece]],
    cost: Callable[[RowShape], float],
    room: Room,
    of: Callable[[int], RowShape],
) -> tuple[float, list[RowShape]]:
    """Shapes of some lengths, those that are used, as long as their fullest rows; and what all batches cost then."""
    longest = max(lengths)

    def packed(lengths: Sequence[int]) -> list[PackedQueries]:
        """Each table's rows, however many there are: how many a batch has is decided by them."""
        few = [replace(of(length), rows=room.ways) for length in lengths]
        return [each for table in pieces for each in best(few, table, cost)]

    shorter = sorted({_rounded(each.filled, room.unit, longest) for each in packed(lengths)})
    counts: dict[int, list[int]] = {}
    for each in packed(shorter):
        counts.setdefault(each.shape.length, []).append(len(each.rows))
    shapes = [replace(of(n), rows=fewest_rows(of(n).rows, each, room)) for n, each in sorted(counts.items())]
    final = [each for table in pieces for each in best(shapes, table, cost)]
    used = [shape for shape in shapes if any(each.shape == shape for each in final)]
    return sum(each.batches * cost(each.shape) for each in final) * (1 + WORTH * len(used)), used


def _rounded(length: int, unit: int, longest: int) -> int:
    return min(longest, -(-length // unit) * unit)
