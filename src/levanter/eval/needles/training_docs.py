"""Training documents for needle tasks: several values are hidden, and a question asks for each.

They train a small model for the demonstration. The tokens of the answers have weight 1; all others have a small weight,
since most of them cannot be predicted or are the same in every document.
"""

from collections.abc import Callable, Iterator

import numpy as np

from levanter.eval.needles import haystack

Encode = Callable[[str], tuple[np.ndarray, np.ndarray]]
"""text → ids, and the span of characters of each token."""
OTHER_WEIGHT = 0.02
"""The weight of tokens outside answers."""
MAX_NEEDLES = 8
"""Maximum number of hidden values of a document."""
_HEADS = ("A special magic number is", "Some special magic numbers are")


def training_documents(
    encode: Encode, *, length: int, count: int, seed: int
) -> Iterator[dict[str, list[int] | list[float]]]:
    """Documents with a maximum number of tokens, as records of the format `prebuilt`.

    Args:
        encode: the tokenizer.
        length: maximum number of tokens; every second document is shorter.
        count: number of documents.
        seed: seed of the random generator.
    """
    for n in range(count):
        # A generator per document: documents do not depend on how many there are.
        random = np.random.default_rng([seed, n])
        size = length if n % 2 else int(random.integers(min(96, length), length + 1))
        ids, weights = training_document(random, encode, size)
        yield {"input_ids": ids.tolist(), "loss_weights": weights.tolist()}


def training_document(random: np.random.Generator, encode: Encode, length: int) -> tuple[np.ndarray, np.ndarray]:
    """One document: ids, and the weight of each."""
    # Leaves room for the instructions, and for each needle with its question and its answer.
    most = max(1, min(MAX_NEEDLES, (length - 40) // 56))
    count = 1 if random.random() < 0.2 else int(random.integers(1, most + 1))
    names, values = haystack.keys(random, count), haystack.numbers(random, count)
    needles = [f"One of the special magic numbers for {a} is: {b}." for a, b in zip(names, values, strict=True)]
    haystack_sentences = list(_haystack(random, length // 5))
    depths = random.uniform(size=count)
    query_order = random.permutation(count)
    # The tokens without haystack; the rest of the length is filled with as many sentences as fit by the average.
    bare = len(encode(_text(needles, names, values, query_order)[0])[0])
    tokens_per_sentence = max(1.0, len(encode(" ".join(haystack_sentences[:40]))[0]) / len(haystack_sentences[:40]))
    units = max(0, min(len(haystack_sentences), int((length - bare) / tokens_per_sentence)))
    while True:
        sentences = haystack_sentences[:units]
        for depth, text in sorted(zip(depths.tolist(), needles, strict=True), reverse=True):
            sentences.insert(round(depth * units), text)
        written, spans = _text(sentences, names, values, query_order)
        ids, offsets = encode(written)
        if len(ids) <= length or not units:
            break
        # At least one sentence less in each try, so the loop ends.
        units = max(0, units - max(1, round((len(ids) - length) / tokens_per_sentence)))
    return ids[:length], token_weights(offsets, spans)[:length]


def token_weights(offsets: np.ndarray, spans: list[tuple[int, int]]) -> np.ndarray:
    """1 for tokens that overlap with the spans, `OTHER_WEIGHT` for others."""
    weights = np.full(len(offsets), OTHER_WEIGHT, np.float32)
    for begin, end in spans:
        # A token that spans the border of an answer predicts a part of it, and counts as well.
        weights[(offsets[:, 1] > begin) & (offsets[:, 0] < end)] = 1.0
    return weights


def _haystack(random: np.random.Generator, most: int) -> Iterator[str]:
    sentences = haystack.noise() if random.random() < 0.5 else haystack.prose(random)
    return (next(sentences) for _ in range(most))


def _text(
    sentences: list[str], names: list[str], values: list[str], query_order: np.ndarray
) -> tuple[str, list[tuple[int, int]]]:
    """The document, and the spans of its answers."""
    one = len(names) == 1
    text = f"{_HEADS[not one]} hidden within the following text. Make sure to memorize it. I will quiz you about the "
    text += f"number{'' if one else 's'} afterwards.\n{' '.join(sentences)}"
    spans = []
    for n in query_order.tolist():
        text += f"\nWhat is the special magic number for {names[n]} mentioned in the provided text? The special magic "
        text += f"number for {names[n]} mentioned in the provided text is "
        spans.append((len(text), len(text) + len(values[n])))
        text += values[n]
    return text, spans
