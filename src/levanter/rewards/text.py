"""Rewards for texts and lengths: `exact`, `regex`, `length`, `overlong`."""

import re
from dataclasses import dataclass
from typing import Literal

from levanter.config.validators import Count, PositiveFloat, PositiveInt
from levanter.rewards.choice import Judge, Reward, RewardConfig, RewardInput
from levanter.rewards.worker import FunctionReward


@RewardConfig.register_subclass("exact")
@dataclass(frozen=True, kw_only=True)
class ExactRewardConfig(RewardConfig):
    """1 if the answer is the right text, without white space around it; else 0.

    Attributes:
        column: the column of the data set with the right text, or with a list of right texts.
        ignore_case: whether capitals and small letters are the same.
    """

    column: str = "answer"
    ignore_case: bool = False

    def open(self) -> Reward:
        """See `RewardConfig.open`."""
        return Judge(self._value)

    def _value(self, sample: RewardInput) -> float:
        right = sample.column(self.column)
        # A list holds several right answers, as of a question that may be answered in words or in digits.
        texts = right if isinstance(right, list | tuple) else [right]
        return float(self._normal(sample.answer) in {self._normal(str(text)) for text in texts})

    def _normal(self, text: str) -> str:
        return text.strip().casefold() if self.ignore_case else text.strip()


@RewardConfig.register_subclass("regex")
@dataclass(frozen=True, kw_only=True)
class RegexRewardConfig(RewardConfig):
    """1 if the answer matches a regular expression, else 0.

    Python's matching may take exponential time, and nothing interrupts it: so it runs in a process that is killed.

    Attributes:
        pattern: Python's syntax; `(?s)` lets a dot match line breaks.
        match: whether a part of the answer must match (`search`), or all of it (`full`).
        column: the column that must be equal to the first group of the match (without groups: to all of it); null if
            the match suffices.
        seconds: for a batch of answers.
    """

    pattern: str = ""
    match: Literal["search", "full"] = "search"
    column: str | None = None
    seconds: PositiveFloat = 10.0

    def problems(self) -> list[str]:
        """See `RewardConfig.problems`."""
        if not self.pattern:
            return ["pattern: missing; expected a regular expression"]
        try:
            re.compile(self.pattern)
        except (re.error, OverflowError, RecursionError) as error:
            return [f"pattern: {self.pattern[:80]!r} is no regular expression: {error}"]
        return []

    def open(self) -> Reward:
        """See `RewardConfig.open`."""
        # Not checked in this process even for harmless patterns: which ones are harmless depends on the answer.
        target = {"pattern": self.pattern, "full": self.match == "full", "column": self.column}
        return FunctionReward(target, seconds=self.seconds, memory_mib=1024)


@RewardConfig.register_subclass("length")
@dataclass(frozen=True, kw_only=True)
class LengthRewardConfig(RewardConfig):
    """1 if the number of the answer's tokens is in a range, else 0.

    Attributes:
        at_least, at_most: the range.
    """

    at_least: Count = 0
    at_most: PositiveInt | None = None

    def problems(self) -> list[str]:
        """See `RewardConfig.problems`."""
        # A range without a number would reward nothing, and teach nothing.
        empty = self.at_most is not None and self.at_most < self.at_least
        return [f"at_most: {self.at_most} is less than at_least, {self.at_least}"] if empty else []

    def open(self) -> Reward:
        """See `RewardConfig.open`."""
        return Judge(lambda sample: float(self.at_least <= len(sample.ids) <= (self.at_most or len(sample.ids))))


@RewardConfig.register_subclass("overlong")
@dataclass(frozen=True, kw_only=True)
class OverlongRewardConfig(RewardConfig):
    """0, and less in the last tokens before the largest number: down to −1 (DAPO, arXiv:2503.14476).

    Attributes:
        max_tokens: the largest number of tokens.
        soft: how many tokens before it the value begins to fall.
    """

    max_tokens: PositiveInt = 1024
    soft: PositiveInt = 128
    truncated: Literal["zero", "scored"] = "scored"

    def problems(self) -> list[str]:
        """See `RewardConfig.problems`."""
        return [f"soft: {self.soft} of {self.max_tokens} tokens"] if self.soft > self.max_tokens else []

    def open(self) -> Reward:
        """See `RewardConfig.open`."""
        return Judge(lambda sample: overlong_penalty(len(sample.ids), max_tokens=self.max_tokens, soft=self.soft))


def overlong_penalty(length: int, *, max_tokens: int, soft: int) -> float:
    """0 up to max_tokens − soft tokens, then a straight line to −1 at `max_tokens`.

    >>> [overlong_penalty(n, max_tokens=100, soft=20) for n in (80, 90, 100, 101)]
    [0.0, -0.5, -1.0, -1.0]
    """
    # + 0.0: without it, the value of a short answer is −0.
    return -min(max(length - (max_tokens - soft), 0) / soft, 1.0) + 0.0
