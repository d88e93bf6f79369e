"""Sequences: every token behind a document's first is scored exactly once, with its own document as context."""

import numpy as np
import pytest
from helpers.small_tokenizer import BOS, EOS, SmallTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from levanter.data import DataError, EvalBatches, EvaluationSet, Tokenizer, build_sequences
from levanter.data.documents import InlineDocuments

pytestmark = pytest.mark.quick


def sets_of(*groups):
    return [
        EvaluationSet(
            name=f"set{i}", tags=(f"set{i}",), document_sources=(InlineDocuments(texts=tuple(texts), origin=f"set{i}"),)
        )
        for i, texts in enumerate(groups)
    ]


def expected_pairs(groups, tokenizer, *, bos, eos):
    """By brute force, for each set: (context of the document so far, scored token) for every token behind the first."""
    result = []
    for texts in groups:
        pairs = []
        for text in filter(None, texts):
            ids = [BOS] * bos + list(tokenizer.encode_with_offsets(text)[0]) + [EOS] * eos
            pairs += [(tuple(ids[:i]), ids[i]) for i in range(1, len(ids))]
        result.append(pairs)
    return result


words = st.lists(st.sampled_from(["the ", "and ", "é", "日本", "x", "ü", "\n"]), max_size=9).map("".join)
groups_of_texts = st.lists(st.lists(words, min_size=1, max_size=6), min_size=1, max_size=3).filter(
    lambda groups: all(any(len(text) > 1 for text in texts) for texts in groups)
)


@settings(max_examples=60, deadline=None)
@given(groups_of_texts, st.integers(2, 9), st.booleans(), st.booleans())
def test_every_token_is_scored_exactly_once(groups, max_length, bos, eos):
    tokenizer = SmallTokenizer()
    expected = expected_pairs(groups, tokenizer, bos=bos, eos=eos)
    if not all(expected):
        return
    sequences = build_sequences(sets_of(*groups), tokenizer, max_length=max_length, enforce_bos=bos, enforce_eos=eos)
    taken = sequences.take(np.arange(sequences.row_count))
    found = [[] for _ in groups]
    for row in range(sequences.row_count):
        which = int(sequences.set_indices(np.array([row]))[0])
        for t in np.flatnonzero(taken.loss_mask[row]):
            segment = taken.segment_ids[row]
            assert segment[t] == segment[t + 1] >= 0
            context = tuple(taken.tokens[row, : t + 1][segment[: t + 1] == segment[t]])
            found[which].append((context, taken.tokens[row, t + 1]))
    for pairs, wanted in zip(found, expected, strict=True):
        assert [token for _, token in pairs] == [token for _, token in wanted]
        for (context, _), (full, _) in zip(pairs, wanted, strict=True):
            assert context and full[-len(context) :] == context
    assert not taken.loss_mask[:, -1].any()
    lengths = tokenizer.byte_lengths()
    for span, pairs in zip(sequences.sets, expected, strict=True):
        rows = slice(span.first_row, span.first_row + span.rows)
        assert taken.scored_tokens[rows].sum() == span.scored_tokens == len(pairs)
        assert taken.scored_bytes[rows].sum() == sum(lengths[token] for _, token in pairs)


def test_bytes_are_those_of_the_text():
    texts = ["the 日本 and é", "naïve \N{GRINNING FACE}\n\n", "x"]
    sequences = build_sequences(sets_of(texts), SmallTokenizer(), max_length=7)
    taken = sequences.take(np.arange(sequences.row_count))
    assert taken.scored_bytes.sum() == sum(len(text.encode()) for text in texts)
    assert sequences.sets[0].chars == sum(map(len, texts))


def test_rows_drawn():
    sequences = build_sequences(sets_of(["abcd", "xy"]), SmallTokenizer(bos=False, eos=False), max_length=4)
    taken = sequences.take(np.array([0, 1, -1]))
    a, b, c, d, x, y = (3 + ord(letter) for letter in "abcdxy")
    np.testing.assert_array_equal(taken.tokens, [[a, b, c, d], [d, x, y, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(taken.loss_mask, [[1, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(taken.segment_ids, [[0, 0, 0, 0], [0, 1, 1, -1], [-1, -1, -1, -1]])
    np.testing.assert_array_equal(taken.scored_tokens, [3, 1, 0])
    assert taken.tokens.dtype == np.int32 and taken.segment_ids.dtype == np.int32 and taken.loss_mask.dtype == bool


def test_documents_may_share_a_segment_without_changing_what_is_scored():
    groups = (["abcd", "xy"],)
    apart = build_sequences(sets_of(*groups), SmallTokenizer(), max_length=5)
    shared = build_sequences(sets_of(*groups), SmallTokenizer(), max_length=5, separate_documents=False)
    rows = np.arange(apart.row_count)
    np.testing.assert_array_equal(apart.take(rows).loss_mask, shared.take(rows).loss_mask)
    assert set(np.unique(shared.take(rows).segment_ids)) <= {-1, 0}


@pytest.mark.parametrize("batch_size", [1, 3, 8, 64])
def test_batches_hold_all_rows_in_order_and_then_padding(batch_size):
    sequences = build_sequences(sets_of(["abcdefghij" * 3], ["xyz" * 7, "the "]), SmallTokenizer(), max_length=6)
    batches = EvalBatches(sequences=sequences, batch_size=batch_size)
    rows = np.concatenate([batches[step].rows for step in range(len(batches))])
    np.testing.assert_array_equal(rows[: sequences.row_count], np.arange(sequences.row_count))
    assert (rows[sequences.row_count :] == -1).all() and len(rows) - sequences.row_count < batch_size
    everything = sequences.take(np.arange(sequences.row_count))
    np.testing.assert_array_equal(
        np.concatenate([batches[step].tokens for step in range(len(batches))])[: sequences.row_count], everything.tokens
    )
    with pytest.raises(IndexError):
        batches[len(batches)]


def test_a_limit_takes_the_first_rows_of_each_set():
    sequences = build_sequences(sets_of(["a" * 50], ["b" * 4], ["c" * 50]), SmallTokenizer(), max_length=6)
    batches = EvalBatches(sequences=sequences, batch_size=4, max_rows_per_set=3)
    assert [span.rows for span in sequences.sets] == [11, 1, 11]
    np.testing.assert_array_equal(batches.rows, [0, 1, 2, 11, 12, 13, 14])


def test_long_sets_are_tokenized_in_pieces(monkeypatch):
    monkeypatch.setattr("levanter.data.eval_sequences.CHUNK_CHARS", 20)
    texts = [f"document {i} and the rest" for i in range(9)]
    seen = []
    pieces = build_sequences(sets_of(texts, texts), SmallTokenizer(), max_length=8, on_progress=seen.append)
    monkeypatch.setattr("levanter.data.eval_sequences.CHUNK_CHARS", 10**9)
    whole = build_sequences(sets_of(texts, texts), SmallTokenizer(), max_length=8)
    np.testing.assert_array_equal(pieces.stream, whole.stream)
    assert seen == sorted(seen) and seen[-1] == 2 * sum(map(len, texts)) and len(seen) == 18


def test_empty_documents_are_left_out_and_counted():
    sequences = build_sequences(sets_of(["", "ab", "", "cd"]), SmallTokenizer(), max_length=8)
    assert sequences.sets[0].documents == 2 and sequences.sets[0].skipped == 2


@pytest.mark.parametrize("texts", [[], ["", ""], ["x"]])
def test_sets_without_a_token_to_score_are_refused(texts):
    with pytest.raises(DataError, match="data set 'set0' is empty"):
        build_sequences(sets_of(texts), SmallTokenizer(bos=False, eos=False), max_length=8)


def test_a_tokenizer_larger_than_the_model_is_refused():
    with pytest.raises(DataError) as info:
        build_sequences(sets_of(["plain", "日本"]), SmallTokenizer(), max_length=8, vocab_size=260)
    assert str(info.value) == (
        "set0[1]: token id 261 is outside the model's vocabulary of 260; tokenizer small (264 ids) and model do not "
        "match"
    )


def test_lengths_too_small_are_refused():
    with pytest.raises(ValueError, match="max_eval_length must be at least 2"):
        build_sequences(sets_of(["ab"]), SmallTokenizer(), max_length=1)


def test_the_small_tokenizer_is_one():
    assert isinstance(SmallTokenizer(), Tokenizer)
