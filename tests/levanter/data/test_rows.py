"""Rows against brute force: lay the documents out one by one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from levanter.data.rows import ConcatenatedRows, packed_rows, take_mixed
from levanter.data.store import MemoryTokens, span_indices

pytestmark = pytest.mark.quick


def tokens_of(lengths, *, weighted=False):
    """Documents of these lengths: token `100·d + i + 1` is the i-th of document d."""
    documents = [100 * d + np.arange(n, dtype=np.int32) + 1 for d, n in enumerate(lengths)]
    ids = np.concatenate(documents)
    return documents, MemoryTokens(
        ids=ids,
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        weights=((ids % 3) / 2).astype(np.float32) if weighted else None,
    )


def check_row(tokens, weights, segments, pieces, *, positions, separate, weighted, joined):
    """Compares a row with the pieces (arrays of ids) it should hold, in order."""
    expected_tokens, expected_segments, expected_weights = [], [], []
    for number, piece in enumerate(pieces):
        for i, token in enumerate(piece):
            expected_tokens.append(token)
            expected_segments.append(number if separate else 0)
            goes_on = i + 1 < len(piece) or (joined and not separate and number + 1 < len(pieces))
            value = (token % 3) / 2 if weighted else 1.0
            expected_weights.append(value if goes_on else 0.0)
    padding = positions - len(expected_tokens)
    assert tokens.tolist() == expected_tokens + [0] * padding
    assert segments.tolist() == expected_segments + [-1] * padding
    assert weights.tolist() == pytest.approx(expected_weights + [0.0] * padding)


lengths_of = st.lists(st.integers(1, 25), min_size=1, max_size=12).filter(lambda lengths: sum(lengths) > 1)


@settings(deadline=None, max_examples=60)
@given(lengths_of, st.integers(2, 17), st.booleans(), st.booleans())
def test_concatenated_rows(lengths, positions, separate, weighted):
    documents, tokens = tokens_of(lengths, weighted=weighted)
    rows = ConcatenatedRows(tokens=tokens, positions=positions, separate=separate)
    stream = [(d, token) for d, document in enumerate(documents) for token in document.tolist()]
    expected = [stream[i : i + positions] for i in range(0, len(stream) - positions + 1, positions)] or [stream]
    assert len(rows) == len(expected)
    order = np.arange(len(rows))[::-1]
    taken = rows.take(order)
    for at, number in enumerate(order):
        pieces = [[t for d, t in expected[number] if d == one] for one in sorted({d for d, _ in expected[number]})]
        check_row(
            taken.tokens[at], taken.loss_weights[at], taken.segment_ids[at], pieces,
            positions=positions, separate=separate, weighted=weighted, joined=True,
        )  # fmt: skip
    assert taken.tokens.dtype == taken.segment_ids.dtype == np.int32 and taken.loss_weights.dtype == np.float32


@settings(deadline=None, max_examples=60)
@given(lengths_of, st.integers(2, 17), st.booleans(), st.booleans(), st.one_of(st.none(), st.integers(1, 3)))
def test_packed_rows(lengths, positions, separate, weighted, most):
    documents, tokens = tokens_of(lengths, weighted=weighted)
    rows = packed_rows(tokens, positions=positions, separate=separate, most=most)
    taken = rows.take(np.arange(len(rows)))
    wanted = [
        tuple(document[i : i + positions].tolist())
        for document in documents
        for i in range(0, len(document), positions)
    ]
    found = []
    for at in range(len(rows)):
        begins = [rows.begins[piece] for piece in rows.packing.row(at)]
        pieces = [tokens.ids[b : b + n] for b, n in zip(begins, rows.lengths[rows.packing.row(at)], strict=True)]
        assert most is None or len(pieces) <= most
        check_row(
            taken.tokens[at], taken.loss_weights[at], taken.segment_ids[at], [p.tolist() for p in pieces],
            positions=positions, separate=separate, weighted=weighted, joined=False,
        )  # fmt: skip
        found += [tuple(piece.tolist()) for piece in pieces]
    assert sorted(found) == sorted(wanted)
    assert rows.filled == pytest.approx(sum(lengths) / (len(rows) * positions))


def test_descriptions():
    _, tokens = tokens_of([10, 25, 3])
    assert ConcatenatedRows(tokens=tokens, positions=8, separate=True).describe() == (
        "documents concatenated, 6 tokens after the last row dropped"
    )
    assert "padded from 38 tokens" in ConcatenatedRows(tokens=tokens, positions=64, separate=True).describe()
    packed = packed_rows(tokens, positions=16, separate=True, most=None)
    assert packed.describe() == (
        "whole documents, up to 2 to a row, 79.2% of positions filled, 1 longer than a row truncated"
    )
    assert "one to a row" in packed_rows(tokens, positions=32, separate=True, most=1).describe()


def test_rows_of_several_sets_stand_where_they_belong():
    _, one = tokens_of([40])
    _, two = tokens_of([40], weighted=True)
    sets = [ConcatenatedRows(tokens=each, positions=8, separate=True) for each in (one, two)]
    which, numbers = np.array([1, 0, 1, 0, 0]), np.array([4, 1, 0, 3, 1])
    mixed = take_mixed(sets, which, numbers)
    for at, (i, number) in enumerate(zip(which, numbers, strict=True)):
        alone = sets[i].take(np.array([number]))
        assert (mixed.tokens[at] == alone.tokens[0]).all()
        assert (mixed.loss_weights[at] == alone.loss_weights[0]).all()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6)), max_size=8))
def test_span_places(spans):
    expected = [place for begin, count in spans for place in range(begin, begin + count)]
    begins, counts = np.array([b for b, _ in spans], np.int64), np.array([c for _, c in spans], np.int64)
    assert span_indices(begins, counts).tolist() == expected
