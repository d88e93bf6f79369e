"""The curves of a run: means of buckets, few points, restarts, numbers that are none."""

import json
import math

import numpy as np
import pytest

from levanter.trainer.history import FILE, POINTS, EvaluationPoint, History
from levanter.trainer.report import StepReport


def report(step, *, loss=1.0, grad_norm=1.0, seconds=2.0):
    return StepReport(
        step=step, loss=loss, weight=1.0, grad_norm=grad_norm, update_norm=1.0, parameter_norm=1.0,
        learning_rate=step / 10, seconds=seconds, waited=0.0,
    )  # fmt: skip


def run(folder, steps, *, first=0, stop, **values):
    history = History(folder, first=first, stop=stop, tokens_of=lambda step: 10 * (step + 1))
    for step in steps:
        history.step(report(step, **{name: value(step) for name, value in values.items()}))
    return history


def test_short_runs_have_every_step(tmp_path):
    history = run(tmp_path, range(5), stop=5, loss=lambda n: 5.0 - n)
    assert [(p.taken, p.loss, p.learning_rate) for p in history.points] == [(n + 1, 5.0 - n, n / 10) for n in range(5)]
    assert [p.tokens_per_second for p in history.points] == [5 * (n + 1) for n in range(5)]


@pytest.mark.parametrize("steps", [999, 1000, 1001, 4321, 10_000])
def test_long_runs_have_means(tmp_path, steps):
    losses = np.random.default_rng(steps).normal(size=steps)
    history = run(tmp_path, range(steps), stop=steps, loss=lambda n: float(losses[n]))
    points = history.points
    assert len(points) <= POINTS + 1 and points[-1].taken == steps and points[0].taken == 1
    begin = 0
    for point in points:
        assert point.loss == pytest.approx(losses[begin : point.taken].mean())
        begin = point.taken


def test_a_resumed_run_drops_the_points_of_steps_that_it_takes_again(tmp_path):
    before = run(tmp_path, range(8), stop=20, loss=lambda n: 100.0 + n)
    before.evaluated(4, {"eval/loss": 3.0})
    before.evaluated(8, {"eval/loss": 2.0})
    before.save()
    after = run(tmp_path, range(5, 20), first=5, stop=20, loss=lambda n: float(n))
    assert [p.taken for p in after.points] == list(range(1, 21))
    assert [p.loss for p in after.points] == [100.0, 101, 102, 103, 104, *range(5, 20)]
    assert after.evaluations == [EvaluationPoint(taken=4, loss=3.0)]


def test_the_unfinished_bucket_is_saved(tmp_path):
    """Killed behind a checkpoint in the middle of a bucket, a run loses no point of the steps before it."""
    history = run(tmp_path, range(25), stop=10 * POINTS, loss=lambda n: float(n))
    history.save()
    points = json.loads((tmp_path / FILE).read_text())["points"]
    assert [p["taken"] for p in points] == [1, 11, 21, 25]
    resumed = run(tmp_path, range(25, 27), first=25, stop=10 * POINTS, loss=lambda n: float(n))
    assert [(p.taken, p.loss) for p in resumed.points] == [(1, 0), (11, 5.5), (21, 15.5), (25, 22.5), (27, 25.5)]


def test_numbers_that_are_not_finite_are_gaps(tmp_path):
    history = run(tmp_path, range(3), stop=3, loss=lambda n: [1.0, math.nan, math.inf][n], grad_norm=lambda _: 1e30)
    assert [p.loss for p in history.points] == [1.0, None, None]
    history.evaluated(3, {"eval/loss": math.nan})
    history.evaluated(3, {"other": 1.0})
    history.save()
    assert History(tmp_path, first=3, stop=3, tokens_of=lambda _: 1).points == history.points
    assert not history.evaluations


def test_a_step_that_compiles_has_no_rate(tmp_path):
    history = History(tmp_path, first=0, stop=3, tokens_of=lambda _: 8)
    history.compiled()
    for step in range(3):
        history.step(report(step))
    assert [p.tokens_per_second for p in history.points] == [None, 4.0, 4.0]


@pytest.mark.parametrize(
    "content",
    ["{", '{"format": 1, "points": [{}], "evaluations": []}', '{"format": 1, "points": [], "evaluations": 1}'],
)
def test_a_damaged_file_is_set_aside(tmp_path, caplog, content):
    (tmp_path / FILE).write_text(content)
    assert run(tmp_path, range(2), stop=2).points[-1].taken == 2
    assert "history.json.unreadable" in caplog.text
