"""Which steps are saved and which checkpoints go, against runs written out by hand."""

import pytest

from levanter.checkpoint.checkpointer import check_intervals, count_kept, expired_checkpoints, is_kept
from levanter.checkpoint.refs import CheckpointRef, Kind

pytestmark = pytest.mark.quick


def ref(step: int, kind: Kind, saved_at: float | None = None) -> CheckpointRef:
    return CheckpointRef(
        path=f"base/step-{step}",
        step=step,
        kind=kind,
        metadata={},
        leaves={},
        arrays="arrays-0",
        saved_at=step if saved_at is None else saved_at,
    )


def test_intervals_follow_one_another():
    keep = [(10, 30), (25, 100), (1000, None)]
    assert [step for step in range(0, 2500) if is_kept(step, keep)] == [10, 20, 30, 50, 75, 100, 1000, 2000]


@pytest.mark.parametrize("keep", [[], [(7, None)], [(10, 30), (25, 100), (1000, None)], [(500, 40), (3, 60)]])
def test_permanent_checkpoints_are_counted_as_they_are_kept(keep):
    for steps in (1, 29, 30, 60, 75, 99, 2000):
        # The last one stays for ever, whatever its step.
        assert count_kept(steps, keep) == sum(is_kept(step, keep) or step == steps for step in range(1, steps + 1))


def test_nothing_is_kept_after_the_last_end_nor_without_intervals():
    assert [step for step in range(100) if is_kept(step, [(10, 30)])] == [10, 20, 30]
    assert not any(is_kept(step, []) for step in range(100))


def test_every_senseless_interval_is_listed():
    with pytest.raises(ValueError) as caught:
        check_intervals([(0, None), (5, 10), (5, 10)])
    message = str(caught.value)
    assert "keep[0]: `every` must be at least 1" in message
    assert "keep[0]: has no `until`" in message
    assert "keep[2]: `until` must be greater than 10, got 10" in message


def steps(refs: list[CheckpointRef]) -> list[int]:
    return [each.step for each in refs]


def test_only_temporary_checkpoints_expire_oldest_first():
    found = [ref(10, "kept"), ref(13, "temporary"), ref(17, "temporary"), ref(20, "kept"), ref(23, "temporary")]
    newest = found[-1]
    assert steps(expired_checkpoints(found, newest=newest, keep_last=1)) == [13, 17]
    assert steps(expired_checkpoints(found, newest=newest, keep_last=2)) == [13]
    assert steps(expired_checkpoints(found, newest=newest, keep_last=9)) == []
    # None are to stay, but the newest of all is what the run would resume from.
    assert steps(expired_checkpoints(found, newest=newest, keep_last=0)) == [13, 17]
    assert steps(expired_checkpoints(found[:4], newest=found[3], keep_last=0)) == [13, 17]


def test_what_counts_is_when_it_was_saved_not_its_step():
    """A run that went back to step 50 does not lose what it saves to what was saved before at step 90."""
    found = [ref(60, "temporary", saved_at=2.0), ref(90, "temporary", saved_at=1.0)]
    assert steps(expired_checkpoints(found, newest=found[0], keep_last=1)) == [90]
