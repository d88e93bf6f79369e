"""Row shapes for a known list of queries, with little padding and few empty rows.

The lengths of `packing.row_shapes` suit any requests, but a small number of documents fills them badly: a row of 128
positions for 102 tokens, four rows where two are used. If every request is known, each used length is reduced to that
of its fullest row, and lengths that split the requests into equal parts are tried as well.
"""

import bisect
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from levanter.eval.harness.encoding import Query
from levanter.eval.harness.packing import (
    SPARSE_RATIO,
    PackedQueries,
    Piece,
    RowShape,
    group_queries,
    max_branch_tokens,
    pack_cheapest,
    split_by_density,
)

MAX_LENGTHS = 6
"""The largest number of row lengths, those of sparse and dense rows together."""
LENGTH_OVERHEAD = 0.004
"""The share of the cost that a further length has to save: every length is a Program that has to be compiled."""
_MAX_CANDIDATES = 64
"""Weights from which the lengths are chosen."""


@dataclass(frozen=True, kw_only=True)
class RowLimits:
    """Limits of the rows of a batch on given devices.

    Attributes:
        num_shards: shards of a batch; the number of rows is a multiple of it.
        multiple: lengths are multiples of it.
        max_batch_factor: factor by which the number of batches may grow in exchange for fewer empty rows.
        max_row_factor: factor by which the rows of a batch may grow for the same reason.
    """

    num_shards: int
    multiple: int = 1
    max_batch_factor: float = 1.0
    max_row_factor: float = 1.0


def fit_shapes(
    query_lists: Sequence[Sequence[Query]],
    shapes: Sequence[RowShape],
    cost: Callable[[RowShape], float],
    limits: RowLimits,
) -> tuple[RowShape, ...]:
    """The shapes for lists of queries that are all queries of a run; `shapes` unchanged if there are no queries.

    Args:
        query_lists: the queries of each table.
        shapes: shapes for any queries, with the largest number of rows.
        cost: cost of a batch, in any unit.
        limits: limits of the rows.
    """
    candidates = [_fit_kinds(query_lists, shapes, cost, limits)]
    if max_branch_tokens(shapes) is not None:
        # With few queries, items that share a trunk may leave rows emptier than separate items.
        candidates.append(_fit_kinds(query_lists, [replace(shape, branches=0) for shape in shapes], cost, limits))
    return min(candidates, key=lambda candidate: candidate[0])[1]


def _fit_kinds(
    query_lists: Sequence[Sequence[Query]],
    shapes: Sequence[RowShape],
    cost: Callable[[RowShape], float],
    limits: RowLimits,
) -> tuple[float, tuple[RowShape, ...]]:
    """The cost of all batches, and the shapes, with `branches` as it is."""
    branches = max_branch_tokens(shapes)
    tables = [
        split_by_density(group_queries(queries, branch_tokens=branches), shapes) for queries in query_lists if queries
    ]
    if not tables:
        return 0.0, tuple(shapes)
    total_cost, selected = 0.0, []
    kinds = [dense for dense in (False, True) if any(table[dense] for table in tables)]
    for dense in kinds:
        # Two lengths are kept for dense rows while the sparse ones are chosen.
        max_lengths = MAX_LENGTHS - len(selected) if dense == kinds[-1] else MAX_LENGTHS - 2
        pieces = [sorted(table[dense], reverse=True) for table in tables if table[dense]]
        # Sparse and dense rows are fitted separately: the last kind may use all lengths that the other one did not.
        kind_shapes = [shape for shape in shapes if shape.is_dense == dense]
        tokens = max(shape.rows * shape.length for shape in kind_shapes) // limits.num_shards

        # Default arguments bind the values of this iteration, as a closure would see those of the last one.
        def shape_of_length(length: int, dense: bool = dense, tokens: int = tokens) -> RowShape:
            slots, rows = length if dense else length // SPARSE_RATIO, limits.num_shards * max(1, tokens // length)
            return RowShape(length=length, slots=slots, rows=rows, branches=branches or 0)

        @functools.cache
        def padded_rows(length: int, count: int, max_tokens: int = tokens) -> int:
            rows = rows_per_batch(limits.num_shards * max(1, max_tokens // length), [count], limits)
            return -(-count // rows) * rows

        weights = sorted(weight for table in pieces for weight, *_ in table)
        longest = max(shape.length for shape in kind_shapes)
        initial_lengths = best_lengths(weights, max_lengths, padded_rows)
        if len(kind_shapes) <= max_lengths:
            initial_lengths.insert(0, [shape.length for shape in kind_shapes])
        length_choices = [
            sorted({_round_up(length, limits.multiple, longest) for length in candidate_lengths})
            for candidate_lengths in initial_lengths
        ]
        candidates = [
            _shrink_to_fullest(candidate_lengths, max_lengths, pieces, cost, limits, shape_of_length)
            for candidate_lengths in length_choices
        ]
        # Candidates are compared by the cost of their real batches: `best_lengths` ignores that items share rows.
        best_cost, best_shapes = min(candidates, key=lambda candidate: candidate[0])
        total_cost, selected = total_cost + best_cost, selected + best_shapes
    return total_cost, tuple(selected)


def best_lengths(weights: Sequence[int], max_lengths: int, rows: Callable[[int, int], int]) -> list[list[int]]:
    """The best one, two, … lengths: those whose batches have the fewest tokens if each weight has a row of its own.

    Args:
        weights: ascending.
        max_lengths: the largest number of lengths.
        rows: (length, used rows) → the rows of all batches of that length.
    """
    # All weights if there are few; otherwise those that split them into equal parts.
    # The largest weight is always a candidate: the longest item needs a row.
    step = -(-len(weights) // _MAX_CANDIDATES)
    ends = sorted({*weights[step - 1 :: step], weights[-1]})
    counts_below = [0, *(bisect.bisect_right(weights, end) for end in ends)]
    # Dynamic program over candidates: `least[k]` is the fewest tokens for all weights up to candidate k, and
    # `chosen[k]` are the lengths that reach it. Each iteration allows one more length.
    least, chosen, choices = [0.0, *[math.inf] * len(ends)], [[] for _ in counts_below], []
    for _ in range(min(max_lengths, len(ends))):
        # The weights of candidates n + 1 to `last` get rows of length `end`, those below are covered by the earlier
        # lengths.
        next_least, next_chosen = [math.inf] * len(counts_below), [[] for _ in counts_below]
        for last, end in enumerate(ends, 1):
            for n in range(last):
                if (tokens := least[n] + end * rows(end, counts_below[last] - counts_below[n])) < next_least[last]:
                    next_least[last], next_chosen[last] = tokens, [*chosen[n], end]
        least, chosen = next_least, next_chosen
        choices.append(chosen[-1])
    return choices


def rows_per_batch(max_rows: int, counts: Sequence[int], limits: RowLimits) -> int:
    """The number of rows per batch that leaves the fewest rows empty.

    Args:
        max_rows: the largest number of rows of a batch.
        counts: the number of rows of each table.
        limits: factors by which the numbers of batches and rows may exceed that.
    """

    def batches(rows: int) -> int:
        return sum(-(-count // rows) for count in counts)

    # Smaller batches have fewer empty rows, and more of them cost more time between executions.
    max_batches = int(batches(max_rows) * limits.max_batch_factor)
    usable = [
        rows
        for rows in range(limits.num_shards, int(max_rows * limits.max_row_factor) + 1, limits.num_shards)
        if batches(rows) <= max_batches
    ]
    # Fewest rows in total; of equal ones the fewest executions.
    return min(usable or [max_rows], key=lambda rows: (batches(rows) * rows, batches(rows)))


def _shrink_to_fullest(
    lengths: Sequence[int],
    max_lengths: int,
    pieces: Sequence[Sequence[Piece]],
    cost: Callable[[RowShape], float],
    limits: RowLimits,
    shape_of_length: Callable[[int], RowShape],
) -> tuple[float, list[RowShape]]:
    """The cost of all batches, and the shapes: lengths that are used, each reduced to its fullest row.

    There are at most `max_lengths` of them, if there are no more `lengths`.
    """
    longest = max(lengths)

    def packed(lengths: Sequence[int]) -> list[PackedQueries]:
        """The rows of each table, with the smallest batch: the number of rows per batch is chosen afterwards."""
        small_shapes = [replace(shape_of_length(length), rows=limits.num_shards) for length in lengths]
        return [packed_rows for table in pieces for packed_rows in pack_cheapest(small_shapes, table, cost)]

    first_packed = packed(lengths)
    shorter = sorted({_round_up(packed_rows.filled, limits.multiple, longest) for packed_rows in first_packed})
    if len(shorter) > max_lengths:
        # Every table has a fullest row of its own: several tables may yield more lengths than they were packed with.
        # The fullest row over all tables yields at most one for each.
        fullest: dict[int, int] = {}
        for packed_rows in first_packed:
            fullest[packed_rows.shape.length] = max(fullest.get(packed_rows.shape.length, 0), packed_rows.filled)
        shorter = sorted({_round_up(filled, limits.multiple, longest) for filled in fullest.values()})
    counts: dict[int, list[int]] = {}
    for packed_rows in packed(shorter):
        counts.setdefault(packed_rows.shape.length, []).append(len(packed_rows.rows))
    shapes = [
        replace(shape_of_length(n), rows=rows_per_batch(shape_of_length(n).rows, row_counts, limits))
        for n, row_counts in sorted(counts.items())
    ]
    # Packed a third time: with the final rows per batch another set of shapes may cost least, and some may be unused.
    final = [packed_rows for table in pieces for packed_rows in pack_cheapest(shapes, table, cost)]
    used = [shape for shape in shapes if any(packed_rows.shape == shape for packed_rows in final)]
    return sum(packed_rows.batches * cost(packed_rows.shape) for packed_rows in final) * (
        1 + LENGTH_OVERHEAD * len(used)
    ), used


def _round_up(length: int, unit: int, longest: int) -> int:
    return min(longest, -(-length // unit) * unit)
