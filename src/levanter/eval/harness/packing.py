"""Packs queries into rows of a few lengths.

A query whose inputs are the beginning of another query's inputs needs none of its own: its targets are predicted from
the other one's (one-token answers to one context are one *item*). In rows with *branches*, queries whose inputs share a
beginning (several endings of one context) are one item too: the *trunk* is computed once, and every branch continues it
(a tree of one level, as in the tree attention of speculative decoding: Miao et al., arXiv:2305.09781). Items are packed
into rows as segments that attend to themselves and to their trunk only. Rows have one of a few lengths, each with a
Program. The set of lengths with the lowest cost is used, and rows are filled with the longest item that still fits.

An item's *weight* is its number of tokens, or of targets if that is larger. In *sparse* rows a quarter of the positions
is scored, for items with few targets per token; in *dense* rows every position may be scored.
"""

import bisect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from levanter.eval.harness.encoding import HarnessError, Query

PROGRAM_PREFIX = "score_"
"""The beginning of the names of the scoring Programs."""
SPARSE_RATIO = 4
"""Positions per scored position in a sparse row."""
MIN_LENGTH = 64
"""Positions of the shortest rows, unless the model's context is shorter."""
Piece = tuple[int, int, int, int]
"""The part of an item in one row: (weight, item, index of the first target, number of targets)."""
_SAMPLED_ITEMS = 2048
"""Number of items from which the lengths are chosen."""
_MAX_BRANCHES = 64
_MIN_SHARED = 4
"""A trunk is at least 1/4 of each query that shares it: a shorter one does not justify a longer row."""


@dataclass(frozen=True, kw_only=True)
class RowShape:
    """The shape of a batch.

    Attributes:
        length: positions of a row.
        slots: targets of a row.
        rows: rows of a batch.
        branches: the largest number of tokens, and of targets, of an item with branches, for all shapes of a run; 0 for
            rows without branches.
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
        return f"{PROGRAM_PREFIX}{self.length}" + ("_all" if self.is_dense else "")


def row_shapes(max_length: int, *, tokens: int, ways: int, branches: bool = False) -> tuple[RowShape, ...]:
    """The shapes of a run, at most six: four sparse ones and two dense ones.

    Args:
        max_length: positions of the longest rows.
        tokens: tokens of a batch on each of its shards.
        ways: number of shards of a batch.
        branches: whether segments may continue other segments.
    """
    branch_tokens = max_length if branches else 0

    def shape_of_length(length: int, slots: int) -> RowShape:
        return RowShape(length=length, slots=slots, rows=ways * max(1, tokens // length), branches=branch_tokens)

    # Lengths below the minimum are left out, unless the context itself is shorter: then there is one length.
    sparse = [n for n in (max_length, max_length // 2, max_length // 4, max_length // 8) if n >= MIN_LENGTH]
    dense = [n for n in (max_length, max_length // 4) if n >= MIN_LENGTH]
    sparse, dense = sparse or [max_length], dense or [max_length]
    sparse_shapes = [shape_of_length(n, n // SPARSE_RATIO) for n in reversed(sparse) if n // SPARSE_RATIO >= 1]
    return (*sparse_shapes, *(shape_of_length(n, n) for n in reversed(dense)))


@dataclass(frozen=True, kw_only=True, eq=False)
class UniqueQueries:
    """The sequences that have to be computed to answer all queries.

    Attributes:
        inputs: the tokens of each item: those of its trunk, then those of its branches.
        targets: the targets of each item as rows of (position, token, query, index in the query).
        segment_sizes: the numbers of tokens of the trunk and of every branch; of the trunk alone for items without
            branches.
    """

    inputs: tuple[np.ndarray, ...]
    targets: tuple[np.ndarray, ...]
    segment_sizes: tuple[tuple[int, ...], ...]


def group_queries(queries: Sequence[Query], *, branch_tokens: int | None = None) -> UniqueQueries:
    """Merges queries into the items that have to be computed.

    Args:
        queries: the queries.
        branch_tokens: the largest number of tokens, and of targets, of an item with branches; None for no branches.
    """
    # Token ids are not negative, so big-endian bytes compare like the sequences themselves.
    keys = [query.inputs.astype(">i4").tobytes() for query in queries]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    # In sorted order (big-endian bytes sort like token ids) a sequence is directly followed by one that begins with it,
    # if there is any. The owner of a query is the longest sequence that contains its inputs.
    owner: dict[int, int] = {}
    # From the last to the first: the owner of the following sequence is known when its beginning is reached.
    for at in range(len(order) - 1, -1, -1):
        current = order[at]
        following = order[at + 1] if at + 1 < len(order) else None
        owner[current] = (
            owner[following] if following is not None and keys[following].startswith(keys[current]) else current
        )
    queries_by_owner: dict[int, list[int]] = {}
    for n in range(len(queries)):
        queries_by_owner.setdefault(owner[n], []).append(n)
    # Only these are computed; all others are beginnings of one of them.
    whole = [n for n in order if owner[n] == n]
    groups = (
        [[n] for n in whole]
        if branch_tokens is None
        else _group_by_trunk(queries, whole, queries_by_owner, branch_tokens)
    )
    inputs, targets, segment_sizes = [], [], []
    # Items in the order of the queries, so that the table does not depend on how tokens sort.
    for group in sorted(sorted(group) for group in groups):
        # A sequence alone is all trunk, and has no branches.
        trunk = len(queries[group[0]].inputs) if len(group) == 1 else _common_prefix_length(queries, group)
        ids, item_targets, sizes = [queries[group[0]].inputs[:trunk]], [], [trunk]
        for member in group:
            # Targets within the trunk keep their positions; those after it move to this member's branch.
            shift = sum(sizes) - trunk
            for n in queries_by_owner[member]:
                q = queries[n]
                positions = q.target_positions + np.where(q.target_positions < trunk, 0, shift)
                item_targets.append(
                    np.stack([positions, q.targets, np.full(len(q.targets), n), np.arange(len(q.targets))], axis=1)
                )
            if len(group) > 1:
                ids.append(queries[member].inputs[trunk:])
                sizes.append(len(ids[-1]))
        inputs.append(np.concatenate(ids))
        targets.append(np.concatenate(item_targets).astype(np.int64))
        segment_sizes.append(tuple(sizes))
    return UniqueQueries(inputs=tuple(inputs), targets=tuple(targets), segment_sizes=tuple(segment_sizes))


def _group_by_trunk(
    queries: Sequence[Query], whole: Sequence[int], queries_by_owner: Mapping[int, Sequence[int]], branch_tokens: int
) -> list[list[int]]:
    """Groups sequences that share a trunk so that the most tokens are saved.

    Args:
        queries: all queries.
        whole: indices of queries that are no other query's beginning, in the order of their tokens, so that those with
            a common beginning are neighbors.
        queries_by_owner: the queries that each of these answers.
        branch_tokens: see `group_queries`.
    """
    sizes = [len(queries[n].inputs) for n in whole]
    counts = [sum(len(queries[member].targets) for member in queries_by_owner[n]) for n in whole]
    common = [_common_prefix_length(queries, pair) for pair in itertools.pairwise(whole)]
    # Dynamic program over prefixes of `whole`: the most tokens saved in the first k sequences, and the index at which
    # the last of their groups begins.
    saved, begins = [0], [0]
    for last in range(len(whole)):
        most, begin = saved[last], last
        trunk, size, count, longest = sizes[last], sizes[last], counts[last], sizes[last]
        for first in range(last - 1, max(-1, last - _MAX_BRANCHES), -1):
            # In sorted order the common prefix of a group is the least of its neighbors' common prefixes.
            trunk, size, count = min(trunk, common[first]), size + sizes[first], count + counts[first]
            longest, shared = max(longest, sizes[first]), (last - first) * trunk
            # Adding further sequences only shortens the trunk and adds targets: no longer group can be valid.
            if trunk * _MIN_SHARED < longest or count > branch_tokens:
                break
            # Of n + 1 sequences n need not compute the trunk again: `shared` tokens are saved.
            if size - shared <= branch_tokens and saved[first] + shared > most:
                most, begin = saved[first] + shared, first
        saved.append(most)
        begins.append(begin)
    # Follow the stored beginnings back from the last sequence.
    groups, end = [], len(whole)
    while end:
        groups.append(list(whole[begins[end] : end]))
        end = begins[end]
    return groups


def _common_prefix_length(queries: Sequence[Query], members: Sequence[int]) -> int:
    """The number of leading tokens that the inputs of some queries share."""
    shortest = min(len(queries[n].inputs) for n in members)
    first = queries[members[0]].inputs[:shortest]
    differs = np.zeros(shortest, bool)
    for n in members[1:]:
        differs |= queries[n].inputs[:shortest] != first
    return int(np.argmax(differs)) if differs.any() else shortest


def max_branch_tokens(shapes: Sequence[RowShape]) -> int | None:
    """The largest number of tokens of an item with branches in rows of these shapes; None if they allow no branches."""
    return max(shape.branches for shape in shapes) or None


@dataclass(frozen=True, kw_only=True)
class PackedQueries:
    """The rows of one shape.

    Attributes:
        shape: shape of the rows.
        rows: the pieces of each row, as (item, first target, targets).
        filled: weight of the fullest row; 0 on processes that received the rows.
    """

    shape: RowShape
    rows: tuple[tuple[tuple[int, int, int], ...], ...]
    filled: int = 0

    @property
    def batches(self) -> int:
        """Number of executions of its Program."""
        return -(-len(self.rows) // self.shape.rows)


def pack(
    items: UniqueQueries, shapes: Sequence[RowShape], cost: Callable[[RowShape], float]
) -> tuple[PackedQueries, ...]:
    """Packs items into rows.

    Args:
        items: the items; none is longer than the longest shape.
        shapes: the available shapes.
        cost: cost of the execution of one batch, in any unit.
    """
    packed = []
    for dense, pieces in split_by_density(items, shapes).items():
        if pieces:
            packed += pack_cheapest(
                [shape for shape in shapes if shape.is_dense == dense], sorted(pieces, reverse=True), cost
            )
    return tuple(packed)


def split_by_density(items: UniqueQueries, shapes: Sequence[RowShape]) -> Mapping[bool, list[Piece]]:
    """The pieces for sparse rows (False) and for dense rows (True).

    Args:
        items: the items.
        shapes: the available shapes.
    """
    pieces: Mapping[bool, list[Piece]] = {False: [], True: []}
    has_sparse = any(not shape.is_dense for shape in shapes)
    longest = max(shape.length for shape in shapes)
    for item, (tokens, targets) in enumerate(zip(items.inputs, items.targets, strict=True)):
        count = len(targets)
        if has_sparse and count * SPARSE_RATIO <= len(tokens):
            pieces[False].append((len(tokens), item, 0, count))
            continue
        # More targets than slots of a row: the sequence is computed again for the remaining ones.
        # Each of these pieces holds the whole sequence, and scores another part of its targets.
        for first in range(0, count, longest):
            size = min(longest, count - first)
            pieces[True].append((max(len(tokens), size), item, first, size))
    return pieces


def pack_cheapest(
    shapes: Sequence[RowShape], pieces: Sequence[Piece], cost: Callable[[RowShape], float]
) -> list[PackedQueries]:
    """The rows in the subset of shapes that costs least, estimated from a sample of the pieces.

    Args:
        shapes: only sparse ones, or only dense ones.
        pieces: pieces of that kind, in descending order of weight.
        cost: cost of a batch.

    Raises:
        HarnessError: a piece is longer than all rows.
    """
    longest = max(weight for weight, *_ in pieces)
    if longest > (planned := max(shape.length for shape in shapes)):
        raise HarnessError(
            f"a task has a request of {longest:,} tokens, and its longest one was {planned:,} when the run was "
            "planned: "
            "its documents or prompts change between runs\n"
            "  → trainer.per_device_eval_parallelism: a number of rows; rows then have the model's full context"
        )
    # Pieces are sorted by weight, so every n-th one is a sample of all weights.
    step = -(-len(pieces) // _SAMPLED_ITEMS)
    sample = pieces[::step]

    def price(allowed: Sequence[RowShape]) -> float:
        packed_sample = _fill_rows(allowed, sample, cost)
        if step == 1:
            return sum(rows.batches * cost(rows.shape) for rows in packed_sample)
        return sum(step * len(rows.rows) / rows.shape.rows * cost(rows.shape) for rows in packed_sample)

    ladder = sorted(shapes, key=lambda shape: shape.length)
    # All subsets of the shapes, as bits of a number: there are at most six shapes.
    choices = [[shape for n, shape in enumerate(ladder) if chosen >> n & 1] for chosen in range(1, 1 << len(ladder))]
    usable = [allowed for allowed in choices if allowed[-1].length >= longest]
    return _fill_rows(min(usable, key=price), pieces, cost)


def _fill_rows(
    shapes: Sequence[RowShape], pieces: Sequence[Piece], cost: Callable[[RowShape], float]
) -> list[PackedQueries]:
    """Fills rows greedily: each begins with the longest remaining piece, in its cheapest shape, and takes what fits."""
    weights = [piece[0] for piece in reversed(pieces)]  # ascending
    queues: dict[int, list[Piece]] = {}
    for piece in reversed(pieces):
        queues.setdefault(piece[0], []).append(piece)
    # Weights that still have a piece, ascending, so that the heaviest piece that fits is found by bisection.
    remaining_weights = sorted(set(weights))
    shape_by_weight = {weight: _cheapest_shape(shapes, weight, cost) for weight in remaining_weights}
    rows: dict[RowShape, list[tuple[tuple[int, int, int], ...]]] = {}
    filled: dict[RowShape, int] = {}

    def pop_longest(space: int) -> Piece | None:
        at = bisect.bisect_right(remaining_weights, space) - 1
        if at < 0:
            return None
        queue = queues[remaining_weights[at]]
        piece = queue.pop()
        if not queue:
            del remaining_weights[at]
        return piece

    while remaining_weights:
        # The heaviest piece determines the row, since later ones fit wherever it does.
        shape = shape_by_weight[remaining_weights[-1]]
        # Weights bound targets as well: pieces that fit into a row's positions fit into its slots.
        row, space = [], shape.length
        while (piece := pop_longest(space)) is not None:
            row.append(piece[1:])
            space -= piece[0]
        rows.setdefault(shape, []).append(tuple(row))
        filled[shape] = max(filled.get(shape, 0), shape.length - space)
    return [
        PackedQueries(shape=shape, rows=tuple(rows[shape]), filled=filled[shape]) for shape in shapes if shape in rows
    ]


def _cheapest_shape(shapes: Sequence[RowShape], weight: int, cost: Callable[[RowShape], float]) -> RowShape:
    """The shape in which a piece of a weight costs least in a row that is filled with pieces of the same weight."""
    fitting = [shape for shape in shapes if shape.length >= weight]
    return min(fitting, key=lambda shape: (cost(shape) / (shape.rows * (shape.length // weight)), shape.length))
