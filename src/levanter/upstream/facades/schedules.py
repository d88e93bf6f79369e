"""Batch sizes that change during a run, with the interface of earlier generations.

    schedule = BatchSchedule([ScheduleStep(0, 32), ScheduleStep(1000, 64)])
    schedule.batch_size_at_step(1500), schedule.global_data_offset_by_step(1500)

In a configuration it is `trainer.train_batch_size: [{start: 0, value: 32}, …]`; the arithmetic is
`levanter.data.train_dataset.BatchSchedule`'s.
"""

from collections.abc import Sequence
from typing import Any

from haliax_ext.pytree import PyTree
from levanter.data.train_dataset import BatchSchedule
from levanter.trainer.config_blocks import BatchSizeStage


class ScheduleStep(BatchSizeStage):
    """A value from a step on; its constructor takes positional arguments, too."""

    def __init__(self, start: int, value: int):
        super().__init__(start=start, value=value)


IntSchedule = list[ScheduleStep]
"""Stages by the step at which each begins."""


class OldBatchSchedule:
    """The number of rows of each step.

    Args:
        schedule: one number, or stages by the step at which each begins.

    Raises:
        ValueError: there are no stages, or they are not in order from step 0.
    """

    def __init__(self, schedule: int | Sequence[BatchSizeStage]):
        self.schedule = schedule
        stages = [(0, schedule)] if isinstance(schedule, int) else [(stage.start, stage.value) for stage in schedule]
        starts = [start for start, _ in stages]
        # Comparing with the sorted set also finds duplicate starts.
        if not stages or starts[0] != 0 or starts != sorted(set(starts)) or min(size for _, size in stages) < 1:
            raise ValueError(f"a batch schedule needs stages in ascending order starting at step 0, got {stages}")
        self._rows = BatchSchedule.of(stages)

    def batch_size_at_step(self, step: int) -> int:
        """The number of rows of a step."""
        return self._rows.rows(int(step))

    def global_data_offset_by_step(self, step: int) -> int:
        """The number of rows of all steps before a step."""
        return self._rows.first_draw(int(step))

    def find_step_containing_offset(self, offset: int) -> int:
        """The step that reads a given row of the data."""
        # The number of complete steps before the row is the index of its step.
        return self._rows.whole_steps(offset)

    def batch_indices_at_step(self, bn: int) -> range:
        """The indices of the rows that a step reads."""
        begin = self.global_data_offset_by_step(bn)
        return range(begin, begin + self.batch_size_at_step(bn))

    def unique_batch_sizes(self) -> set[int]:
        """The distinct sizes."""
        return set(self._rows.sizes)


def value_at_step(schedule: PyTree, step: int) -> PyTree:
    """The value of a schedule at a step; a plain value holds at every step.

    Raises:
        ValueError: the schedule begins after the step.
    """
    if not _is_schedule(schedule):
        return schedule
    begun = [stage.value for stage in schedule if stage.start <= step]
    if not begun:
        raise ValueError(f"step {step} is before the start of the schedule, step {schedule[0].start}")
    # Stages ascend, so the last one that has begun applies.
    return begun[-1]


def distinct_values(schedule: PyTree) -> set[Any]:
    """The distinct values of a schedule."""
    return {stage.value for stage in schedule} if _is_schedule(schedule) else {schedule}


def _is_schedule(schedule: PyTree) -> bool:
    return isinstance(schedule, Sequence) and all(isinstance(stage, BatchSizeStage) for stage in schedule)
