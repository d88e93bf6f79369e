"""`levanter.books.util` as scripts know it, against the formulas written out in NumPy."""

import math

import numpy as np
import pytest
from helpers.hf_folder import byte_level_tokenizer

from levanter.upstream.facades import books

pytestmark = pytest.mark.quick


class Wrapped:
    """A tokenizer as transformers has it: called with a text, it gives a mapping."""

    def __init__(self):
        self.inner = byte_level_tokenizer()

    def __call__(self, text, add_special_tokens=True):
        assert not add_special_tokens
        return {"input_ids": self.inner.encode(text, add_special_tokens=False).ids}

    def decode(self, ids):
        return self.inner.decode(ids)


def test_rates_are_the_formula():
    pz = np.concatenate([np.random.default_rng(0).uniform(0, 0.02, 200), [0.0, 1.0, 0.5]])
    n, p = [1, 10, 101, 1000], [0.1, 0.5, 0.999]
    rates = books.compute_extraction_rates(pz, n_list=n, p_list=p)
    for i, each in enumerate(p):
        for j, count in enumerate(n):
            expected = np.mean(1 - (1 - pz) ** count >= each)
            assert rates[i][j] == (pytest.approx(expected), each, count)


def test_defaults_are_upstream_s():
    rates = books.compute_extraction_rates([0.5])
    assert [row[0][1] for row in rates] == [0.1, 0.5, 0.9, 0.99, 0.999]
    assert [count for _, _, count in rates[0]] == list(range(1, 10_001, 10))
    largest = books.compute_max_extraction_rates([1e-19, 1e-30])[0]
    assert [count for _, _, count in largest][:3] == [1, 2, 4]
    # Sample counts beyond 64-bit integers are told as the largest of them; p_z = 1e-19 is revealed all the same.
    assert largest[-1] == (0.5, 0.1, np.iinfo(np.int64).max)


def test_needed_samples_are_the_formula():
    pz = [0.5, 0.01, 0.0, 1.0, 1e-6]
    found = books.compute_n_for_pz_and_p(pz, 0.9)
    assert found.tolist() == [math.ceil(math.log(0.1) / math.log(1 - each)) for each in (0.5, 0.01, 1e-6)]
    assert books.compute_n_for_pz_and_p([0.5], 0.9) == 4
    p, n = books.compute_n_values_for_pz_and_p_list(0.3, [0.2, 0.95])
    assert p.tolist() == [0.2, 0.95] and n.tolist() == [1, math.ceil(math.log(0.05) / math.log(0.7))]
    assert books.compute_greedy_extraction_rate([0.25, 0.75]) == 0.5


def test_windows_of_a_text():
    tokenizer = Wrapped()
    text = "the cat sat on the mat, didn't it? " * 8
    chunks = books.chunk_text_to_sliding_window_token_chunks(
        text, tokenizer, chunk_size=12, slice_length=60, cursor_inc=7
    )
    assert [chunk["start_idx"] for chunk in chunks] == list(range(0, len(text), 7))[: len(chunks)]
    for chunk in chunks:
        start = chunk["start_idx"]
        expected = tokenizer(text[start : start + 60], add_special_tokens=False)["input_ids"][:12]
        assert chunk["input_ids"] == expected and chunk["attention_mask"] == [1] * 12
        assert chunk["text"] == text[start : chunk["end_idx"] + 1] and chunk["text_len"] == len(chunk["text"])
    # A slice that has fewer tokens is no window.
    assert len(chunks) < len(range(0, len(text), 7))


def test_windows_of_tokens():
    tokenizer = Wrapped()
    ids = tokenizer("the cat sat on the mat, didn't it? " * 3, add_special_tokens=False)["input_ids"]
    windows = books.chunk_token_ids_to_sliding_windows(ids, tokenizer, chunk_size=10, cursor_inc=4)
    assert len(windows) == (len(ids) - 10) // 4 + 1
    for number, window in enumerate(windows):
        assert (window["start_token"], window["end_token"]) == (4 * number, 4 * number + 9)
        assert window["input_ids"] == ids[4 * number : 4 * number + 10]
