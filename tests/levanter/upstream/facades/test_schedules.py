"""Batch sizes that change: compared with a sum over steps."""

import pytest

from levanter.upstream.facades.schedules import OldBatchSchedule, ScheduleStep, distinct_values, value_at_step

pytestmark = pytest.mark.quick

STAGES = [ScheduleStep(0, 4), ScheduleStep(3, 10), ScheduleStep(5, 2)]
SIZES = [4, 4, 4, 10, 10, 2, 2, 2, 2]


def test_rows_of_each_step_are_those_that_were_summed_up():
    schedule = OldBatchSchedule(STAGES)
    for step, size in enumerate(SIZES):
        before = sum(SIZES[:step])
        assert schedule.batch_size_at_step(step) == size == value_at_step(STAGES, step)
        assert schedule.global_data_offset_by_step(step) == before
        assert schedule.batch_indices_at_step(step) == range(before, before + size)
        assert {schedule.find_step_containing_offset(row) for row in range(before, before + size)} == {step}
    assert schedule.unique_batch_sizes() == distinct_values(STAGES) == {2, 4, 10}
    assert (
        OldBatchSchedule(7).global_data_offset_by_step(5) == 35 and value_at_step(7, 3) == 7 == distinct_values(7).pop()
    )


@pytest.mark.parametrize("stages", [[], [ScheduleStep(1, 4)], [ScheduleStep(0, 4), ScheduleStep(0, 5)]])
def test_schedules_that_are_none(stages):
    with pytest.raises(ValueError, match="in ascending order starting at step 0"):
        OldBatchSchedule(stages)
    with pytest.raises(ValueError, match="value"):
        ScheduleStep(0, 0)
    with pytest.raises(ValueError, match="is before the start of the schedule"):
        value_at_step([ScheduleStep(2, 1)], 1)
