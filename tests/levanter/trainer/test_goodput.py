"""Where the time of a run goes: against a simulated timeline, over restarts, with damaged files."""

import json
import os

import numpy as np
import pytest

from levanter.trainer.goodput import (
    ACTIVITIES,
    DOWN,
    FILE,
    OTHER,
    REPEATED,
    GoodputFile,
    RunAttempt,
    TimeAccount,
    goodput,
)
from levanter.trainer.record_file import RecordFile
from levanter.trainer.report import StepReport


def report(step, *, seconds=1.0, waited=0.0):
    return StepReport(
        step=step, loss=1.0, weight=1.0, grad_norm=1.0, update_norm=1.0, parameter_norm=1.0, learning_rate=0.1,
        seconds=seconds, waited=waited,
    )  # fmt: skip


def attempt(began, until, first, taken, **seconds):
    return RunAttempt(began=began, until=until, first=first, taken=taken, seconds=seconds)


def test_two_attempts_by_hand():
    # 100 s of which 60 are 6 steps; a checkpoint of step 4; 20 s later 50 s with 3 steps of 10 s.
    time = goodput([attempt(0, 100, 0, 6, steps=60, compilation=30), attempt(120, 170, 4, 7, steps=30, loading=5)])
    assert time.total == 170 and time.attempts == 2
    assert time.seconds["steps"] == 60 - 20 + 30 and time.seconds[REPEATED] == 20 and time.seconds[DOWN] == 20
    assert time.seconds["compilation"] == 30 and time.seconds["loading"] == 5
    assert time.seconds[OTHER] == (100 - 90) + (50 - 35)
    assert time.share == pytest.approx(70 / 170) and sum(time.shares.values()) == pytest.approx(1)


@pytest.mark.parametrize("seed", range(40))
def test_drawn_timelines(seed):
    """Every second of a timeline is labelled; the account must find the labels from the attempts alone."""
    rng = np.random.default_rng(seed)
    seconds_of_step = rng.integers(1, 9)
    labels, attempts, model, now = dict.fromkeys((*ACTIVITIES, OTHER, REPEATED, DOWN), 0), [], [], 1000
    first = 0
    for last in [*(False for _ in range(rng.integers(0, 5))), True]:
        began, spent = now, dict.fromkeys(ACTIVITIES, 0)
        for name in (*(set(ACTIVITIES) - {"steps"}), OTHER):
            long = int(rng.integers(0, 20))
            now, labels[name] = now + long, labels[name] + long
            if name != OTHER:
                spent[name] += long
        taken = first + int(rng.integers(0, 12))
        # The model is that of the checkpoint: steps behind it are gone.
        lost = model[first:]
        labels[REPEATED] += int(seconds_of_step) * len(lost)
        del model[first:]
        for step in range(first, taken):
            model.append(step)
            now, spent["steps"] = now + int(seconds_of_step), spent["steps"] + int(seconds_of_step)
        attempts.append(attempt(began, now, first, taken, **spent))
        if not last:
            down = int(rng.integers(0, 30))
            now, labels[DOWN] = now + down, labels[DOWN] + down
            first = int(rng.integers(first, taken + 1))
    labels["steps"] = int(seconds_of_step) * len(model)
    time = goodput(attempts)
    assert time.total == pytest.approx(now - 1000)
    assert time.seconds == pytest.approx(labels)
    assert time.share == pytest.approx(labels["steps"] / max(time.total, 1e-9) if time.total else 0)


def test_clocks_that_are_set_back_give_no_negative_time():
    time = goodput([attempt(100, 40, 0, 3, steps=30), attempt(10, 20, 3, 4, steps=5)])
    assert time.total == 40 and min(time.seconds.values()) == 0 and time.share == 35 / 40
    assert goodput([attempt(5, 5, 0, 0)]).share == 0


def test_a_step_contains_neither_its_input_nor_a_compilation():
    now = iter(range(0, 1000, 7))
    account = TimeAccount(clock=lambda: next(now))
    with account.compiling():
        pass
    account.step(report(0, seconds=10, waited=1))
    account.step(report(1, seconds=3, waited=0.5))
    with account.timed("saving"):
        pass
    assert account.seconds == pytest.approx(
        {**dict.fromkeys(ACTIVITIES, 0), "compilation": 7, "input": 1.5, "steps": 2 + 2.5, "saving": 7}
    )


def test_a_compilation_that_raises_is_counted():
    account = TimeAccount(clock=iter((0.0, 4.0)).__next__)
    with pytest.raises(RuntimeError), account.compiling():
        raise RuntimeError
    assert account.seconds["compilation"] == 4


def test_attempts_are_kept(tmp_path):
    for first in (0, 5):
        account = TimeAccount()
        file = GoodputFile(tmp_path, account, began=1e9 + 100 * first, first=first)
        account.add("steps", 8.0)
        file.step(report(first + 6))
        file.save()
    attempts = json.loads((tmp_path / FILE).read_text())["attempts"]
    assert [(a["first"], a["taken"], a["seconds"]["steps"]) for a in attempts] == [(0, 7, 8.0), (5, 12, 8.0)]
    # Two of the first attempt's seven steps were taken again.
    assert file.now().seconds[REPEATED] == pytest.approx(16 / 7) and file.now().attempts == 2


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b'{"format": 2}', b'{"format": 1}', b'{"format": 1, "attempts": [1]}',
        b'{"format": 1, "attempts": [{"began": 1, "until": 2, "first": 0, "taken": "3", "seconds": {}}]}',
        b'{"format": 1, "attempts": [{"began": NaN, "until": 2, "first": 0, "taken": 3, "seconds": {}}]}',
        b'{"format": 1, "attempts": [{"began": 1, "until": 2, "first": 0, "taken": 3, "seconds": {"steps": true}}]}',
        b"[" * 5000, b"\xff\xfe",
    ],
)  # fmt: skip
def test_a_damaged_file_is_set_aside_and_reported(tmp_path, caplog, content):
    (tmp_path / FILE).write_bytes(content)
    file = GoodputFile(tmp_path, TimeAccount(), began=1.0, first=0)
    assert FILE in caplog.text and "kept as goodput.json.unreadable" in caplog.text
    assert (tmp_path / f"{FILE}.unreadable").read_bytes() == content
    file.save()
    assert file.now().attempts == 1 and GoodputFile(tmp_path, TimeAccount(), began=2.0, first=0).now().attempts == 2


def test_a_pipe_is_not_waited_for(tmp_path, caplog):
    os.mkfifo(tmp_path / FILE)
    GoodputFile(tmp_path, TimeAccount(), began=1.0, first=0)
    assert "not a regular file" in caplog.text


def test_a_file_that_cannot_be_written_is_reported_once(tmp_path, caplog):
    (tmp_path / FILE).mkdir()
    record = RecordFile(tmp_path / FILE)
    record.write({})
    record.write({})
    assert len(caplog.records) == 1
