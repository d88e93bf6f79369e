"""The block `plan:`, which every command's configuration has."""

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from levanter.config.validators import ManyInt, PositiveFloat, Ranged

Goal: TypeAlias = Literal["max_rows", "latency_ms", "tokens_per_second"]


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Ranged):
    """Values for planning that a run would determine by itself: the block `plan:`.

    Attributes:
        assume_tokens: tokens to score if the text is unavailable.
        assume_requests: requests of the harness's tasks if their documents are unavailable.
        goal: what `plan --search` optimizes for runs that generate text: `max_rows`, `latency_ms` (least time per token
            for the required slots), or `tokens_per_second`.
        chip_hour_price: price of a chip hour in dollars; runs that generate text then report the price of a million
            tokens.
    """

    assume_tokens: ManyInt | None = None
    assume_requests: ManyInt | None = None
    goal: Goal = "tokens_per_second"
    chip_hour_price: PositiveFloat | None = None

    range_prefix: ClassVar[str] = "plan."
