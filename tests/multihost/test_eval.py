"""`eval_lm` as several processes: the numbers of one, and what is said where somebody is missing."""

import json
import random
import re
import signal
import time

import pytest
from helpers.processes import Run, check_named, run_together
from helpers.tiny_runs import SECONDS, TIMEOUTS

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.evaluate.eval_lm import EvalLmConfig, main

# Real processes on a machine that has other things to do.
pytestmark = pytest.mark.timeout(1800)


def losses(folder):
    return {name: each["loss"] for name, each in json.loads((folder / "out.json").read_text())["sets"].items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, inputs):
    """The numbers of one process with eight devices."""
    folder = tmp_path_factory.mktemp("alone")
    command = inputs.eval_lm(folder)
    assert run_entry_point(EvalLmConfig, main, command[1:]) == 0
    return losses(folder)


def test_two_processes_score_what_one_does(tmp_path, inputs, alone):
    outputs = run_together(tmp_path, 2, inputs.eval_lm(tmp_path), devices=4, cache=inputs.cache)
    assert losses(tmp_path) == pytest.approx(alone, abs=1e-6)
    assert "8 devices (cpu), 2 hosts, 1 slice" in outputs[0] and "perplexity" in outputs[0]
    # Process 0 alone prints, and writes what is tracked.
    assert "perplexity" not in outputs[1] and "mesh data" not in outputs[1]
    tracked = (tmp_path / "tracker" / "metrics.jsonl").read_text().splitlines()
    assert sum("eval/loss" in line and "metrics" in line for line in tracked) == 1


def test_who_is_killed_while_weights_are_loaded_is_named(tmp_path, inputs):
    script = tmp_path / "held.py"
    # These weights are there in a moment: process 1 reads for as long as it lives.
    script.write_text(
        "import os, sys, time\n"
        "from haliax_ext.host_reader import HostReader\n"
        "from levanter.commands.evaluate.eval_lm import EvalLmConfig, main\n"
        "from levanter.commands.cli.errors import run_entry_point\n"
        "if os.environ['LEVANTER_PROCESS_ID'] == '1':\n"
        "    HostReader.start = lambda *_: (print('held in reading', flush=True), time.sleep(1000))\n"
        "sys.exit(run_entry_point(EvalLmConfig, main))\n"
    )
    command = [str(script), *inputs.eval_lm(tmp_path)[1:]]
    with Run(tmp_path, 2, command, devices=4, cache=inputs.cache) as run:
        run.wait_for(1, "held in reading")
        run.kill(1)
        ended = run.wait()
    # By its connection, which closed at once: not because nothing was heard of it for SECONDS.
    assert ended[0].code == 5
    # Reading, or waiting for the other to have compiled an exchange.
    where = r"(after barrier 'loading weights'|(in|behind) barrier 'the first load\.\S+')"
    assert re.search(f"error: process 1 of 2 is missing; noticed by process 0 {where}", ended[0].output)
    assert re.search(rf"process 1 \(.*\) was lost: .*killed.*; last seen {where}", ended[0].output)
    assert not (tmp_path / "out.json").exists()


def test_who_never_starts_is_named(tmp_path, inputs):
    command = inputs.eval_lm(tmp_path, distributed={**TIMEOUTS, "init_timeout": "2s"})
    with Run(tmp_path, 2, command, absent=[1]) as run:
        ended = run.wait()[0]
    assert ended.code == 5
    assert "1 of 2 processes joined within 2 s; missing: 1; joined: 0 (" in ended.output
    assert "Traceback" not in ended.output


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_any_moment(tmp_path, inputs, alone, count, seed):
    draw = random.Random(100 * count + seed)
    victim, after = draw.randrange(count), draw.choice(["known from the environment", "0 B /", "loading weights: done"])
    command = inputs.eval_lm(tmp_path)
    with Run(tmp_path / "first", count, command, devices=8 // count, cache=inputs.cache) as run:
        run.wait_for(0, after)
        time.sleep(draw.random())
        killed = run.kill(victim)
        ended = run.wait()
    if ended[victim].code == -9:
        check_named(ended, victim)
        assert max(each.at for each in ended) - killed < SECONDS + 5
    # The same command again, with nothing to clear away.
    run_together(tmp_path / "second", count, command, devices=8 // count, cache=inputs.cache)
    assert losses(tmp_path) == pytest.approx(alone, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_killed_while_they_come_together(tmp_path, inputs, count, seed):
    """Before the roll call, in it, while JAX's own service starts, while the mesh is built."""
    draw = random.Random(900 * count + seed)
    victim, roll = draw.randrange(count), 40
    command = inputs.eval_lm(tmp_path, distributed={**TIMEOUTS, "init_timeout": f"{roll}s"})
    with Run(tmp_path, count, command, devices=8 // count, cache=inputs.cache) as run:
        if seed:
            run.wait_for(0, "known from the environment" if seed == 1 else "on each device", seconds=120)
        time.sleep(draw.random() * (6 if seed == 0 else 0.5))
        killed = run.kill(victim)
        ended = run.wait()
    assert max(each.at for each in ended) - killed < 2 * roll + SECONDS
    for number, each in enumerate(ended):
        if number != victim:
            assert each.code == 5, each.output[-4000:]
            assert re.search(
                rf"process {victim} of {count} is missing; noticed by process {number}"
                rf"|{count - 1} of {count} processes joined within {roll} s; missing: {victim};"
                + ("|process 0 does not answer at localhost" if victim == 0 else ""),
                each.output,
            ), each.output[-4000:]
    assert not (tmp_path / "out.json").exists()


@pytest.mark.slow
def test_a_process_that_hangs_is_noticed(tmp_path, inputs):
    command = inputs.eval_lm(tmp_path, distributed={**TIMEOUTS, "heartbeat_timeout": "4s"})
    with Run(tmp_path, 4, command, devices=2, cache=inputs.cache) as run:
        run.wait_for(0, "loading weights: 0 B")
        stopped = run.kill(2, signal.SIGSTOP)
        while run.still_running() != [2]:
            assert time.monotonic() - stopped < 60
            time.sleep(0.1)
        run.kill(2)
        ended = run.wait()
    check_named(ended, 2)
    assert "no heartbeat for 4 s" in ended[0].output


@pytest.mark.slow
@pytest.mark.parametrize("granule", ["slice", "process"])
def test_four_processes_on_other_meshes(tmp_path, inputs, alone, granule):
    mesh = {"axes": {"data": -1, "model": 2}, "shared_mapping": {"vocab": "model"}, "granule": granule}
    outputs = run_together(tmp_path, 4, inputs.eval_lm(tmp_path, mesh=mesh), devices=2, cache=inputs.cache)
    assert losses(tmp_path) == pytest.approx(alone, abs=1e-6)
    shown = {"slice": "mesh data 4 × replica 1 × model 2", "process": "mesh data 1 × replica 1 × model 2"}[granule]
    assert f"8 devices (cpu), 4 hosts, {'1 slice' if granule == 'slice' else '4 processes'}" in outputs[0]
    assert shown in outputs[0]
    if granule == "process":
        assert "replica_dcn 4" in outputs[0]


@pytest.mark.slow
def test_an_error_of_the_user_is_said_once(tmp_path, inputs):
    command = [*inputs.eval_lm(tmp_path), "--hf_checkpoint", "/nowhere/model"]
    outputs = run_together(tmp_path, 4, command, devices=2, cache=inputs.cache, code=2)
    assert sum(output.count("error:") for output in outputs) == 1 and "/nowhere/model" in outputs[0]


@pytest.mark.slow
def test_an_error_on_one_host_only_is_told_on_the_others(tmp_path, inputs):
    """As where a disk is not mounted on one host."""
    for number in (0, 1, 3):
        (tmp_path / "disks" / str(number)).mkdir(parents=True)
        (tmp_path / "disks" / str(number) / "model").symlink_to(inputs.model)
    script = tmp_path / "one.py"
    script.write_text(
        "import os, sys\n"
        "from levanter.commands.cli.errors import run_entry_point\n"
        "from levanter.commands.evaluate.eval_lm import EvalLmConfig, main\n"
        f"here = {str(tmp_path / 'disks')!r} + '/' + os.environ['LEVANTER_PROCESS_ID'] + '/model'\n"
        "sys.exit(run_entry_point(EvalLmConfig, main, [*sys.argv[1:], '--hf_checkpoint', here]))\n"
    )
    with Run(tmp_path, 4, [str(script), *inputs.eval_lm(tmp_path)[1:]], devices=2, cache=inputs.cache) as run:
        ended = run.wait()
    assert [each.code for each in ended] == [5, 5, 2, 5]
    assert re.search(r"process 2 \(.*\) ended with exit code 2: .*disks/2/model", ended[0].output)
