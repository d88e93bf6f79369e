"""Rewards: what an answer of the model is worth. A reward is a registered choice (`rewards.choice`)."""

from levanter.rewards.choice import BatchRewards, Reward, RewardConfig, RewardError, RewardInput, Rewards, check_rewards
from levanter.rewards.numbers import MathRewardConfig, final_number
from levanter.rewards.python import PythonRewardConfig
from levanter.rewards.schema import JsonSchemaRewardConfig
from levanter.rewards.text import (
    ExactRewardConfig,
    LengthRewardConfig,
    OverlongRewardConfig,
    RegexRewardConfig,
    overlong_penalty,
)

__all__ = [
    "BatchRewards",
    "ExactRewardConfig",
    "JsonSchemaRewardConfig",
    "LengthRewardConfig",
    "MathRewardConfig",
    "OverlongRewardConfig",
    "PythonRewardConfig",
    "RegexRewardConfig",
    "Reward",
    "RewardConfig",
    "RewardError",
    "RewardInput",
    "Rewards",
    "check_rewards",
    "final_number",
    "overlong_penalty",
]
