"""Lessons: every answer counts, and is hidden in the text before it; a seed makes them."""

import re

import numpy as np
import pytest

from levanter.eval.needles.training_docs import MAX_NEEDLES, OTHER_WEIGHT, training_document, training_documents

pytestmark = pytest.mark.quick


class Words:
    """A tokenizer of words and single digits, which counts the words that it has seen."""

    def __init__(self):
        self.known: dict[str, int] = {}

    def __call__(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        found = list(re.finditer(r"\d|[A-Za-z-]+|\S", text))
        ids = [self.known.setdefault(each.group(), len(self.known)) for each in found]
        return np.asarray(ids), np.asarray([each.span() for each in found])

    def text(self, ids: np.ndarray) -> str:
        words = list(self.known)
        return " ".join(words[n] for n in ids.tolist())


@pytest.mark.parametrize("length", [300, 2048])
def test_what_counts_is_what_was_hidden(length):
    most, words = 0, Words()
    for seed in range(20):
        ids, weights = training_document(np.random.default_rng(seed), words, length)
        assert len(ids) == len(weights) <= length
        text = words.text(ids)
        number = r"(\d(?: \d){6})"
        hidden = dict(re.findall(rf"One of the special magic numbers for (\S+) is : {number} \.", text))
        asked = re.findall(rf"magic number for (\S+) mentioned in the provided text is {number}", text)
        assert asked and " ".join(value for _, value in asked) == words.text(ids[weights == 1])
        assert all(hidden[name] == value for name, value in asked) and len(hidden) == len(asked) <= MAX_NEEDLES
        assert set(np.unique(weights).tolist()) == {np.float32(OTHER_WEIGHT), 1.0}
        # As the task asks it, where there is one.
        assert ("A special magic number is hidden" in text) == (len(asked) == 1)
        most = max(most, len(asked))
    assert most > 1


def test_a_seed_makes_them():
    def made(seed: int) -> list:
        return list(training_documents(Words(), length=900, count=4, seed=seed))

    assert made(1) == made(1) != made(2)
    assert all(set(each) == {"input_ids", "loss_weights"} and len(each["input_ids"]) <= 900 for each in made(1))
    # Each is made by itself, however many there are.
    assert list(training_documents(Words(), length=900, count=2, seed=1)) == made(1)[:2]
