"""Pairs as rows: what lies where, what is cut or left out, and what is refused."""

import numpy as np
import pytest

from levanter.data import DataError, pair_targets
from levanter.data.pairs import pair_rows
from levanter.data.store import MemoryTokens

pytestmark = pytest.mark.quick


def tokens_of(texts: list[list[int]], counted: list[list[int]]) -> MemoryTokens:
    """Documents, and of each the places that are predicted and count."""
    weights = []
    for text, places in zip(texts, counted, strict=True):
        own = np.zeros(len(text), np.float32)
        own[np.array(places, int) - 1] = 1.0
        weights.append(own)
    return MemoryTokens(
        ids=np.concatenate(texts).astype(np.int32),
        starts=np.cumsum([0, *map(len, texts)]).astype(np.int64),
        weights=np.concatenate(weights),
    )


def made(*pairs: tuple[list[int], list[int]], prompt: int = 2) -> MemoryTokens:
    texts = [text for pair in pairs for text in pair]
    return tokens_of(texts, [list(range(prompt, len(text))) for text in texts])


def test_a_row_is_two_texts_side_by_side():
    rows = pair_rows(made(([1, 2, 3], [1, 2, 4, 5]), ([6, 7, 8, 9], [6, 7, 8])), half=5, slices="raise")
    found = rows.take(np.array([1, 0]))
    np.testing.assert_array_equal(found.tokens, [[6, 7, 8, 9, 0, 6, 7, 8, 0, 0], [1, 2, 3, 0, 0, 1, 2, 4, 5, 0]])
    np.testing.assert_array_equal(found.segment_ids[0], [0, 0, 0, 0, -1, 1, 1, 1, -1, -1])
    ids, targets = pair_targets(found)
    assert ids.shape == targets.shape == (2, 2, 5)
    np.testing.assert_array_equal(targets[0], [[-1, 8, 9, -1, -1], [-1, 8, -1, -1, -1]])
    assert rows.positions == 10 and len(rows) == 2 and rows.describe().startswith("a pair is two texts of up to 5")


LONG = (([1, 2, 3, 4, 5, 6], [1, 2, 9]), ([1, 2, 7], [1, 2, 8]))


def test_longer_ones_are_refused_by_default_and_the_message_says_what_else_there_is():
    with pytest.raises(DataError) as error:
        pair_rows(made(*LONG), half=4, slices="raise")
    assert str(error.value) == (
        "1 of 2 pairs have a text longer than a row of 4 tokens (the longest has 6), and slice_strategy: raise refuses "
        "them; raise train_seq_len, or set slice_strategy to left, right or drop"
    )


@pytest.mark.parametrize(("slices", "expected"), [("left", [1, 2, 3, 4]), ("right", [3, 4, 5, 6])])
def test_longer_ones_keep_a_part(slices, expected):
    rows = pair_rows(made(*LONG), half=4, slices=slices)
    found = rows.take(np.array([0]))
    np.testing.assert_array_equal(found.tokens[0], [*expected, 1, 2, 9, 0])
    assert rows.cut == 1 and "1 pairs with a longer text, of which the" in rows.describe()
    _, targets = pair_targets(found)
    assert (targets[0, 0, -1], targets[0, 1, 1]) == (-1, 9)


def test_longer_ones_are_left_out():
    rows = pair_rows(made(*LONG), half=4, slices="drop")
    np.testing.assert_array_equal(rows.take(np.array([0])).tokens, [[1, 2, 7, 0, 1, 2, 8, 0]])
    assert (len(rows), rows.dropped) == (1, 1) and "1 pairs with a longer text left out" in rows.describe()


def test_a_pair_of_which_nothing_counts_once_it_is_cut_is_left_out():
    rows = pair_rows(made(*LONG, prompt=3), half=3, slices="left")
    # Of the first pair's longer text only the prompt is left, of the others nothing counted to begin with.
    assert (len(rows), rows.uncounted) == (1, 1)
    with pytest.raises(DataError, match=r"all 1 pairs have a text longer than a row of 3 tokens, and nothing is left"):
        pair_rows(made(LONG[0], prompt=3), half=3, slices="left")


def test_one_text_twice_is_counted_and_refused_above_five_percent():
    others = [([1, 2, n], [1, 2, n + 1]) for n in range(10, 29)]
    rows = pair_rows(made(([1, 2, 3], [1, 2, 3]), *others), half=4, slices="raise")
    assert rows.alike == 1 and "1 pairs are one text twice, which teaches nothing" in rows.describe()
    with pytest.raises(DataError) as error:
        pair_rows(made(([1, 2, 3], [1, 2, 3]), *others[1:]), half=4, slices="raise")
    assert str(error.value) == (
        "1 of 19 pairs (5.3%) have the same text as chosen and rejected, which teaches nothing; more than 5% are "
        "refused: check chosen_field and rejected_field"
    )


def test_pairs_of_one_length_are_compared_whole(monkeypatch):
    """Some at a time, however many there are."""
    from levanter.data import pairs

    monkeypatch.setattr(pairs, "_READ_AT_ONCE", 7)
    rng = np.random.default_rng(0)
    drawn = [rng.integers(1, 3, (2, 3)).tolist() for _ in range(200)]
    texts = [(one, other) for one, other in drawn]
    expected = sum(one == other for one, other in texts)
    assert 5 < expected < 60
    found = sum(int(x.sum()) for x in pairs._alike(*_arrays(made(*texts))))
    assert found == expected


def _arrays(tokens: MemoryTokens):
    return tokens, tokens.starts[:-1].reshape(-1, 2), np.diff(tokens.starts).reshape(-1, 2)
