"""pass@k against every subset of the answers, and against the formula that it is often confused with."""

import itertools

import numpy as np
import pytest

from levanter.eval.pass_at import pass_at, pass_at_k


def test_the_estimate_is_the_fraction_of_subsets_with_a_right_answer():
    for answers in range(1, 8):
        for right in range(answers + 1):
            for k in range(1, answers + 1):
                subsets = list(itertools.combinations([True] * right + [False] * (answers - right), k))
                assert abs(pass_at_k(answers, right, k) - np.mean([any(s) for s in subsets])) < 1e-12


def test_the_estimate_is_unbiased():
    """Its mean over c, which is binomial, is 1 − (1 − p)^k; that of 1 − (1 − c/n)^k is not."""
    n, k, p = 10, 4, 0.3
    chances = [float(np.prod([(n - i) / (i + 1) for i in range(c)]) * p**c * (1 - p) ** (n - c)) for c in range(n + 1)]
    mean = sum(chance * pass_at_k(n, c, k) for c, chance in enumerate(chances))
    assert abs(mean - (1 - (1 - p) ** k)) < 1e-12
    assert sum(chance * (1 - (1 - c / n) ** k) for c, chance in enumerate(chances)) < mean - 0.02


def test_means_over_prompts():
    right = np.array([[True, False, False, False], [True, True, True, True], [False, False, False, False]])
    assert pass_at(right, [1, 4]) == pytest.approx({"pass@1": 5 / 12, "pass@4": 2 / 3})


def test_large_numbers_of_answers():
    assert 0 < pass_at_k(10**5, 1, 10) == pytest.approx(1e-4)
    assert pass_at_k(5000, 4000, 2500) == 1


@pytest.mark.parametrize(("answers", "right", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1), (0, 0, 1)])
def test_impossible_numbers_are_refused(answers, right, k):
    with pytest.raises(ValueError, match=r"expected 1 ≤ k ≤ answers"):
        pass_at_k(answers, right, k)


@pytest.mark.parametrize("right", [np.ones((2, 2)), np.ones(3, bool), np.ones((0, 4), bool)])
def test_what_is_no_table_of_verdicts_is_refused(right):
    with pytest.raises(ValueError, match=r"expected bool \[prompts, answers\]"):
        pass_at(right, [1])
