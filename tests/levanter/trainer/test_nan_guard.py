"""The guard: which steps end a run, and how many may be left out before one does."""

import logging

import pytest

from levanter.trainer.nan_guard import Guard, NonFiniteError
from levanter.trainer.report import StepReport

pytestmark = pytest.mark.quick


def report(step, *, skipped=False, **changed):
    numbers = {
        "loss": 3.0,
        "weight": 1.0,
        "grad_norm": 1.0,
        "update_norm": 0.5,
        "parameter_norm": 2.0,
        "learning_rate": 0.1,
    }
    return StepReport(step=step, seconds=1.0, waited=0.0, skipped=skipped, **{**numbers, **changed})


NAN = {"loss": float("nan"), "grad_norm": float("nan"), "update_norm": 0.0}


def test_so_many_steps_in_a_row_are_left_out_and_no_more(caplog):
    guard = Guard(in_a_row=2, last_checkpoint=lambda: "the last checkpoint is of step 5")
    with caplog.at_level(logging.WARNING):
        for step in (0, 1):
            guard.check(report(step, skipped=True, **NAN))
        # One that counts in between, and it begins anew.
        guard.check(report(2))
        for step in (3, 4):
            guard.check(report(step, skipped=True, **NAN))
    assert [r.message.split(":")[0] for r in caplog.records] == [f"step {n} is skipped" for n in (0, 1, 3, 4)]
    with pytest.raises(NonFiniteError) as caught:
        guard.check(report(5, skipped=True, **NAN))
    message = str(caught.value)
    assert "step 5: loss nan, gradient norm nan" in message
    assert "2 steps before it were skipped for the same reason" in message
    assert "the last checkpoint is of step 5" in message and "trainer.skip_nonfinite_steps: 2" in message


def test_outliers_end_no_run():
    guard = Guard()
    for step in range(9):
        guard.check(report(step, skipped=True, loss=99.0))


def test_an_update_that_is_not_finite_is_never_left_out():
    with pytest.raises(NonFiniteError, match="step 1: update norm inf"):
        Guard(in_a_row=9).check(report(1, update_norm=float("inf")))


def test_where_the_guard_is_off_steps_are_left_out_for_ever():
    guard = Guard(nan=False, inf=False, in_a_row=1)
    for step in range(9):
        guard.check(report(step, skipped=True, **NAN))
