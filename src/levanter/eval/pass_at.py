"""pass@k: the probability that one of k answers to a prompt is right, from n ≥ k sampled answers of which c are right.

The mean over prompts of 1 − C(n − c, k) / C(n, k), which is unbiased (Chen et al., arXiv:2107.03374, section 2.1):
C(n − c, k) of the C(n, k) sets of k answers have no right one. 1 − (1 − c/n)^k is too small.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np


def pass_at_k(answers: int, right: int, k: int) -> float:
    """The estimate of one prompt.

    >>> [pass_at_k(4, right, 2) for right in (0, 1, 2, 3, 4)]
    [0.0, 0.5, 0.8333333333333334, 1.0, 1.0]

    Args:
        answers: number of sampled answers.
        right: how many of them are right.
        k: how many may be tried.

    Raises:
        ValueError: not 1 ≤ k ≤ answers, or not 0 ≤ right ≤ answers.
    """
    if not (1 <= k <= answers and 0 <= right <= answers):
        raise ValueError(
            f"pass@{k} of {answers} answers, {right} of them right: expected 1 ≤ k ≤ answers and 0 ≤ right ≤ answers"
        )
    # Integers of any size: the products of the paper's own program lose digits, and binomials overflow floats.
    return (math.comb(answers, k) - math.comb(answers - right, k)) / math.comb(answers, k)


def pass_at(right: np.ndarray, ks: Sequence[int]) -> Mapping[str, float]:
    """pass@k of a set of prompts, by name (`pass@1`).

    Args:
        right: bool `[prompts, answers]`, at least one prompt.
        ks: values of k.

    Raises:
        ValueError: there is no prompt, an array of another type, or a k beyond the number of answers.
    """
    right = np.asarray(right)
    # Rewards are no verdicts: which of them counts as right is for the caller to decide.
    if right.dtype != np.bool_ or right.ndim != 2 or not len(right):
        raise ValueError(f"verdicts are {right.dtype} {list(right.shape)}, expected bool [prompts, answers]")
    # `fsum` is exact: the result does not depend on the order of the prompts.
    counts, answers = right.sum(axis=1).tolist(), right.shape[1]
    return {f"pass@{k}": math.fsum(pass_at_k(answers, count, k) for count in counts) / len(counts) for k in ks}
