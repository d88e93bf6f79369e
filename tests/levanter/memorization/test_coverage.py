"""Coverage and heat against a loop over characters, on texts with characters of one to four bytes."""

import math

import numpy as np
import pytest
from helpers.book_results import book_of_bytes, byte_spans, window_spans
from hypothesis import given, settings
from hypothesis import strategies as st

from levanter.memorization.coverage import characters, cover_spans, coverage, covered
from levanter.memorization.heatmap import LIGHTEST, character_heat, columns, shade

TEXTS = st.text(alphabet="ab\n <é—字𝕏🙂", min_size=8, max_size=60)


def loop_heat(log_pz, spans, length):
    heat = [-math.inf] * length
    for value, (start, stop) in zip(log_pz, spans, strict=True):
        for at in range(start, stop):
            heat[at] = max(heat[at], value)
    return np.array(heat)


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.integers(1, 5), st.integers(0, 6), st.integers(1, 9), st.integers(0, 2**31))
def test_equal_a_loop_over_characters(text, stride, prefix, suffix, seed):
    spans = byte_spans(text)
    if len(spans) < prefix + suffix:
        return
    starts = np.arange(0, len(spans) - prefix - suffix + 1, stride)
    suffixes = window_spans(spans, starts, prefix, prefix + suffix)
    random = np.random.default_rng(seed)
    log_pz = np.where(random.random(len(starts)) < 0.2, -np.inf, -random.exponential(6.0, len(starts)))
    heat = loop_heat(log_pz, suffixes, len(text))
    np.testing.assert_array_equal(character_heat(log_pz, suffixes, len(text)), heat)
    for threshold in (0.001, 0.2, 1.0):
        expected = sum(value >= math.log(threshold) for value in heat) / len(text)
        assert coverage(log_pz, suffixes, len(text), threshold=threshold) == pytest.approx(expected, abs=1e-15)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.floats(-20, 0)), max_size=12),
    st.integers(min_value=40, max_value=70),
)
def test_any_spans(triples, length):
    spans = np.array([sorted(t[:2]) for t in triples], dtype=np.int64).reshape(-1, 2)
    values = np.array([t[2] for t in triples])
    np.testing.assert_array_equal(character_heat(values, spans, length), loop_heat(values, spans, length))
    inked = [any(start <= at < stop for start, stop in spans) for at in range(length)]
    assert covered(spans, length).tolist() == inked


def test_a_split_character_belongs_to_both_windows():
    # 字 has three bytes; the windows' suffixes are bytes 2–3 and 3–4 of "ab字c".
    text = "ab字c"
    spans = window_spans(byte_spans(text), np.array([0, 1]), 2, 4)
    assert spans.tolist() == [[2, 3], [2, 3]]
    assert coverage([-1.0, -np.inf], spans, len(text), threshold=0.3) == 0.25


def test_three_ways_to_cover():
    book = book_of_bytes("abcdefghij" * 12, prefix=50, suffix=50, stride=5)
    first = [int(x) for x in cover_spans(book, "window")[0]]
    assert first == [0, 100]
    assert cover_spans(book, "suffix")[0].tolist() == [50, 100]
    # Published code: 50 (tokens) is added to the first character, and the last character is left out.
    assert cover_spans(book, "paper_v1")[0].tolist() == [50, 99]
    wide = book_of_bytes("é" * 60, prefix=50, suffix=50, stride=5)
    assert cover_spans(wide, "suffix")[0].tolist() == [25, 50]
    assert cover_spans(wide, "paper_v1")[0].tolist() == [50, 50]
    with pytest.raises(ValueError, match="suffix, window, paper_v1"):
        cover_spans(book, "words")  # pyright: ignore


def test_length_of_the_book():
    book = book_of_bytes("héllo wörld, hello")
    assert characters(book) == 18
    private = book.__class__(**{**vars(book), "text": None})
    assert characters(private) == 18
    unknown = book.__class__(**{**vars(book), "text": None, "manifest": {}})
    assert characters(unknown) == book.char_spans[:, 1].max()


def test_a_book_of_half_a_million_characters():
    random = np.random.default_rng(0)
    start = np.sort(random.integers(0, 499_000, 100_000))
    spans = np.stack([start, start + random.integers(100, 900, 100_000)], axis=1)
    log_pz = -random.exponential(20.0, 100_000)
    heat = character_heat(log_pz, spans, 500_000)
    some = random.integers(0, 500_000, 300)
    inside = (spans[None, :, 0] <= some[:, None]) & (some[:, None] < spans[None, :, 1])
    np.testing.assert_array_equal(heat[some], np.where(inside, log_pz, -np.inf).max(axis=1))
    assert coverage(log_pz, spans, 500_000) == pytest.approx(np.mean(heat >= math.log(0.001)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: coverage([0.0], np.array([[0, 5]]), 4), r"span 0 is \[0, 5\), .* 4 characters"),
        (lambda: coverage([0.0], np.array([[3, 2]]), 4), "not a range within a text"),
        (lambda: coverage([0.0], np.array([0, 2]), 4), r"expected shape \[N, 2\]"),
        (lambda: coverage([0.0, 0.0], np.array([[0, 2]]), 4), "1 spans"),
        (lambda: coverage([], np.zeros((0, 2), int), 0), "the text is empty"),
        (lambda: coverage([0.0], np.array([[0, 1]]), 4, threshold=0.0), "0.1 % is 0.001"),
        (lambda: coverage([0.0], np.array([[0, 1]]), 4, threshold=10), "0.1 % is 0.001"),
        (lambda: shade([0.0], log_threshold=-1.0, scale="square"), "log, linear"),  # pyright: ignore
    ],
)
def test_wrong_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_ink():
    log_threshold = math.log(0.001)
    heat = np.array([-np.inf, log_threshold - 1e-9, log_threshold, log_threshold / 2, 0.0])
    np.testing.assert_allclose(shade(heat, log_threshold=log_threshold), [0, 0, LIGHTEST, (1 + LIGHTEST) / 2, 1])
    np.testing.assert_allclose(shade(heat, log_threshold=log_threshold, scale="linear"), np.exp(heat))
    # A threshold above 1 (controls with p_z = 1) leaves nothing.
    np.testing.assert_array_equal(shade(heat, log_threshold=5e-324), np.zeros(5))


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.integers(1, 60))
def test_columns_are_mean_ink(ink, width):
    found = columns(np.array(ink), width)
    # The oracle: every character cut into `width` equal pieces, every column the mean of len(ink) pieces.
    pieces = np.repeat(ink, width).reshape(width, len(ink))
    np.testing.assert_allclose(found, pieces.mean(axis=1), atol=1e-12)
