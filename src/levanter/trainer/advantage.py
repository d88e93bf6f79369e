"""Advantages: how much better an answer is than the other answers to the same prompt. On the host, in float64.

    A = (r − center) / scale

- `center: mean` of all answers in the group, or of the others (`leave_one_out`, RLOO: arXiv:2402.14740), which is the
  first times n / (n − 1).
- `scale: none`, or the standard deviation of the group's rewards. That is the choice of the GRPO paper; it weighs a
  prompt the more the more its answers agree, and turns rewards that differ by rounding only into advantages of 1.

A group whose rewards are all equal has no *signal*: its advantages are exactly 0, not what rounding leaves of r − mean.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import numpy as np

from levanter.config.validators import NonNegativeFloat, Range, Ranged

DeltaDegrees: TypeAlias = Annotated[int, Range(0, 1)]


@dataclass(frozen=True, kw_only=True)
class StdScale(Ranged):
    """Advantages in standard deviations of their group.

    Attributes:
        ddof: 1 divides the squares by n − 1 (trl), 0 by n.
        eps: added to the standard deviation: 1e-4 in trl, 1e-6 in tunix.
    """

    ddof: DeltaDegrees = 1
    eps: NonNegativeFloat = 1e-4


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig(Ranged):
    """How rewards become advantages.

    Attributes:
        center: the `mean` of the group, or the mean of the other answers (`leave_one_out`).
        scale: `none`, or by the standard deviation of the group.
    """

    center: Literal["mean", "leave_one_out"] = "mean"
    scale: Literal["none"] | StdScale = "none"


@dataclass(frozen=True, kw_only=True, eq=False)
class Advantages:
    """The advantages of a step.

    Attributes:
        values: float64 `[groups, answers of a group]`.
        signal: bool `[groups]`: whether the rewards of a group differ.
    """

    values: np.ndarray
    signal: np.ndarray

    @property
    def groups_without_signal(self) -> float:
        """The fraction of groups that teach nothing."""
        return float(np.mean(~self.signal))


def advantages(rewards: np.ndarray, config: AdvantageConfig) -> Advantages:
    """The advantages of groups of answers.

    >>> advantages(np.array([[1.0, 0.0], [0.1, 0.1]]), AdvantageConfig()).values.tolist()
    [[0.5, -0.5], [0.0, 0.0]]

    Args:
        rewards: finite, `[groups, answers of a group]`.
        config: center and scale.

    Raises:
        ValueError: a group of one answer, or a reward that is no finite number.
    """
    rewards = np.asarray(rewards, np.float64)
    groups, size = rewards.shape
    if size < 2:
        raise ValueError(f"a group has {size} answer, expected at least 2: an advantage compares answers to one prompt")
    if not np.isfinite(rewards).all():
        where = np.argwhere(~np.isfinite(rewards))
        group, answer = where[0].tolist()
        raise ValueError(
            f"{len(where)} rewards are no finite numbers; the first, of group {group}, answer {answer}, is "
            f"{rewards[group, answer]}"
        )
    # Rewards are compared as they are: the mean of equal numbers may differ from them in the last digit.
    signal = (rewards != rewards[:, :1]).any(axis=1)
    values = rewards - rewards.mean(axis=1, keepdims=True)
    if config.center == "leave_one_out":
        # r − (Σ − r) / (n − 1) = (r − mean) n / (n − 1).
        values = values * (size / (size - 1))
    if isinstance(config.scale, StdScale):
        scale = rewards.std(axis=1, ddof=config.scale.ddof, keepdims=True) + config.scale.eps
        # Without signal the scale is eps, which may be 0; these values are replaced below.
        values = values / np.where(signal[:, None], scale, 1.0)
    assert signal.shape == (groups,)
    return Advantages(values=np.where(signal[:, None], values, 0.0), signal=signal)
