"""The configurations of `sft` and `sft_mixture`: `train_lm`'s, which their documents are translated to.

They are separate classes because a document's keys have another meaning for these entry points: `supervised_data` was
their training data, while `train_lm` evaluates on it.
"""

from dataclasses import dataclass
from typing import ClassVar

from levanter.commands.train.config import TrainLmConfig
from levanter.config.upstream.sft import MIXTURE, SFT


@dataclass(frozen=True, kw_only=True)
class SftConfig(TrainLmConfig):
    """The configuration of `train_lm`; upstream's `sft` keys are also accepted."""

    EARLIER: ClassVar[str] = SFT


@dataclass(frozen=True, kw_only=True)
class SftMixtureConfig(TrainLmConfig):
    """The configuration of `train_lm`; upstream's `sft_mixture` keys are also accepted."""

    EARLIER: ClassVar[str] = MIXTURE
