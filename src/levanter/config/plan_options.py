"""The block `plan:`, which every command's configuration has."""

from dataclasses import dataclass
from typing import ClassVar

from levanter.config.ranges import ManyInt, PositiveFloat, Ranged


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Ranged):
    """What a config tells planning that a run would find out by itself: the block `plan:`.

    Attributes:
        assume_tokens: tokens to score if the text is unavailable.
        chip_hour_price: what an hour of a chip costs, in dollars; with it, runs that generate text say what a million
            tokens cost.
    """

    assume_tokens: ManyInt | None = None
    chip_hour_price: PositiveFloat | None = None

    range_prefix: ClassVar[str] = "plan."
