"""Questions of a wanted length: never longer, hardly shorter; what counts is where the tokenizer put it."""

import re
import zlib

import numpy as np
import pytest

from levanter.eval.needles.prompts import NeedleError, NeedleSpec, batches, build_prompts, digest
from levanter.eval.needles.tasks import TASKS


def by_words(text: str) -> tuple[np.ndarray, np.ndarray]:
    """Words with the space before them, and characters of what is no word."""
    spans = [match.span() for match in re.finditer(r" ?[A-Za-z]+| ?\d{1,3}|.|\n", text)]
    ids = [zlib.crc32(text[a:b].encode()) % 5000 for a, b in spans]
    return np.asarray(ids, np.int32), np.asarray(spans, np.int32)


def by_letters(text: str) -> tuple[np.ndarray, np.ndarray]:
    spans = np.stack([np.arange(len(text)), np.arange(1, len(text) + 1)], axis=1)
    return np.frombuffer(text.encode("utf-32-le"), np.int32).copy(), spans


def plan(**more) -> NeedleSpec:
    return NeedleSpec(**{"tasks": tuple(TASKS), "lengths": (2048,), "samples": 2, "depths": 5, "seed": 3, **more})


def test_texts_are_as_long_as_they_may_be():
    found = build_prompts(plan(lengths=(2048, 6000)), by_words, bos=None)
    for length, asked in found.items():
        assert len(asked) == 2 * len(TASKS)
        for each in asked:
            size = len(each.tokens) + 1
            # One more unit of hay would be too much; a unit of `cwe` is three numbered words.
            assert length * (0.9 if length == 2048 else 0.97) < size <= length, (each.task, size)


@pytest.mark.parametrize("bos", [None, 7])
def test_targets_are_the_letters_of_the_values(bos):
    for each in build_prompts(plan(lengths=(9000,), samples=1), by_letters, bos=bos)[9000]:
        whole = np.concatenate([each.tokens, each.targets[-1:]])
        assert (whole[0] == 7) == (bos is not None)
        for owner, value in enumerate(each.values):
            mine = each.owners == owner
            assert "".join(map(chr, each.targets[mine])) == value
            assert np.array_equal(whole[each.target_positions[mine] + 1], each.targets[mine])
        assert each.target_positions[-1] == len(each.tokens) - 1


def test_tokens_that_begin_with_a_space_belong_to_their_value():
    (each,) = build_prompts(plan(tasks=("niah_multiquery",), samples=1), by_words, bos=None)[2048]
    assert np.bincount(each.owners).tolist() == [3, 3, 3, 3]


def test_depths_are_spread():
    assert [plan(samples=5).depth(n) for n in range(5)] == [0, 0.25, 0.5, 0.75, 1]
    assert [plan(samples=10).depth(n) for n in range(5, 10)] == [0, 0.25, 0.5, 0.75, 1]
    assert [plan(samples=2).depth(n) for n in range(2)] == [0, 1]
    assert plan(samples=1).depth(0) == 0.5 and plan(depths=1).depth(1) == 0.5


def test_the_same_questions_by_the_same_seed():
    one, again, other = (digest(build_prompts(plan(seed=seed), by_words, bos=None)) for seed in (1, 1, 2))
    assert one == again != other
    # More questions are the same ones, and more.
    few = build_prompts(plan(samples=2, depths=1), by_words, bos=None)[2048]
    more = build_prompts(plan(samples=3, depths=1), by_words, bos=None)[2048]
    assert [each.tokens.tolist() for each in few] == [each.tokens.tolist() for each in more[: len(few)]]


def test_what_does_not_fit_is_said_of_all_tasks():
    with pytest.raises(NeedleError) as refused:
        build_prompts(plan(lengths=(64, 2048)), by_words, bos=None)
    said = str(refused.value)
    assert "niah_single_1: its shortest text has " in said and "cwe: its shortest" in said and "at least" in said


def test_batches_hold_every_question_once():
    asked = build_prompts(plan(samples=3), by_words, bos=None)[2048]
    rows = list(batches(asked, 4, 2048))
    assert [each for batch in rows for each in batch.prompts] == asked
    for batch in rows:
        assert batch.tokens.shape == (4, 2048)
        for n, each in enumerate(batch.prompts):
            assert np.array_equal(batch.tokens[n, : len(each.tokens)], each.tokens)
            assert not batch.tokens[n, len(each.tokens) :].any()
