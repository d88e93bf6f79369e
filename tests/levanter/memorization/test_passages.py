"""Passages against a plain loop over windows, and the published values."""

import math

import numpy as np
import pytest
from helpers.book_results import book_of_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from levanter.memorization import published
from levanter.memorization.passages import runs, top_passages
from levanter.memorization.published import PUBLISHED, published_book, published_coverages

pytestmark = pytest.mark.quick

WINDOWS = st.lists(
    st.tuples(
        st.integers(0, 60), st.integers(1, 8), st.integers(1, 12), st.sampled_from([-9.0, -3.0, -1.0, -0.5, 0.0])
    ),
    min_size=1,
    max_size=25,
)


def loop_passages(values, windows, suffixes, log_threshold, count):
    """From the likeliest down: take a window, drop all whose suffix shares a character with it."""
    left = [n for n in range(len(values)) if values[n] >= log_threshold]
    found = []
    while left and len(found) < count:
        best = min(left, key=lambda n: (-values[n], n))
        inside = set(range(*suffixes[best]))
        near = [n for n in left if inside & set(range(*suffixes[n]))]
        found.append((best, len(near), tuple(suffixes[best]), (windows[best][0], suffixes[best][0])))
        left = [n for n in left if n not in near]
    return found


@settings(deadline=None)
@given(WINDOWS, st.integers(1, 6))
def test_equal_a_loop(windows, count):
    whole = [(start, start + prefix + suffix) for start, prefix, suffix, _ in windows]
    suffixes = [(start + prefix, start + prefix + suffix) for start, prefix, suffix, _ in windows]
    values = [value for *_, value in windows]
    found = top_passages(values, np.array(whole), np.array(suffixes), 100, log_threshold=-4.0, count=count)
    expected = loop_passages(values, whole, suffixes, -4.0, count)
    assert [(p.window, p.merged, p.suffix, p.prefix) for p in found] == expected
    inked = {at for n, value in enumerate(values) if value >= -4.0 for at in range(*suffixes[n])}
    for passage in found:
        start, stop = passage.run
        assert start <= passage.suffix[0] and passage.suffix[1] <= stop
        assert set(range(start, stop)) <= inked and start - 1 not in inked and stop not in inked


def test_nothing_at_the_threshold():
    book = book_of_bytes("some text that nobody knows")
    spans = (book.char_spans, book.suffix_char_spans)
    assert top_passages(np.full(len(book), -np.inf), *spans, 27, log_threshold=math.log(0.001)) == ()


def test_runs():
    assert runs(np.array([True, False, False, True, True])).tolist() == [[0, 1], [3, 5]]
    assert runs(np.zeros(3, bool)).tolist() == []
    assert runs(np.zeros(0, bool)).tolist() == []


# What the specification lists, typed anew from there: (Llama-3.1-70B, Llama-3.1-8B).
SPECIFIED = {
    "Harry Potter 1": (96.27, 2.62),
    "Great Gatsby": (88.77, 12.51),
    "Nineteen Eighty-Four": (81.19, 16.21),
    "On Liberty": (90.83, 23.13),
    "Frankenstein": (83.52, 11.86),
    "Alice in Wonderland": (48.80, 18.84),
    "Pride and Prejudice": (84.20, 56.87),
    "Ulysses": (76.11, 0.61),
    published.MEAN_OF_BOOKS: (10.65, 1.31),
}


@pytest.mark.parametrize(("title", "values"), SPECIFIED.items())
def test_published_values(title, values):
    found = published_coverages(title)
    assert (found["Llama-3.1-70B"], found["Llama-3.1-8B"]) == values


@pytest.mark.parametrize(
    ("title", "book"),
    [
        ("the great gatsby", "The Great Gatsby"),
        ("Gatsby", "The Great Gatsby"),
        ("Frankenstein; or, the Modern Prometheus", "Frankenstein"),
        ("Alice’s Adventures in Wonderland", "Alice in Wonderland"),
        ("ULYSSES", "Ulysses"),
        ("HP1", "Harry Potter and the Sorcerer's Stone"),
        ("Ulysses Annotated", None),
        ("", None),
    ],
)
def test_titles(title, book):
    assert published_book(title) == book
    assert (published_coverages(title) == {}) == (book is None)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("meta-llama/Llama-3.1-70B", ["Llama-3.1-70B"]),
        ("/models/llama3.1-8b-hf", ["Llama-3.1-8B"]),
        ("meta-llama/Meta-Llama-3.1-405B", []),
        ("EleutherAI/pythia-12b (llama)", ["Pythia-12B"]),
        ("google/gemma-2-27b", ["Gemma-2-27B"]),
        ("huggyllama/llama-65b", []),
    ],
)
def test_models(model, names):
    assert list(published_coverages("The Great Gatsby", model)) == names


def test_every_value_is_a_percentage():
    assert len(PUBLISHED) == 16
    assert all(0 <= value <= 100 for values in PUBLISHED.values() for value in values.values())
    assert set(PUBLISHED["The Great Gatsby"]) == set(published.MODELS)
