"""Batch arithmetic against rows worked out by hand."""

import pytest

from levanter.trainer import BatchSizeStage
from levanter.trainer.batch_plan import BatchError, plan_batch, plan_batches

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("tensor_parallel", [1, 2, 4, 8])
def test_eight_chips_at_65536_tokens_accumulate_as_much_as_they_share_a_sequence(tensor_parallel):
    chips, positions = 8, 65_536
    plan = plan_batch(524_288 // positions, per_device=1, ways=chips // tensor_parallel, positions=positions)
    assert plan.accumulation == tensor_parallel
    assert plan.tokens == 524_288
    assert plan.microbatch * plan.accumulation == 8


def test_all_of_a_devices_share_at_once_where_nothing_is_said():
    plan = plan_batch(256, per_device=-1, ways=16, positions=1024)
    assert (plan.per_device, plan.accumulation, plan.microbatch, plan.padding) == (16, 1, 256, 0)
    assert "256 / 16 = 16 rows" in str(plan)


def test_a_batch_is_derived_from_the_rows_of_a_device():
    plan = plan_batch(-1, per_device=3, ways=8, positions=128)
    assert (plan.rows, plan.accumulation) == (24, 1)
    assert "train_batch_size -1: 3 rows per device × 8 batch shards" in plan.reasons


def test_reasons_name_every_number():
    plan = plan_batch(64, per_device=2, ways=8, positions=4096, mesh="data 8 × model 2")
    assert plan.reasons == ("the batch is sharded 8 ways on mesh data 8 × model 2", "64 / (2 × 8) = 4 microbatches")
    assert str(plan).startswith(
        "64 rows × 4096 tokens = 262,144 tokens per step: 2 rows per device × 8 batch shards × 4"
    )


@pytest.mark.parametrize(
    ("batch", "per_device", "ways", "message"),
    [
        (100, -1, 8, r"100 is not a multiple of 8 ways; nearest: 96 or 104"),
        (5, -1, 8, r"5 is not a multiple of 8 ways; nearest: 8$"),
        (4, -1, 8, r"nearest: 8; batch 4 leaves 4 of 8 data shards idle: use data 4 × context 2 with trainer\.mesh"),
        (2, 1, 8, r"nearest: 8; batch 2 leaves 6 of 8 data shards idle: use data 2 × context 4 with trainer\.mesh"),
        (24, 2, 8, r"24 is not a multiple of 16 rows per microbatch \(2 per device × 8 batch shards\); nearest: 16 or "
                   r"32; "
                   r"or per_device_parallelism 1, 3$"),
        (20, 2, 8, r"nearest: 16 or 32$"),
        (-1, -1, 8, r"both -1"),
    ],
)  # fmt: skip
def test_what_is_not_whole_is_refused_with_the_nearest(batch, per_device, ways, message):
    with pytest.raises(BatchError, match=message):
        plan_batch(batch, per_device=per_device, ways=ways, positions=16)


def test_padding_only_where_it_is_allowed():
    (stage,) = plan_batches(100, per_device=3, ways=8, positions=16, allow_padding=True)
    plan = stage.plan
    assert (plan.rows, plan.padding, plan.placed_rows, plan.accumulation) == (100, 20, 120, 5)
    assert plan.tokens == 1600


def test_a_schedule_is_resolved_stage_by_stage_and_refused_as_a_whole():
    stages = [BatchSizeStage(start=0, value=32), BatchSizeStage(start=100, value=64)]
    found = plan_batches(stages, per_device=2, ways=8, positions=16)
    assert [(s.start, s.plan.accumulation) for s in found] == [(0, 2), (100, 4)]
    stages = [BatchSizeStage(start=0, value=30), BatchSizeStage(start=100, value=50)]
    with pytest.raises(BatchError, match=r"(?s)from step 0: .* 30 .*from step 100: .* 50 "):
        plan_batches(stages, per_device=2, ways=8, positions=16)
