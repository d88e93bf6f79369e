"""Which questions share a row, and how long rows are.

A question whose inputs another one begins with needs no inputs of its own: its targets are predicted on the way (the
answers of one token of one context are one item). Where rows take *branches*, questions whose inputs begin alike (the
endings of one context) are one item too: a trunk, computed once, and what each goes on with (a tree of one level, as
tree attention of speculative decoding has them: Miao et al., arXiv:2305.09781). Items go into rows as segments that do
not see each other, but for the trunk. Rows have one of a few lengths, each with a Program; which lengths are used is
decided by what they would cost, and rows are filled with the longest item that still fits.

An item has a *weight*: its tokens, or its targets where it has more of these. In *sparse* rows a quarter of the
positions is scored, so there are items with few targets for their tokens; in *dense* rows as many as there are.
"""

import bisect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from levanter.eval.harness.encoding import HarnessError, Query

SCORES = "score_"
"""How the names of the Programs begin."""
SHARE = 4
"""One position in so many is scored in a sparse row."""
SHORTEST = 64
"""Positions of the shortest rows, unless the model's context is shorter."""
Piece = tuple[int, int, int, int]
"""A part of an item that lies in one row: its weight, the item, the first of its targets, how many."""
_SAMPLE = 2048
"""Items by which the lengths are chosen."""
_MOST_BRANCHES = 64
_LEAST_SHARED = 4
"""A trunk is at least one part in so many of each question that it begins: less is not worth a longer row."""


@dataclass(frozen=True, kw_only=True)
class RowShape:
    """The shape of a batch.

    Attributes:
        length: positions of a row.
        slots: targets of a row.
        rows: of a batch.
        branches: tokens, and targets, that an item with branches may have, whatever rows of this shape may; 0 where
            segments do not go on from others.
    """

    length: int
    slots: int
    rows: int
    branches: int = 0

    @property
    def is_dense(self) -> bool:
        """Whether every position may be scored."""
        return self.slots == self.length

    @property
    def name(self) -> str:
        """The name of its Program."""
        return f"{SCORES}{self.length}" + ("_all" if self.is_dense else "")


def row_shapes(max_length: int, *, tokens: int, ways: int, branches: bool = False) -> tuple[RowShape, ...]:
    """The shapes of a run, six at most: four sparse ones, two dense ones.

    Args:
        max_length: positions of the longest rows.
        tokens: of a batch on each of its shards.
        ways: how many shards the batch has.
        branches: whether segments may go on from others.
    """
    room = max_length if branches else 0

    def of(length: int, slots: int) -> RowShape:
        return RowShape(length=length, slots=slots, rows=ways * max(1, tokens // length), branches=room)

    sparse = [n for n in (max_length, max_length // 2, max_length // 4, max_length // 8) if n >= SHORTEST]
    dense = [n for n in (max_length, max_length // 4) if n >= SHORTEST]
    sparse, dense = sparse or [max_length], dense or [max_length]
    found = [of(n, n // SHARE) for n in reversed(sparse) if n // SHARE >= 1]
    return (*found, *(of(n, n) for n in reversed(dense)))


@dataclass(frozen=True, kw_only=True, eq=False)
class UniqueQueries:
    """Questions without those that others answer on the way.

    Attributes:
        inputs: the tokens of each: of its trunk, then of its branches.
        targets: of each, its targets as (place, token, question, which of the question's).
        parts: of each, the tokens of its trunk and of every branch; of the trunk alone where it has none.
    """

    inputs: tuple[np.ndarray, ...]
    targets: tuple[np.ndarray, ...]
    parts: tuple[tuple[int, ...], ...]


def items_of(questions: Sequence[Query], *, room: int | None = None) -> UniqueQueries:
    """The sequences that have to be computed to answer all questions.

    Args:
        questions: the questions.
        room: tokens, and targets, that an item with branches may have; None for no branches.
    """
    keys = [each.inputs.astype(">i4").tobytes() for each in questions]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    # Sorted, a sequence that begins others stands right before one of them.
    owner: dict[int, int] = {}
    for at in range(len(order) - 1, -1, -1):
        mine = order[at]
        after = order[at + 1] if at + 1 < len(order) else None
        owner[mine] = owner[after] if after is not None and keys[after].startswith(keys[mine]) else mine
    asked: dict[int, list[int]] = {}
    for n in range(len(questions)):
        asked.setdefault(owner[n], []).append(n)
    whole = [n for n in order if owner[n] == n]
    groups = [[n] for n in whole] if room is None else _branching(questions, whole, asked, room)
    inputs, targets, parts = [], [], []
    for group in sorted(sorted(group) for group in groups):
        trunk = len(questions[group[0]].inputs) if len(group) == 1 else _alike(questions, group)
        ids, found, sizes = [questions[group[0]].inputs[:trunk]], [], [trunk]
        for owning in group:
            # What is predicted within the trunk is predicted there.
            moved = sum(sizes) - trunk
            for n in asked[owning]:
                q = questions[n]
                places = q.places + np.where(q.places < trunk, 0, moved)
                found.append(
                    np.stack([places, q.targets, np.full(len(q.targets), n), np.arange(len(q.targets))], axis=1)
                )
            if len(group) > 1:
                ids.append(questions[owning].inputs[trunk:])
                sizes.append(len(ids[-1]))
        inputs.append(np.concatenate(ids))
        targets.append(np.concatenate(found).astype(np.int64))
        parts.append(tuple(sizes))
    return UniqueQueries(inputs=tuple(inputs), targets=tuple(targets), parts=tuple(parts))


def _branching(
    questions: Sequence[Query], whole: Sequence[int], asked: Mapping[int, Sequence[int]], room: int
) -> list[list[int]]:
    """Which sequences have a trunk together, so that the most tokens are saved.

    Args:
        questions: all of them.
        whole: those that no other one begins with, in the order of their tokens: what begins alike stands together.
        asked: the questions that each of these answers.
        room: see `items_of`.
    """
    sizes = [len(questions[n].inputs) for n in whole]
    counts = [sum(len(questions[each].targets) for each in asked[n]) for n in whole]
    alike = [_alike(questions, pair) for pair in itertools.pairwise(whole)]
    # Of the first sequences: the tokens that are saved at best, and where the last of their groups begins.
    saved, begins = [0], [0]
    for last in range(len(whole)):
        best, begin = saved[last], last
        trunk, size, count, longest = sizes[last], sizes[last], counts[last], sizes[last]
        for first in range(last - 1, max(-1, last - _MOST_BRANCHES), -1):
            trunk, size, count = min(trunk, alike[first]), size + sizes[first], count + counts[first]
            longest, less = max(longest, sizes[first]), (last - first) * trunk
            if trunk * _LEAST_SHARED < longest or count > room:
                break
            if size - less <= room and saved[first] + less > best:
                best, begin = saved[first] + less, first
        saved.append(best)
        begins.append(begin)
    groups, end = [], len(whole)
    while end:
        groups.append(list(whole[begins[end] : end]))
        end = begins[end]
    return groups


def _alike(questions: Sequence[Query], some: Sequence[int]) -> int:
    """With how many same tokens the inputs of some questions begin."""
    shortest = min(len(questions[n].inputs) for n in some)
    first = questions[some[0]].inputs[:shortest]
    other = np.zeros(shortest, bool)
    for n in some[1:]:
        other |= questions[n].inputs[:shortest] != first
    return int(np.argmax(other)) if other.any() else shortest


def branching_room(shapes: Sequence[RowShape]) -> int | None:
    """Tokens that an item with branches may have in rows of some shapes; None where they take none."""
    return max(shape.branches for shape in shapes) or None


@dataclass(frozen=True, kw_only=True)
class PackedQueries:
    """Rows of one shape.

    Attributes:
        shape: theirs.
        rows: the pieces of each, as (item, first target, targets).
        filled: weight of the fullest row; 0 where only the rows were heard of.
    """

    shape: RowShape
    rows: tuple[tuple[tuple[int, int, int], ...], ...]
    filled: int = 0

    @property
    def batches(self) -> int:
        """Executions of its Program."""
        return -(-len(self.rows) // self.shape.rows)


def pack(
    items: UniqueQueries, shapes: Sequence[RowShape], cost: Callable[[RowShape], float]
) -> tuple[PackedQueries, ...]:
    """Puts items into rows.

    Args:
        items: the items; none longer than the longest shape.
        shapes: those there are.
        cost: of executing one batch, in any unit.
    """
    found = []
    for dense, mine in pieces_of(items, shapes).items():
        if mine:
            found += best([shape for shape in shapes if shape.is_dense == dense], sorted(mine, reverse=True), cost)
    return tuple(found)


def pieces_of(items: UniqueQueries, shapes: Sequence[RowShape]) -> Mapping[bool, list[Piece]]:
    """What goes into sparse rows, and into dense ones.

    Args:
        items: the items.
        shapes: those there are.
    """
    pieces: Mapping[bool, list[Piece]] = {False: [], True: []}
    has_sparse = any(not shape.is_dense for shape in shapes)
    longest = max(shape.length for shape in shapes)
    for item, (tokens, targets) in enumerate(zip(items.inputs, items.targets, strict=True)):
        count = len(targets)
        if has_sparse and count * SHARE <= len(tokens):
            pieces[False].append((len(tokens), item, 0, count))
            continue
        # More targets than a row holds: the sequence is computed again for the rest.
        for first in range(0, count, longest):
            part = min(longest, count - first)
            pieces[True].append((max(len(tokens), part), item, first, part))
    return pieces


def best(shapes: Sequence[RowShape], pieces: Sequence[Piece], cost: Callable[[RowShape], float]) -> list[PackedQueries]:
    """The rows in those shapes that cost least, by a sample of the pieces.

    Args:
        shapes: sparse ones, or dense ones.
        pieces: of that kind, the heaviest first.
        cost: of a batch.

    Raises:
        HarnessError: one is longer than all rows.
    """
    longest = max(weight for weight, *_ in pieces)
    if longest > (planned := max(shape.length for shape in shapes)):
        raise HarnessError(
            f"a task asks for {longest:,} tokens, and for {planned:,} at most when it was planned: its "
            "documents or its prompts are not the same each time\n"
            "  → trainer.per_device_eval_parallelism: a number of rows; then they are as long as the model sees"
        )
    step = -(-len(pieces) // _SAMPLE)
    sample = pieces[::step]

    def price(allowed: Sequence[RowShape]) -> float:
        packed = _filled(allowed, sample, cost)
        if step == 1:
            return sum(each.batches * cost(each.shape) for each in packed)
        return sum(step * len(each.rows) / each.shape.rows * cost(each.shape) for each in packed)

    ladder = sorted(shapes, key=lambda shape: shape.length)
    choices = [[shape for n, shape in enumerate(ladder) if chosen >> n & 1] for chosen in range(1, 1 << len(ladder))]
    usable = [allowed for allowed in choices if allowed[-1].length >= longest]
    return _filled(min(usable, key=price), pieces, cost)


def _filled(
    shapes: Sequence[RowShape], pieces: Sequence[Piece], cost: Callable[[RowShape], float]
) -> list[PackedQueries]:
    """Rows: each begins with the longest piece left, in the shape that suits it, and takes what else fits."""
    weights = [piece[0] for piece in reversed(pieces)]  # ascending
    waiting: dict[int, list[Piece]] = {}
    for piece in reversed(pieces):
        waiting.setdefault(piece[0], []).append(piece)
    left = sorted(set(weights))
    suits = {weight: _suiting(shapes, weight, cost) for weight in left}
    rows: dict[RowShape, list[tuple[tuple[int, int, int], ...]]] = {}
    filled: dict[RowShape, int] = {}

    def take(room: int) -> Piece | None:
        at = bisect.bisect_right(left, room) - 1
        if at < 0:
            return None
        of = waiting[left[at]]
        piece = of.pop()
        if not of:
            del left[at]
        return piece

    while left:
        shape = suits[left[-1]]
        row, room = [], shape.length
        while (piece := take(room)) is not None:
            row.append(piece[1:])
            room -= piece[0]
        rows.setdefault(shape, []).append(tuple(row))
        filled[shape] = max(filled.get(shape, 0), shape.length - room)
    return [
        PackedQueries(shape=shape, rows=tuple(rows[shape]), filled=filled[shape]) for shape in shapes if shape in rows
    ]


def _suiting(shapes: Sequence[RowShape], weight: int, cost: Callable[[RowShape], float]) -> RowShape:
    """The shape in which a piece of a weight costs least, if the row is filled with its like."""
    fitting = [shape for shape in shapes if shape.length >= weight]
    return min(fitting, key=lambda shape: (cost(shape) / (shape.rows * (shape.length // weight)), shape.length))
