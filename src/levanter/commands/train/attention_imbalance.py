"""How unevenly the rows of a step keep devices busy in attention, where positions are cut over them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from levanter.commands.model.workloads import stage_program
from levanter.commands.train.work import TrainPlan
from levanter.data import TrainRows
from levanter.plan.attention_blocks import batch_imbalance


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Counts what the rows of this process have the busiest device visit; told of rows, asked by the step's number.

    Attributes:
        of_rows: segments of rows → busiest over mean; None where there is nothing to balance.
        segments: whether rows hold several documents.
    """

    of_rows: Callable[[np.ndarray | None], float] | None
    segments: bool
    _found: dict[int, float] = field(default_factory=dict[int, float])

    @classmethod
    def of(cls, plan: TrainPlan) -> "Balance":
        """Of a run; pairs of answers are not looked at."""
        batch = stage_program(plan, plan.work.batches, 0).input("batch").value
        of_rows = batch_imbalance(plan) if plan.work.pairs is None else None
        return cls(of_rows=of_rows, segments=getattr(batch, "segment_ids", None) is not None)

    def __call__(self, step: int, rows: TrainRows) -> None:
        """Looks at the rows of a step."""
        if self.of_rows is not None:
            self._found[step] = self.of_rows(rows.segment_ids if self.segments else None)

    def numbers(self, step: int) -> Mapping[str, float]:
        """What is logged of a step."""
        return {"throughput/attention_imbalance": self._found.pop(step)} if step in self._found else {}
