"""The passthrough tokenizer: numbers in, the same numbers out."""

import numpy as np
import pytest

from levanter.data import DataError, EvaluationSet, PassthroughTokenizer, Tokenizer, build_sequences
from levanter.data.documents import InlineDocuments

pytestmark = pytest.mark.quick


def test_numbers_pass_through():
    tokenizer = PassthroughTokenizer(300)
    assert isinstance(tokenizer, Tokenizer)
    ids, spans = tokenizer.encode_with_offsets("12  7\n299 ")
    np.testing.assert_array_equal(ids, [12, 7, 299])
    np.testing.assert_array_equal(spans, [[0, 2], [4, 5], [6, 9]])
    assert tokenizer.decode(ids) == "12 7 299" and ids.dtype == np.int32
    assert tokenizer.hash != PassthroughTokenizer(301).hash
    given = InlineDocuments(texts=("1 2 3", "4 5"), origin="x")
    sequences = build_sequences(
        [EvaluationSet(name="x", tags=("x",), document_sources=(given,))], tokenizer, max_length=8
    )
    np.testing.assert_array_equal(sequences.stream, [1, 2, 3, 4, 5])
    assert sequences.take(np.array([0])).scored_bytes.tolist() == [0]


@pytest.mark.parametrize(
    ("text", "message"),
    [("1 two", "'1 two'"), (f"1 {2**70}", str(2**70)), ("1 300", "id 300 is outside"), ("-1", "id -1")],
)
def test_anything_else_is_refused(text, message):
    with pytest.raises(DataError, match=message):
        PassthroughTokenizer(300).encode_batch([text])
