"""`python`: a function of the user's, by import path.

    # my_rewards.py, in the working folder or on PYTHONPATH
    def largest(batch):
        return [float(one["answer"] == one["row"]["answer"]) for one in batch]

The function gets a list of answers, each a dictionary with `prompt`, `answer` (texts), `ids`, `finish` (`stop` or
`length`) and `row` (the columns of the data set), and returns one number for each. It runs in a worker: a process that
is killed at its bounds.
"""

import re
from dataclasses import dataclass

from levanter.config.validators import PositiveFloat, PositiveInt
from levanter.rewards.choice import Reward, RewardConfig
from levanter.rewards.worker import FunctionReward

_PATH = re.compile(r"(?P<module>[^\W\d]\w*(?:\.[^\W\d]\w*)*):(?P<function>[^\W\d]\w*(?:\.[^\W\d]\w*)*)")


@RewardConfig.register_subclass("python")
@dataclass(frozen=True, kw_only=True)
class PythonRewardConfig(RewardConfig):
    """The values of a Python function.

    Attributes:
        function: `module:function`.
        seconds: for a batch of answers; the process is killed then.
        memory_mib: of the address space of the process.
    """

    function: str = ""
    seconds: PositiveFloat = 60.0
    memory_mib: PositiveInt = 8192

    def problems(self) -> list[str]:
        """See `RewardConfig.problems`."""
        if _PATH.fullmatch(self.function) is not None:
            return []
        # The usual slip is a dot for the colon.
        hint = self.function.rpartition(".")
        nearest = f"; {hint[0]}:{hint[2]}?" if hint[0] and ":" not in self.function else ""
        return [f"function: {self.function!r}, expected module:function{nearest}"]

    def open(self) -> Reward:
        """See `RewardConfig.open`."""
        # Nothing is imported here: a module of the user's belongs into the worker.
        path = _PATH.fullmatch(self.function)
        assert path is not None, self.function
        return FunctionReward(path.groupdict(), seconds=self.seconds, memory_mib=self.memory_mib)
