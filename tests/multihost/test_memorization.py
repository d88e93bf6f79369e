"""Memorization as several processes: the rows of one, byte-identical files on a rerun, also behind a kill.

The run of two processes that is part of the default tests is in
`tests/levanter/commands/memorize/test_eval_careless_lm.py`.
"""

import random
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.processes import Run, check_named, run_together
from helpers.tiny_runs import SECONDS

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.memorize.eval_careless_lm import EvalCarelessLmConfig, main
from levanter.memorization.results import FULL, BookResult

# Real processes on a machine that has other things to do.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "out").iterdir()) if path.is_file()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, inputs) -> BookResult:
    """The results of one process with eight devices."""
    folder = tmp_path_factory.mktemp("alone")
    assert run_entry_point(EvalCarelessLmConfig, main, inputs.eval_careless_lm(folder)[1:]) == 0
    return BookResult.read(str(folder / "out"))


@pytest.fixture(scope="module", params=[2, 4])
def finished(request, tmp_path_factory, inputs):
    """A finished run of several processes: their count, the folder."""
    folder = tmp_path_factory.mktemp("finished")
    outputs = run_together(
        folder, request.param, inputs.eval_careless_lm(folder), devices=8 // request.param, cache=inputs.cache
    )
    assert "covered at p_z" in outputs[0] and not any("covered at p_z" in each for each in outputs[1:])
    return request.param, folder


def test_the_rows_are_those_of_one_process(finished, alone):
    found = BookResult.read(str(finished[1] / "out"))
    np.testing.assert_array_equal(found.token_spans, alone.token_spans)
    np.testing.assert_array_equal(found.ranks, alone.ranks)
    np.testing.assert_allclose(found.log_pz(FULL), alone.log_pz(FULL), atol=1e-4, rtol=0)


def test_a_rerun_leaves_the_same_bytes(finished, inputs, tmp_path):
    count, folder = finished
    run_together(tmp_path, count, inputs.eval_careless_lm(tmp_path), devices=8 // count, cache=inputs.cache)
    assert files_of(tmp_path) == files_of(folder)


@pytest.mark.parametrize("seed", range(3))
def test_killed_and_continued_it_leaves_the_same_bytes(finished, inputs, tmp_path, seed):
    count, folder = finished
    draw = random.Random(10 * count + seed)
    victim = draw.randrange(count)
    # Every batch is a part of its own, so that there is something to go on from.
    command = inputs.eval_careless_lm(tmp_path, save_seconds=0.01)
    with Run(tmp_path / "first", count, command, devices=8 // count, cache=inputs.cache) as run:
        run.wait_for(0, draw.choice(["0 B /", "scoring A Small Book: 0 windows", "scoring A Small Book: 0 windows"]))
        time.sleep(4 * draw.random())
        killed = run.kill(victim)
        ended = run.wait()
    if ended[victim].code == -9:
        assert not (tmp_path / "out" / ".success").exists()
        check_named(ended, victim)
        assert max(each.at for each in ended) - killed < SECONDS
    run_together(tmp_path / "second", count, command, devices=8 // count, cache=inputs.cache)
    assert files_of(tmp_path) == files_of(folder)
