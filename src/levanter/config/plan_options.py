"""The block `plan:`, which every command's configuration has."""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import ClassVar, Literal, TypeAlias

from levanter.config.validators import Duration, ManyInt, NonNegativeFloat, PositiveDuration, PositiveFloat, Ranged

Goal: TypeAlias = Literal["max_rows", "latency_ms", "tokens_per_second"]


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Ranged):
    """Values for planning that a run would determine by itself: the block `plan:`.

    Attributes:
        assume_tokens: tokens to score if the text is unavailable.
        assume_requests: requests of the harness's tasks if their documents are unavailable.
        goal: what `plan --search` optimizes for runs that generate text: `max_rows`, `latency_ms` (least time per token
            for the required slots), or `tokens_per_second`.
        chip_hour_price: dollars for a chip-hour (GPU-hour) of any target; runs that generate text then report the
            price of a million tokens, and all others that of the job.
        price: the same by generation, with the kind of offer if there are several: `{v5p: 4.5, v6e: 3,
            "v6e:spot": 1.5}` (made-up numbers).
        interruptions_per_day: how often the pod stops; null for the rate of a published run, by its devices.
        restart_wait: time from an interruption until the pod is available again.
        store_rate: 10⁹ bytes a second that a host reads from storage and writes to it; null for the assumed rate.
        storage_price: dollars for 10⁹ bytes stored for a month.
        egress_price: dollars for 10⁹ bytes that are read from storage.
        deadline: the longest time of the job; the plan then names the cheapest and the fastest pod that meet it.
        budget: the most dollars for the job; as for `deadline`.
    """

    assume_tokens: ManyInt | None = None
    assume_requests: ManyInt | None = None
    goal: Goal = "tokens_per_second"
    chip_hour_price: PositiveFloat | None = None
    price: dict[str, PositiveFloat] = field(default_factory=dict)
    interruptions_per_day: NonNegativeFloat | None = None
    restart_wait: Duration = timedelta()
    store_rate: PositiveFloat | None = None
    storage_price: NonNegativeFloat | None = None
    egress_price: NonNegativeFloat | None = None
    deadline: PositiveDuration | None = None
    budget: PositiveFloat | None = None

    range_prefix: ClassVar[str] = "plan."
