"""`rewards:`, what an answer is worth: a list of registered choices, each with a weight.

    rewards:
      - {type: math, column: answer}
      - {type: length, at_most: 300, weight: 0.1}
      - {type: python, function: "my_rewards:largest", seconds: 10}

The reward of an answer is the sum of weight × value. A choice knows the prompt's text, the answer's text and ids, how
the answer ended, and the row of the data set that the prompt is from. An answer that reached `max_tokens` has the value
0 (`truncated: zero`), unless the choice is about that.

Values must be finite numbers, and within `bounds` where these are given: a reward that leaves its range is a bug of
the reward, and a policy learns such bugs first.
"""

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import draccus
import numpy as np

from levanter.config.validators import Ranged

Finish = Literal["stop", "length"]
LARGEST_REWARD = 1e6
"""Of a value and of a weight; larger ones are mistakes, and their squares would overflow in float32."""


class RewardError(ValueError):
    """A reward that cannot be computed: a function that fails, a value that is no number, a row without an answer."""


@dataclass(frozen=True, kw_only=True)
class RewardInput:
    """An answer and what it is judged by.

    Attributes:
        prompt: text of the prompt.
        answer: text of the answer, without special tokens.
        ids: ids of the answer, the end of the text included if it was sampled.
        finish: `stop` if the answer ended by itself, `length` if it reached the largest number of tokens.
        row: columns of the data set.
    """

    prompt: str
    answer: str
    ids: tuple[int, ...]
    finish: Finish
    row: Mapping[str, object]

    def column(self, name: str) -> object:
        """A column of the row.

        Raises:
            RewardError: the row does not have it, or it is null.
        """
        if self.row.get(name) is None:
            columns = ", ".join(sorted(self.row)) or "none"
            raise RewardError(f"a prompt has no column {name!r}; its columns: {columns} (prompt: {self.prompt[:60]!r})")
        return self.row[name]


class Reward(Protocol):
    """A reward that is ready to judge."""

    def score(self, samples: Sequence[RewardInput]) -> Sequence[float]:
        """The value of each answer.

        Raises:
            RewardError: the values cannot be computed.
        """
        ...

    def close(self) -> None:
        """Ends the processes that the reward started."""
        ...


@dataclass(frozen=True, kw_only=True)
class RewardConfig(Ranged, draccus.ChoiceRegistry):
    """The fields that all rewards have.

    Attributes:
        weight: the factor of its values in the sum.
        name: of its metrics (`rewards/NAME/mean`); null for its type.
        truncated: the value of an answer that reached the largest number of tokens: 0 (`zero`), or as of others
            (`scored`).
        bounds: the least and the greatest value; others end the run. Null for any finite number.
        on_error: what happens if the values of a batch cannot be computed: the run ends (`stop`), or they are 0 and
            counted (`zero`).
    """

    weight: float = 1.0
    name: str | None = None
    truncated: Literal["zero", "scored"] = "zero"
    bounds: tuple[float, float] | None = None
    on_error: Literal["stop", "zero"] = "stop"

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = [] if abs(self.weight) <= LARGEST_REWARD else [f"weight: {self.weight}, expected at most 1e6"]
        if self.bounds is not None and not self.bounds[0] < self.bounds[1]:
            problems.append(f"bounds: {list(self.bounds)}, expected [least, greatest]")
        problems += self.problems()
        if problems:
            raise ValueError("\n".join(problems))

    def problems(self) -> Sequence[str]:
        """What is wrong with the fields of the kind."""
        return ()

    @property
    def label(self) -> str:
        """The name of its metrics."""
        return self.name or RewardConfig.get_choice_name(type(self))

    @abstractmethod
    def open(self) -> Reward:
        """The reward, ready to judge."""


class Judge:
    """A reward that is a function of one answer, in this process.

    Args:
        value: the value of an answer.
    """

    def __init__(self, value: "Value"):
        self._value = value

    def score(self, samples: Sequence[RewardInput]) -> Sequence[float]:
        """See `Reward.score`."""
        return [self._value(sample) for sample in samples]

    def close(self) -> None:
        """Nothing was started."""


class Value(Protocol):
    """The value of one answer."""

    def __call__(self, sample: RewardInput, /) -> float: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchRewards:
    """The rewards of a batch of answers.

    Attributes:
        total: float64: the weighted sum of each answer.
        values: name → float64 values before weights.
        failed: name → answers whose values are 0 because of an error.
        errors: the messages of these errors.
    """

    total: np.ndarray
    values: Mapping[str, np.ndarray]
    failed: Mapping[str, int]
    errors: tuple[str, ...]


class Rewards:
    """All rewards of a run, open; a context manager that closes them.

    Args:
        configs: `rewards:`.

    Raises:
        ValueError: none, two of one name, or weights that sum to 0.
    """

    def __init__(self, configs: Sequence[RewardConfig]):
        # The same check as that of the configuration, for callers in Python.
        check_rewards(configs)
        self._configs = tuple(configs)
        self._open = [config.open() for config in configs]

    def __enter__(self) -> "Rewards":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what the rewards started."""
        # One after the other: killing a worker takes milliseconds.
        for reward in self._open:
            reward.close()

    def score(self, samples: Sequence[RewardInput]) -> BatchRewards:
        """The rewards of answers.

        Raises:
            RewardError: a reward with `on_error: stop` cannot be computed.
        """
        total, values, failed, errors = np.zeros(len(samples)), {}, {}, []
        truncated = np.array([sample.finish == "length" for sample in samples], bool)
        for config, reward in zip(self._configs, self._open, strict=True):
            name, failed[config.label] = config.label, 0
            try:
                # Truncated answers are judged too: a function may count on seeing the whole group.
                scored = _checked(reward.score(samples), len(samples), config)
            except RewardError as error:
                message = f"rewards: {name}: {error}"
                if config.on_error == "stop":
                    raise RewardError(message) from error
                errors.append(message)
                scored, failed[name] = np.zeros(len(samples)), len(samples)
            # After the check of bounds: 0 may lie outside of them.
            if config.truncated == "zero":
                scored = np.where(truncated, 0.0, scored)
            values[name] = scored
            total += config.weight * scored
        return BatchRewards(total=total, values=values, failed=failed, errors=tuple(errors))


def check_rewards(configs: Sequence[RewardConfig]) -> None:
    """Raises what is wrong with the list as a whole.

    Raises:
        ValueError: it is empty, has two rewards of one name, or weights that sum to 0.
    """
    problems = [] if configs else ["rewards: an empty list; answers need at least one reward"]
    twice = [name for name, count in Counter(config.label for config in configs).items() if count > 1]
    if twice:
        problems.append(f"rewards: two of the name {', '.join(twice)}; give one of them a `name`")
    if configs and sum(config.weight for config in configs) == 0:
        weights = {config.label: config.weight for config in configs}
        problems.append(f"rewards: the weights {weights} sum to 0; if that is meant, change one of them slightly")
    if problems:
        raise ValueError("\n".join(problems))


def _checked(values: Sequence[float], count: int, config: RewardConfig) -> np.ndarray:
    """The values as an array, all of which are numbers in the bounds."""
    if len(values) != count:
        raise RewardError(f"{len(values)} values for {count} answers")
    # Without bounds a limit remains: a reward of 1e30 would be a finite number, and an infinite gradient.
    least, greatest = config.bounds or (-LARGEST_REWARD, LARGEST_REWARD)
    # NaN compares false, so it is outside too; a worker has refused it already, with the function's name.
    outside = [n for n, value in enumerate(values) if not (math.isfinite(value) and least <= value <= greatest)]
    if outside:
        raise RewardError(
            f"{len(outside)} of {count} values are not within {least:g} and {greatest:g}; the first, of answer "
            f"{outside[0]}, is {values[outside[0]]}"
        )
    return np.asarray(values, np.float64)


def as_fields(sample: RewardInput) -> dict[str, Any]:
    """A sample as plain values, for another process."""
    return asdict(sample) | {"row": dict(sample.row), "ids": list(sample.ids)}
