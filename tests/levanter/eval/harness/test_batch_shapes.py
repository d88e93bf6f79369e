"""Rows that suit what is asked: as long as the fullest, as many as there are; everything still has its place."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from levanter.eval.harness.batch_shapes import MAX_LENGTHS, RowLimits, best_lengths, fit_shapes, rows_per_batch
from levanter.eval.harness.encoding import HarnessError, Query
from levanter.eval.harness.packing import RowShape, row_shapes
from levanter.eval.harness.request_table import Table


def price(shape: RowShape) -> float:
    return shape.rows * shape.length * (1 + 0.3 * shape.slots / shape.length + shape.length / 2000)


def question(length: int, targets: int = 1, *, first: int = 3) -> Query:
    inputs = np.full(length, 5, np.int32)
    inputs[0] = first
    return Query(inputs=inputs, targets=np.full(targets, 7, np.int32))


@pytest.mark.parametrize(
    ("most", "counts", "spread", "kept"),
    [
        (64, [3], 1.0, 8),  # one batch, on each of 8 shards one row
        (64, [65], 1.0, 40),  # two batches, as without
        (64, [128], 1.0, 64),
        (64, [3, 130], 1.0, 48),  # three batches for the second; the first has room in one
        (32, [56], 2.0, 56),  # one batch of more rows, none of them empty
        (32, [72], 1.0, 24),
    ],
)
def test_a_batch_has_as_few_empty_rows_as_may_be(most: int, counts: list[int], spread: float, kept: int):
    assert rows_per_batch(most, counts, RowLimits(num_shards=8, max_batch_factor=spread, max_row_factor=spread)) == kept


def test_rows_are_as_long_as_what_is_in_them():
    shapes = row_shapes(128, tokens=512, ways=1)
    asked = [question(102, first=n) for n in range(5)]
    found = fit_shapes([asked], shapes, price, RowLimits(num_shards=1, max_batch_factor=2.0, max_row_factor=4.0))
    assert found == (RowShape(length=102, slots=25, rows=5),)
    assert Table.from_queries(asked, found, price).computed_tokens == 5 * 102
    # In pieces of 128, as hardware has it, there is nothing to gain.
    assert {shape.length for shape in fit_shapes([asked], shapes, price, RowLimits(num_shards=1, multiple=128))} == {
        128
    }
    assert fit_shapes([[]], shapes, price, RowLimits(num_shards=1)) == shapes


def test_trunks_where_they_save_something():
    """Fifteen contexts with four endings each; then two of which a trunk would only make a longer row."""
    dice, asked = np.random.default_rng(0), []
    for _ in range(15):
        context = dice.integers(3, 99, int(dice.integers(80, 100)))
        for _ in range(4):
            ids = np.concatenate([context, dice.integers(3, 99, int(dice.integers(10, 20)))]).astype(np.int32)
            asked.append(Query(inputs=ids[:-1], targets=ids[len(context) :]))
    room = RowLimits(num_shards=1, max_batch_factor=2.0, max_row_factor=4.0)
    computed = [
        Table.from_queries(
            asked, fit_shapes([asked], row_shapes(256, tokens=512, ways=1, branches=each), price, room), price
        )
        for each in (False, True)
    ]
    assert 2 * computed[1].computed_tokens < computed[0].computed_tokens <= 1.05 * computed[0].tokens
    most = row_shapes(256, tokens=512, ways=1, branches=True)
    assert {shape.branches for shape in fit_shapes([asked], most, price, room)} == {256}
    # Two that begin alike, of which rows twice as long would cost more than they save.
    alike = [question(100, first=n) for n in (7, 7, 8, 8)]
    for n, each in enumerate(alike):
        each.inputs[30:] = n
    dear = fit_shapes([alike], most, lambda shape: shape.rows * shape.length**2, room)
    assert {shape.branches for shape in dear} == {0}


def test_lengths_are_the_closest_that_there_are():
    """Against every choice of so many of the weights; batches have four rows."""
    dice = np.random.default_rng(1)

    def rows(length: int, count: int) -> int:
        return -(-count // 4) * 4

    weights = sorted(int(n) for n in dice.integers(50, 120, 14))

    def tokens(lengths: list[int]) -> int:
        own = [min(n for n in lengths if n >= weight) for weight in weights]
        return sum(n * rows(n, own.count(n)) for n in lengths)

    found = best_lengths(weights, 4, rows)
    assert [len(each) for each in found] == [1, 2, 3, 4]
    for mine in found:
        others = itertools.combinations(sorted(set(weights[:-1]) - {weights[-1]}), len(mine) - 1)
        assert tokens(mine) == min(tokens([*each, weights[-1]]) for each in others)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10_000), count=st.integers(1, 40), ways=st.sampled_from([1, 4]), unit=st.sampled_from([1, 16])
)
@example(seed=0, count=14, ways=1, unit=1)
def test_no_question_is_without_a_place_and_no_more_is_computed(seed: int, count: int, ways: int, unit: int):
    dice = np.random.default_rng(seed)
    shapes = row_shapes(128, tokens=256, ways=ways)
    asked = []
    for n in range(count):
        length = int(dice.integers(1, 129))
        asked.append(question(length, int(dice.integers(1, length + 1)) if dice.random() < 0.3 else 1, first=n + 10))
    found = fit_shapes(
        [asked, asked[:1]],
        shapes,
        price,
        RowLimits(num_shards=ways, multiple=unit, max_batch_factor=2.0, max_row_factor=4.0),
    )
    # Every length is a Program to compile. Each table has fullest rows of its own: with seed 0 and 14 requests the
    # lengths of both tables were kept once, one more than MAX_LENGTHS.
    assert len(found) <= MAX_LENGTHS and len({shape.name for shape in found}) == len(found)
    assert all(shape.rows % ways == 0 and (shape.length % unit == 0 or shape.length == 128) for shape in found)
    before, after = (Table.from_queries(asked, each, price) for each in (shapes, found))
    assert sorted(n for packed in after.packed for row in packed.rows for n, *_ in row) == sorted(
        n for packed in before.packed for row in packed.rows for n, *_ in row
    )
    paid = [sum(packed.batches * price(packed.shape) for packed in each.packed) for each in (before, after)]
    # A length more has to be worth it, and the first table is not alone.
    assert paid[1] <= 1.1 * paid[0] + price(max(found, key=price))


def test_what_is_longer_than_it_was_is_said():
    found = fit_shapes([[question(40)]], row_shapes(128, tokens=128, ways=1), price, RowLimits(num_shards=1))
    with pytest.raises(HarnessError, match="a request of 41 tokens, and its longest one was 40"):
        Table.from_queries([question(41)], found, price)
