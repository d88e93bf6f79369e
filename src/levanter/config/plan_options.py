"""The block `plan:`, which every command's configuration has."""

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from levanter.config.validators import ManyInt, PositiveFloat, Ranged

Goal: TypeAlias = Literal["max_rows", "latency_ms", "tokens_per_second"]


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Ranged):
    """What a config tells planning that a run would find out by itself: the block `plan:`.

    Attributes:
        assume_tokens: tokens to score if the text is unavailable.
        assume_requests: requests of the harness's tasks if their documents are unavailable.
        goal: what `plan --search` looks for in runs that generate text: most rows, least time a token of those that are
            asked for, or most tokens in a second.
        chip_hour_price: what an hour of a chip costs, in dollars; with it, runs that generate text say what a million
            tokens cost.
    """

    assume_tokens: ManyInt | None = None
    assume_requests: ManyInt | None = None
    goal: Goal = "tokens_per_second"
    chip_hour_price: PositiveFloat | None = None

    range_prefix: ClassVar[str] = "plan."
