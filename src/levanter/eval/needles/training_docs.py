"""Documents from which a model learns to find needles: several are hidden, and each is asked for.

They are to train a small model, for the demonstration: what counts is the values that answer; everything else has a
small weight, since most of it cannot be known or is the same everywhere.
"""

from collections.abc import Callable, Iterator

import numpy as np

from levanter.eval.needles import haystack

Encode = Callable[[str], tuple[np.ndarray, np.ndarray]]
"""A text's ids, and the span of characters of each."""
BESIDE = 0.02
"""The weight of tokens that answer nothing."""
MOST = 8
"""Needles of a document at most."""
_HEADS = ("A special magic number is", "Some special magic numbers are")


def lessons(encode: Encode, *, length: int, count: int, seed: int) -> Iterator[dict[str, list[int] | list[float]]]:
    """Documents of at most so many tokens, as records of the format `prebuilt`.

    Args:
        encode: the tokenizer.
        length: tokens of the longest; every second document is shorter.
        count: how many.
        seed: of the generator.
    """
    for n in range(count):
        random = np.random.default_rng([seed, n])
        size = length if n % 2 else int(random.integers(min(96, length), length + 1))
        ids, weights = lesson(random, encode, size)
        yield {"input_ids": ids.tolist(), "loss_weights": weights.tolist()}


def lesson(random: np.random.Generator, encode: Encode, length: int) -> tuple[np.ndarray, np.ndarray]:
    """One document: ids, and the weight of each."""
    most = max(1, min(MOST, (length - 40) // 56))
    count = 1 if random.random() < 0.2 else int(random.integers(1, most + 1))
    names, values = haystack.keys(random, count), haystack.numbers(random, count)
    hidden = [f"One of the special magic numbers for {a} is: {b}." for a, b in zip(names, values, strict=True)]
    hay = list(_hay(random, length // 5))
    places = random.uniform(size=count)
    asked = random.permutation(count)
    bare = len(encode(_text(hidden, names, values, asked)[0])[0])
    each = max(1.0, len(encode(" ".join(hay[:40]))[0]) / len(hay[:40]))
    units = max(0, min(len(hay), int((length - bare) / each)))
    while True:
        parts = hay[:units]
        for place, text in sorted(zip(places.tolist(), hidden, strict=True), reverse=True):
            parts.insert(round(place * units), text)
        written, spans = _text(parts, names, values, asked)
        ids, offsets = encode(written)
        if len(ids) <= length or not units:
            break
        units = max(0, units - max(1, round((len(ids) - length) / each)))
    return ids[:length], weights_of(offsets, spans)[:length]


def weights_of(offsets: np.ndarray, spans: list[tuple[int, int]]) -> np.ndarray:
    """1 for the tokens of these characters, `BESIDE` for others."""
    weights = np.full(len(offsets), BESIDE, np.float32)
    for begin, end in spans:
        weights[(offsets[:, 1] > begin) & (offsets[:, 0] < end)] = 1.0
    return weights


def _hay(random: np.random.Generator, most: int) -> Iterator[str]:
    sentences = haystack.noise() if random.random() < 0.5 else haystack.prose(random)
    return (next(sentences) for _ in range(most))


def _text(
    parts: list[str], names: list[str], values: list[str], asked: np.ndarray
) -> tuple[str, list[tuple[int, int]]]:
    """The document, and where its answers are."""
    one = len(names) == 1
    text = f"{_HEADS[not one]} hidden within the following text. Make sure to memorize it. I will quiz you about the "
    text += f"number{'' if one else 's'} afterwards.\n{' '.join(parts)}"
    spans = []
    for n in asked.tolist():
        text += f"\nWhat is the special magic number for {names[n]} mentioned in the provided text? The special magic "
        text += f"number for {names[n]} mentioned in the provided text is "
        spans.append((len(text), len(text) + len(values[n])))
        text += values[n]
    return text, spans
