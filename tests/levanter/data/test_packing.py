"""Packing: nothing lost, nothing twice, nothing too long; and as tight as packing document by document."""

import bisect

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from levanter.data.packing import pack


def rows_of(packing):
    return [packing.row(i).tolist() for i in range(len(packing))]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 30), max_size=120), st.one_of(st.none(), st.integers(1, 5)))
def test_every_piece_lies_in_one_row(lengths, most):
    lengths = np.array(lengths, np.int64)
    packing = pack(lengths, positions=30, most=most)
    rows = rows_of(packing)
    assert sorted(piece for row in rows for piece in row) == list(range(len(lengths)))
    for row in rows:
        assert row and sum(lengths[row]) <= 30
        assert most is None or len(row) <= most


def best_fit_decreasing(lengths, positions):
    """Document by document: each, longest first, goes where the least space stays."""
    spaces = []  # ascending
    for length in sorted(lengths, reverse=True):
        at = bisect.bisect_left(spaces, length)
        if at < len(spaces):
            space = spaces.pop(at) - length
        else:
            space = positions - length
        bisect.insort(spaces, space)
    return len(spaces)


@pytest.mark.parametrize("seed", range(5))
def test_as_tight_as_document_by_document(seed):
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(5, 1, 4000).astype(np.int64) + 1, 1024)
    packing = pack(lengths, positions=1024)
    assert len(packing) == best_fit_decreasing(lengths.tolist(), 1024)
    assert lengths.sum() / (len(packing) * 1024) > 0.97


def test_many_documents_cost_what_their_lengths_cost():
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(6, 1.2, 500_000).astype(np.int64) + 1, 4096)
    packing = pack(lengths, positions=4096)
    filled = np.add.reduceat(lengths[packing.pieces], packing.row_starts[:-1])
    assert filled.max() <= 4096 and filled.sum() == lengths.sum()
    assert len(np.unique(packing.pieces)) == len(lengths)
    assert lengths.sum() / (len(packing) * 4096) > 0.99


def test_one_to_a_row_and_nothing():
    assert rows_of(pack(np.array([3, 3, 2]), positions=8, most=1)) == [[0], [1], [2]]
    assert len(pack(np.zeros(0, np.int64), positions=8)) == 0
