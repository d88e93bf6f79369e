"""Rows that suit what is asked, where all of it is known: as long as they are filled, and as many as there are.

The lengths of `packing.row_shapes` are made for anything. A few documents fill them badly: a row of 128 positions for
102 tokens, four rows where two are used. Where every request was seen, each length that is used becomes that of its
fullest row, and lengths that split the requests into equal parts are tried as well.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from levanter.eval.harness.asked import Query
from levanter.eval.harness.packing import SHARE, Piece, RowShape, best, items_of, pieces_of

MOST = 6
"""Lengths, of sparse and of dense rows together; of either four at most."""
WORTH = 0.01
"""What a further length has to save: it is a Program that has to be compiled."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """What rows may be on some devices.

    Attributes:
        ways: shards of a batch: its rows are a multiple of them.
        unit: lengths are multiples of it.
        spread: for the sake of fewer empty rows a batch may have so many times as many rows, or as few.
    """

    ways: int
    unit: int = 1
    spread: float = 1.0


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
    tables = [pieces_of(items_of(questions), shapes) for questions in asked if questions]
    if not tables:
        return tuple(shapes)
    found: list[RowShape] = []
    for dense in (False, True):
        most = min(4, MOST - len(found))
        pieces = [sorted(table[dense], reverse=True) for table in tables if table[dense]]
        mine = [shape for shape in shapes if shape.is_dense == dense]
        if not pieces:
            continue
        tokens = max(shape.rows * shape.length for shape in mine) // room.ways

        def of(length: int, dense: bool = dense, tokens: int = tokens) -> RowShape:
            slots = length if dense else length // SHARE
            return RowShape(length=length, slots=slots, rows=room.ways * max(1, tokens // length))

        weights = sorted(weight for table in pieces for weight, *_ in table)
        longest = max(shape.length for shape in mine)
        starts = [[shape.length for shape in mine]]
        for parts in range(1, most + 1):
            ends = {weights[-(-len(weights) * part // parts) - 1] for part in range(1, parts + 1)}
            starts.append(sorted({_rounded(end, room.unit, longest) for end in ends}))
        tried = [_settled([of(length) for length in lengths], pieces, cost, room, of) for lengths in starts]
        found += min(tried, key=lambda each: each[0])[1]
    return tuple(found)


def fewest_rows(most: int, counts: Sequence[int], room: Room) -> int:
    """Rows of a batch with which the fewest are empty.

    Args:
        most: rows that a batch may have.
        counts: the rows of each table.
        room: how far it may be from that.
    """

    def batches(rows: int) -> int:
        return sum(-(-count // rows) for count in counts)

    allowed = int(batches(most) * room.spread)
    usable = [rows for rows in range(room.ways, int(most * room.spread) + 1, room.ways) if batches(rows) <= allowed]
    return min(usable or [most], key=lambda rows: (batches(rows) * rows, batches(rows)))


def _settled(
    shapes: Sequence[RowShape],
    pieces: Sequence[Sequence[Piece]],
    cost: Callable[[RowShape], float],
    room: Room,
    of: Callable[[int], RowShape],
) -> tuple[float, list[RowShape]]:
    """The shapes that are used of some, as long as their fullest rows; and what all batches cost then."""
    longest = max(shape.length for shape in shapes)
    packed = [each for table in pieces for each in best(shapes, table, cost)]
    shapes = [of(length) for length in sorted({_rounded(each.filled, room.unit, longest) for each in packed})]
    counts: dict[RowShape, list[int]] = {}
    for table in pieces:
        for each in best(shapes, table, cost):
            counts.setdefault(each.shape, []).append(len(each.rows))
    used = {replace(shape, rows=fewest_rows(shape.rows, each, room)): each for shape, each in counts.items()}
    price = sum(-(-count // shape.rows) * cost(shape) for shape, each in used.items() for count in each)
    return price * (1 + WORTH * len(used)), sorted(used, key=lambda shape: shape.length)


def _rounded(length: int, unit: int, longest: int) -> int:
    return min(longest, -(-length // unit) * unit)
