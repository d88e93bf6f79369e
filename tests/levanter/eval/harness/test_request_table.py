"""Rows of questions: every target is predicted behind the tokens it was asked behind, once, whatever shares its row."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from levanter.eval.harness.encoding import Query
from levanter.eval.harness.packing import RowShape, group_queries, row_shapes
from levanter.eval.harness.request_table import PADDING, Table
from levanter.eval.harness.scoring import query_scores


def price(shape: RowShape) -> float:
    return shape.rows * shape.length * (1 + 0.3 * shape.slots / shape.length + shape.length / 2000)


def questions(seed: int, count: int, length: int, vocab: int = 9) -> list[Query]:
    """Contexts with several answers, many of which begin one another; texts that are all answer."""
    dice = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        context = dice.integers(3, vocab, dice.integers(1, max(2, length - 8)))
        for _ in range(dice.integers(1, 5)):
            answer = dice.integers(3, vocab, dice.integers(1, 8 if dice.random() < 0.8 else length))
            whole = np.concatenate([context, answer]).astype(np.int32)[-(length + 1) :]
            found.append(Query(inputs=whole[:-1], targets=answer[-length:].astype(np.int32)))
    return found


def check(table: Table, asked: list[Query]) -> None:
    """Compares every row with what was asked, by brute force."""
    answered = set()
    for packed in table.packed:
        for batch in table.batches(packed):
            assert batch.tokens.shape == (packed.shape.rows, packed.shape.length)
            for row, slot in zip(*np.nonzero(batch.queries != PADDING), strict=True):
                owner, number = int(batch.queries[row, slot]), int(batch.target_indices[row, slot])
                question, place = asked[owner], int(batch.target_positions[row, slot])
                given_ids = np.concatenate([question.inputs, question.targets[-1:]])
                behind = given_ids[: len(question.inputs) - len(question.targets) + 1 + number]
                # What the token sees, as attention does: its own segment and its trunk, no position after its own.
                seen = batch.segment_ids[row] == batch.segment_ids[row, place]
                if batch.trunks is not None:
                    seen |= batch.segment_ids[row] == batch.trunks[row, place]
                seen &= batch.positions[row] <= batch.positions[row, place]
                assert sorted(batch.positions[row][seen]) == list(range(len(behind)))
                order = np.argsort(batch.positions[row][seen])
                assert batch.tokens[row][seen][order].tolist() == behind.tolist()
                assert batch.targets[row, slot] == question.targets[number]
                assert (owner, number) not in answered
                answered.add((owner, number))
    assert answered == {(n, k) for n, each in enumerate(asked) for k in range(len(each.targets))}


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 40),
    length=st.sampled_from([8, 64, 100, 256]),
    ways=st.sampled_from([1, 4]),
    branches=st.booleans(),
)
def test_every_target_is_asked_once_behind_its_own_tokens(
    seed: int, count: int, length: int, ways: int, branches: bool
):
    asked = questions(seed, count, length)
    shapes = row_shapes(length, tokens=256, ways=ways, branches=branches)
    assert 1 <= len(shapes) <= 6 and len({shape.name for shape in shapes}) == len(shapes)
    table = Table.from_queries(asked, shapes, price)
    check(table, asked)
    heard = Table.from_message(table.message())
    assert heard.digest == table.digest
    for mine, theirs in zip(table.packed, heard.packed, strict=True):
        for one, other in zip(table.batches(mine), heard.batches(theirs), strict=True):
            for a, b in zip(one.inputs, other.inputs, strict=True):
                np.testing.assert_array_equal(a, b)


def test_answers_of_one_token_to_one_question_are_one_sequence():
    context = np.arange(3, 20, dtype=np.int32)
    asked = [Query(inputs=context, targets=np.asarray([n], np.int32)) for n in range(4)]
    longer = np.concatenate([context, [2]]).astype(np.int32)
    asked.append(Query(inputs=longer, targets=np.asarray([2, 9], np.int32)))
    items = group_queries(asked)
    assert len(items.inputs) == 1 and items.inputs[0].tolist() == longer.tolist()
    assert len(items.targets[0]) == 6


def test_endings_of_one_context_are_computed_behind_it_once():
    context = np.arange(3, 43, dtype=np.int32)
    endings = [np.asarray(ids, np.int32) for ids in ([2, 9, 9], [2, 8], [7, 7, 7, 7], [9])]
    asked = [Query(inputs=np.concatenate([context, each])[:-1], targets=each) for each in endings]
    items = group_queries(asked, branch_tokens=64)
    # Of an ending's tokens all but the last are inputs; the second and the last have none that others have not.
    assert items.segment_sizes == ((40, 2, 3),) and len(items.inputs[0]) == 45
    assert len(group_queries(asked, branch_tokens=44).inputs) == 2, "what does not fit is not together"
    assert group_queries(asked).segment_sizes == ((42,), (43,))
    table = Table.from_queries(asked, row_shapes(64, tokens=64, ways=1, branches=True), price)
    check(table, asked)
    assert (
        table.computed_tokens
        == 64
        < 128
        == Table.from_queries(asked, row_shapes(64, tokens=64, ways=1), price).computed_tokens
    )


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 9), room=st.sampled_from([12, 30, 60]))
def test_trunks_save_the_most_tokens_that_neighbours_can(seed: int, count: int, room: int):
    """Of all ways to cut the sorted sequences into groups, by brute force."""
    asked = questions(seed, count, 12, vocab=5)[:9]
    alone = group_queries(asked)
    rows = sorted((each.tolist(), len(targets)) for each, targets in zip(alone.inputs, alone.targets, strict=True))

    def size(group: list[tuple[list[int], int]]) -> float:
        columns = zip(*(ids for ids, _ in group), strict=False)
        trunk = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
        total = trunk + sum(len(ids) - trunk for ids, _ in group)
        legal = total <= room and sum(n for _, n in group) <= room and trunk * 4 >= max(len(ids) for ids, _ in group)
        return len(group[0][0]) if len(group) == 1 else total if legal else math.inf

    least = min(
        sum(size(rows[a:b]) for a, b in itertools.pairwise([0, *cuts, len(rows)]))
        for count in range(len(rows))
        for cuts in itertools.combinations(range(1, len(rows)), count)
    )
    assert sum(len(each) for each in group_queries(asked, branch_tokens=room).inputs) == least


def test_more_targets_than_a_row_holds_are_asked_in_several():
    context = np.asarray([5, 6], np.int32)
    asked = [Query(inputs=context, targets=np.asarray([n % 7], np.int32)) for n in range(150)]
    table = Table.from_queries(asked, row_shapes(64, tokens=64, ways=1), price)
    check(table, asked)
    assert sum(len(packed.rows) for packed in table.packed) == 3


def test_no_more_tokens_than_asked_alone_in_full_rows():
    """As a harness's typical tasks are: contexts of some length, four short answers."""
    asked = questions(3, 400, 256, vocab=40)
    table = Table.from_queries(asked, row_shapes(256, tokens=2048, ways=1), price)
    assert table.computed_tokens < table.tokens


def test_a_damaged_table_is_refused():
    told = Table.from_queries(questions(1, 5, 64), row_shapes(64, tokens=64, ways=1), price).message()
    other = Table.from_queries(questions(2, 5, 64), row_shapes(64, tokens=64, ways=1), price).message()
    with pytest.raises(ValueError, match="a table of requests was damaged"):
        Table.from_message({**told, "ids": other["ids"], "lengths": other["lengths"]})


@pytest.mark.parametrize("length", [64, 256])
def test_answers_are_the_sums_of_their_tokens(length: int):
    asked = questions(5, 30, length)
    table = Table.from_queries(asked, row_shapes(length, tokens=length, ways=2), price)

    def values(batch):
        # What each target is worth depends on it and on what stands before it only.
        before = np.take_along_axis(batch.positions, batch.target_positions, axis=1)
        likely = -(batch.targets + 0.125 * before).astype(np.float32)
        return np.stack([likely, (batch.targets % 3).astype(np.float32)])

    computed = [values(batch) for packed in table.packed for batch in table.batches(packed)]
    found = query_scores(table, len(asked), computed)
    for n, each in enumerate(asked):
        assert found.logprobs[n] == -float(
            (each.targets + 0.125 * each.target_positions).astype(np.float32).sum(dtype=np.float64)
        )
        assert found.is_greedy[n] == bool((each.targets % 3 == 0).all())
