"""Advantages against plain Python."""

import statistics

import numpy as np
import pytest

from levanter.trainer.advantage import AdvantageConfig, StdScale, advantages

REWARDS = np.random.default_rng(4).random((7, 5))


@pytest.mark.parametrize("center", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["none", StdScale(), StdScale(ddof=0, eps=1e-6)], ids=["none", "trl", "ddof 0"])
def test_values(center, scale):
    values = advantages(REWARDS, AdvantageConfig(center=center, scale=scale)).values
    for group, row in zip(REWARDS.tolist(), values, strict=True):
        for n, (reward, value) in enumerate(zip(group, row, strict=True)):
            others = group if center == "mean" else group[:n] + group[n + 1 :]
            expected = reward - statistics.fmean(others)
            if scale != "none":
                deviation = statistics.stdev(group) if scale.ddof else statistics.pstdev(group)
                expected /= deviation + scale.eps
            assert abs(value - expected) < 1e-12


@pytest.mark.parametrize("scale", ["none", StdScale(), StdScale(eps=0.0)])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 0.7, 1e100, 0.0])
def test_equal_rewards_have_no_signal_and_advantages_of_exactly_zero(scale, reward):
    """Although the mean of equal numbers is not always that number."""
    result = advantages(np.array([[reward] * 7, [reward] * 6 + [reward / 2 + 1]]), AdvantageConfig(scale=scale))
    assert (result.values[0] == 0).all()
    assert result.signal.tolist() == [False, True]
    assert result.groups_without_signal == 0.5


def test_nearly_equal_rewards_are_not_inflated():
    """Without a scale, what differs by rounding stays as small as it is; with one, eps bounds it."""
    rewards = np.array([[0.1 + 0.2, 0.3, 0.3, 0.3]])
    assert np.abs(advantages(rewards, AdvantageConfig()).values).max() < 1e-15
    assert np.abs(advantages(rewards, AdvantageConfig(scale=StdScale())).values).max() < 1e-11


def test_groups_of_one_and_rewards_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match="at least 2"):
        advantages(np.ones((3, 1)), AdvantageConfig())
    with pytest.raises(ValueError, match="group 1, answer 2"):
        advantages(np.array([[1.0, 2, 3], [1, 2, np.nan]]), AdvantageConfig())
