"""The block `plan:`, which every command's configuration has."""

from dataclasses import dataclass
from typing import ClassVar

from levanter.config.ranges import ManyInt, Ranged


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Ranged):
    """What a config tells planning that a run would find out by itself: the block `plan:`.

    Attributes:
        assume_tokens: tokens to score if the text is unavailable.
    """

    assume_tokens: ManyInt | None = None

    range_prefix: ClassVar[str] = "plan."
