"""The `math` reward: hand-made pairs with both verdicts, hostile texts, and drawn numbers in every spelling."""

import random
import time
from fractions import Fraction

import pytest
from helpers.number_pairs import PAIRS

from levanter.rewards import MathRewardConfig, RewardError, RewardInput, Rewards, final_number

pytestmark = pytest.mark.quick


def judged(answer, right):
    sample = RewardInput(prompt="?", answer=answer, ids=(1,), finish="stop", row={"answer": right})
    with Rewards([MathRewardConfig()]) as rewards:
        return rewards.score([sample]).total[0]


@pytest.mark.parametrize("right", PAIRS)
def test_pairs(right):
    equal, different = PAIRS[right]
    assert not {text: final_number(text) for text in equal if judged(text, right) != 1}
    assert not {text: final_number(text) for text in different if judged(text, right) != 0}


def test_there_are_300_pairs():
    assert sum(len(equal) + len(different) for equal, different in PAIRS.values()) >= 300


def spellings(value, rng):
    """Texts of a positive rational number."""
    texts = [f"{value.numerator}/{value.denominator}", rf"\frac{{{value.numerator}}}{{{value.denominator}}}"]
    if value.denominator == 1:
        texts += [str(value), f"{value.numerator:,}", f"{value}.", f"{value}.0", f"{value * 100}%"]
    whole, rest = divmod(value, 1)
    if whole and rest:
        texts.append(f"{whole} {rest}")
    decimals = value * 10**6
    if decimals.denominator == 1:
        texts.append(f"{decimals.numerator // 10**6}.{decimals.numerator % 10**6:06}")
    text = rng.choice(texts)
    return rng.choice(("", "-", "+")) + text


def test_drawn_numbers_in_all_places():
    """Every spelling as the last number, after ####, and in a box has its value."""
    rng = random.Random(5)
    for _ in range(2000):
        value = Fraction(rng.randint(1, 10 ** rng.randint(1, 9)), rng.choice((1, 1, 2, 3, 7, 8, 125, 1000)))
        text = spellings(value, rng)
        expected = -value if text.startswith("-") else value
        for whole in (
            text,
            f"I think 12 is wrong: {text}",
            f"#### {text}",
            rf"\boxed{{{text}}}",
            rf"1 \boxed{{{text}}} 2",
        ):
            assert final_number(whole) == expected, whole


@pytest.mark.parametrize(
    "text",
    [
        "9" * 10**6,
        "1," * 10**5 + "1",
        "1e999999999",
        r"\boxed{10^{9999}}",
        r"\boxed{" * 10**4,
        r"\frac{" * 10**4 + "1",
        "1/" * 10**5 + "1",
        " " * 10**6 + "x",
        "1 " * 10**5,
        r"\boxed{" + "1" * 500 + "}",
        r"\boxed{" + r"\frac{1}{2}" * 10**4 + "}",
        "-" * 10**5 + "1",
        "\\" * 10**5,
        "$" * 10**5,
        "٣",
        "²",
        "1\x00",
    ],
    ids=range(17),
)
def test_hostile_texts_take_no_time_and_no_exception(text):
    start = time.process_time()
    final_number(text)
    assert time.process_time() - start < 2


def test_rows_without_a_number_are_refused_by_name():
    with pytest.raises(RewardError, match="has no number: 'x \\+ y'; `type: exact` compares texts"):
        judged("1", "x + y")
    with pytest.raises(RewardError, match="no column 'answer'; its columns: none"), Rewards([MathRewardConfig()]) as r:
        r.score([RewardInput(prompt="?", answer="1", ids=(1,), finish="stop", row={})])
