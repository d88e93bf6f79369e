"""Published coverages, for comparison with own results.

Share of a book's characters, in %, inside at least one 50-token suffix with p_z ≥ 0.1 %: prefix 50 tokens (BOS and 49
of the text), a window every 10 characters, top-k 40, T = 1, which is the preset `paper`. From the results that
accompany Cooper et al., arXiv 2505.12546 (books-memorization.github.io, coverage data of 200 books and 14 models, read
in 2026-07). A run under another preset, suffix length, threshold or edition of a text is not exactly comparable.
No value for a 405B model is published.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType

PRESET = "paper"
THRESHOLD = 0.001
SCHEME = "k40"

MODELS = (
    "Llama-1-65B",
    "Llama-2-70B",
    "Llama-3-8B",
    "Llama-3.1-8B",
    "Llama-3-70B",
    "Llama-3.1-70B",
    "Qwen2.5-72B",
    "Gemma-2-27B",
    "Pythia-12B",
)
MEAN_OF_BOOKS, MEDIAN_OF_BOOKS = "mean of 200 books", "median of 200 books"

_ALL_MODELS: Mapping[str, tuple[float, ...]] = {
    "Harry Potter and the Sorcerer's Stone": (34.83, 36.41, 2.15, 2.62, 93.74, 96.27, 58.21, 21.46, 0.41),
    "The Great Gatsby": (73.60, 71.82, 11.44, 12.51, 85.29, 88.77, 26.86, 33.64, 1.45),
    "Nineteen Eighty-Four": (67.27, 71.21, 13.27, 16.21, 79.97, 81.19, 30.59, 19.16, 1.88),
    "On Liberty": (73.12, 49.66, 21.65, 23.13, 90.03, 90.83, 80.53, 17.30, 2.42),
    "Frankenstein": (65.15, 65.67, 15.87, 11.86, 83.34, 83.52, 35.26, 49.19, 0.64),
    "Alice in Wonderland": (42.89, 42.72, 18.39, 18.84, 47.74, 48.80, 38.00, 24.94, 1.65),
    "The Hobbit": (19.78, 15.03, 1.65, 2.00, 60.82, 68.69, 10.59, 2.55, 0.07),
    "We Were Eight Years in Power": (8.40, 7.92, 1.37, 1.51, 12.06, 14.26, 4.40, 1.43, 0.89),
    "This Is How You Lose Her": (0.86, 1.02, 0.52, 0.52, 1.11, 1.15, 0.69, 0.41, 0.70),
    "Sandman Slim": (0.32, 0.32, 0.29, 0.29, 0.38, 0.43, 0.38, 0.34, 0.36),
    MEAN_OF_BOOKS: (4.20, 4.38, 1.17, 1.31, 9.50, 10.65, 3.04, 1.72, 0.51),
    MEDIAN_OF_BOOKS: (0.72, 0.79, 0.35, 0.35, 1.04, 1.15, 0.59, 0.42, 0.32),
}
_SOME_MODELS: Mapping[str, Mapping[str, float]] = {
    "Pride and Prejudice": {"Llama-3.1-70B": 84.20, "Llama-3.1-8B": 56.87, "Pythia-12B": 0.94},
    "Ulysses": {"Llama-3.1-70B": 76.11, "Llama-3.1-8B": 0.61, "Pythia-12B": 0.10},
    "Winnie the Pooh": {"Llama-3.1-70B": 79.94, "Llama-3.1-8B": 3.69, "Pythia-12B": 1.01},
    "Down and Out in the Magic Kingdom": {"Llama-3.1-70B": 1.11, "Llama-3.1-8B": 0.21, "Pythia-12B": 0.47},
}
PUBLISHED: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        **{book: MappingProxyType(dict(zip(MODELS, values, strict=True))) for book, values in _ALL_MODELS.items()},
        **{book: MappingProxyType(dict(values)) for book, values in _SOME_MODELS.items()},
    }
)
"""Book → model → coverage in %."""

_ALSO_CALLED = {
    "harry potter 1": "Harry Potter and the Sorcerer's Stone",
    "harry potter and the philosophers stone": "Harry Potter and the Sorcerer's Stone",
    "hp1": "Harry Potter and the Sorcerer's Stone",
    "gatsby": "The Great Gatsby",
    "1984": "Nineteen Eighty-Four",
    "alice": "Alice in Wonderland",
    "alices adventures in wonderland": "Alice in Wonderland",
    "frankenstein or the modern prometheus": "Frankenstein",
}


def published_book(title: str) -> str | None:
    """The book of the table that a title names, ignoring case, punctuation and articles; None if there is none."""
    books = {_plain(book): book for book in PUBLISHED} | {_plain(name): book for name, book in _ALSO_CALLED.items()}
    return books.get(_plain(title))


def published_coverages(title: str, model: str | None = None) -> Mapping[str, float]:
    """Published coverages in % of a book, by model; empty for a book that is not in the table.

    Args:
        title: the book's, see `published_book`.
        model: only the model that this name or path mentions (`meta-llama/Llama-3.1-70B` → Llama-3.1-70B).
    """
    book = published_book(title)
    values = PUBLISHED[book] if book is not None else {}
    if model is None:
        return values
    # Compared word by word, so that "Llama-3-8B" does not match "Llama-3.1-8B".
    words = _plain(model).split()
    coverages = [name for name in values if _is_within(_plain(name).split(), words)]
    return {name: values[name] for name in coverages}


def _is_within(part: list[str], whole: list[str]) -> bool:
    """Whether `part` is a contiguous part of `whole`."""
    return any(whole[at : at + len(part)] == part for at in range(len(whole) - len(part) + 1))


def _plain(text: str) -> str:
    """Lower case, words and numbers separated by one space, without apostrophes and a leading article."""
    text = re.sub(r"['’]", "", text.lower())
    # A letter followed by a digit is split ("Llama3" and "Llama-3"); a number keeps the letters behind it ("8b").
    text = re.sub(r"(?<=[a-z])(?=\d)", " ", text)
    return re.sub(r"^(the|a|an) ", "", " ".join(re.findall(r"[a-z]+|\d+(?:\.\d+)?[a-z]*", text)))
