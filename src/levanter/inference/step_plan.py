"""`StepPlan`: what the device does in one step, and what stands when that is planned."""

from dataclasses import dataclass

import numpy as np

from levanter.inference.requests import ChoiceId
from levanter.inference.scheduler_state import SchedulerState


@dataclass(frozen=True, kw_only=True)
class PrefillPart:
    """A part of one row's prompt.

    Attributes:
        id: which choice.
        place: its place in `batch`.
        lane: its place in the call.
        start: where in its sequence the part begins.
        tokens: the part.
        fresh: whether it is the first part since the row was admitted.
        ends: whether it is the last one: the call samples the row's next token.
        left: how many tokens the row may still have then, that one included.
    """

    id: ChoiceId
    place: int
    lane: int
    start: int
    tokens: tuple[int, ...]
    fresh: bool
    ends: bool
    left: int


@dataclass(frozen=True, kw_only=True)
class DecodeRow:
    """A row that gets tokens.

    Attributes:
        id: which choice.
        place: its place in `batch`.
        start: where in its sequence the first token is read, as far as it is known.
        tokens: how many there will be at most.
    """

    id: ChoiceId
    place: int
    start: int
    tokens: int


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan:
    """What the device does next, in this order: release rows, prefill, decode.

    Attributes:
        released: places whose rows are no more.
        bucket: the rows and tokens of the prefill call; None for none.
        prefill: what it computes.
        decode: the rows of the decode call; none for no call.
        tables: int32 `[rows, pages of a row]`, the pages of the row at each place, in its shard; then `fill`.
        gave_way: choices that had to give way.
        after: the standing when this is planned.
    """

    released: tuple[int, ...]
    bucket: tuple[int, int] | None
    prefill: tuple[PrefillPart, ...]
    decode: tuple[DecodeRow, ...]
    tables: np.ndarray
    gave_way: tuple[ChoiceId, ...]
    after: SchedulerState

    @property
    def empty(self) -> bool:
        """Whether the device has nothing to do."""
        return not self.prefill and not self.decode
