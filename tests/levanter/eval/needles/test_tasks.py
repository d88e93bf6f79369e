"""The tasks: what is hidden is there, where it was meant to be, as often as it was meant to be; the rest is hay."""

import collections
import re

import numpy as np
import pytest

from levanter.eval.needles import haystack
from levanter.eval.needles.tasks import TASKS, NeedleText

pytestmark = pytest.mark.quick


def made(name: str, units: int = 40, depth: float = 0.5, seed: int = 0) -> NeedleText:
    return TASKS[name].make(np.random.default_rng(seed), units, depth)


def values(question: NeedleText) -> list[str]:
    return [question.answer[each.begin : each.end] for each in question.hidden]


def context(question: NeedleText) -> str:
    return question.prompt.split("afterwards.\n")[1].split("\nWhat ")[0]


NIAH = [name for name in TASKS if name.startswith("niah")]


@pytest.mark.parametrize("name", TASKS)
def test_a_seed_makes_a_question_and_more_hay_a_longer_one(name):
    assert made(name) == made(name) != made(name, seed=1)
    assert len(made(name, 200).prompt) > 1.5 * len(made(name, 40).prompt)
    assert made(name, TASKS[name].least).prompt and TASKS[name].summary


@pytest.mark.parametrize("name", NIAH)
@pytest.mark.parametrize("depth", [0.0, 0.25, 1.0])
def test_needles_lie_at_their_depth_and_are_asked_for_by_name(name, depth):
    question = made(name, 100, depth)
    text = context(question)
    asked = question.prompt.rsplit(" for ", 1)[1].split(" mentioned")[0]
    names = re.split(r", and |, ", asked)
    (at,) = [each for each in question.hidden if each.depth == depth]
    share = text.index(question.answer[at.begin : at.end]) / len(text)
    assert abs(share - depth) < 0.08
    said = re.findall(r"One of the special magic (numbers|uuids) for (\S+) is: (\S+?)\.", text)
    of = collections.defaultdict(list)
    for _, key, value in said:
        of[key].append(value)
    # What is asked for is what stands there by these names, and nothing else by the same names.
    assert sorted(values(question)) == sorted(value for key in names for value in of[key])
    if len(names) == 1:
        assert values(question) == of[names[0]], "a reader meets them in this order"
    else:
        assert values(question) == [of[key][0] for key in names]
    kind = "uuids" if name.endswith("_3") else "numbers"
    assert {each[0] for each in said} == {kind}
    expected = {"niah_multikey_1": 4, "niah_multivalue": 4, "niah_multiquery": 4}.get(name, 1)
    assert len(said) == (101 if name in ("niah_multikey_2", "niah_multikey_3") else expected)


def test_variables_follow_from_each_other():
    question = made("vt", 60)
    text = question.prompt.split("\n\n")[-1]
    (value,) = re.findall(r"assigned the value (\d+) in", text)
    known = {}
    for name, given in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text):
        known[name] = known.get(given, given)
    assert [name for name, each in known.items() if each == value] == values(question) and len(known) == 5
    # The example before it is another one, with its answer.
    assert question.prompt.count("Memorize and track") == 2


@pytest.mark.parametrize(
    ("length", "often", "seldom", "example"), [(4095, 6, 1, (20, 3, 1)), (4096, 30, 3, (40, 10, 3))]
)
def test_common_words_are_the_most_common_ones(length, often, seldom, example):
    """RULER's numbers; the words in the order in which they are first seen, of the example, too."""
    question = TASKS["cwe"].make_for_length(length)(np.random.default_rng(0), 30, 0.5)
    shown, asked = question.prompt.split("\n\n")
    listed, answer = shown.split("\nQuestion")
    words = re.findall(r"\d+\. ([a-z]+)", asked)
    for found, wanted, (size, many, few) in (
        (words, values(question), (40, often, seldom)),
        (re.findall(r"\d+\. ([a-z]+)", listed), re.findall(r"\d+\. ([a-z]+)", answer), example),
    ):
        counts = collections.Counter(found)
        assert set(counts.values()) == {few, many} and len(counts) == size
        assert [word for word in dict.fromkeys(found) if counts[word] == many] == wanted and len(wanted) == 10


@pytest.mark.parametrize("units", [16, 60, 1000])
def test_frequent_words_are_in_the_order_of_their_frequency(units):
    question = made("fwe", units)
    text = question.prompt.split("coded words. ")[1].split("\nQuestion")[0]
    counts = [word for word, _ in collections.Counter(text.split()).most_common(5)]
    assert counts[0] == "...." and counts[1:4] == values(question)
    four = [count for _, count in collections.Counter(text.split()).most_common(5)]
    assert four[1] > four[2] > four[3] > four[4]


@pytest.mark.parametrize("count", [600, pytest.param(12_000, marks=pytest.mark.slow)])
def test_words_are_different_and_there_are_enough(count):
    random = np.random.default_rng(0)
    for made_by in (haystack.keys, haystack.numbers, haystack.uuids, haystack.variables, haystack.invented_words):
        assert len(set(made_by(random, count))) == count
    assert len(set(haystack.NOUNS)) == len(haystack.NOUNS) and len(set(haystack.ADJECTIVES)) == len(haystack.ADJECTIVES)
