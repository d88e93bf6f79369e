"""`train_lm` as several processes: the losses of one, stopped together, resumed on other process counts."""

import json
import random
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.processes import Run, check_named, run_together
from helpers.tiny_runs import SECONDS
from safetensors.numpy import load_file

from levanter.checkpoint import find_checkpoints
from levanter.commands.cli.errors import run_entry_point
from levanter.commands.train.lm.train_lm import TrainLmConfig, describe, main
from levanter.commands.train.run import execute
from levanter.config import load
from levanter.runplan import Session, Target
from levanter.tracker import NoopTracker

# Real processes on a machine that has other things to do.
pytestmark = pytest.mark.timeout(1800)

GATHER = "save.gather.31x4.of.62x16.float32.0-model.1-data"
"""The Program that brings the embedding to all processes."""


def losses(folder: Path) -> dict[int, float]:
    """The loss of each step, the last attempt's where there were several."""
    lines = (folder / "tracker" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {each["step"]: each["metrics"]["train/loss"] for each in records if "train/loss" in each.get("metrics", {})}


def wait_for_steps(folder: Path, count: int) -> None:
    """Waits until so many steps are tracked."""
    deadline = time.monotonic() + 400
    path = folder / "tracker" / "metrics.jsonl"
    while not path.exists() or len(losses(folder)) < count:
        assert time.monotonic() < deadline, "no steps"
        time.sleep(0.02)


class Losses(NoopTracker):
    """Keeps the loss of each step."""

    def __init__(self):
        self.found = {}

    def log(self, metrics, *, step, commit=None):
        if "train/loss" in metrics:
            self.found[step] = metrics["train/loss"]


def test_two_processes_train_stop_and_hand_over_to_one(tmp_path, inputs, devices):
    """SIGTERM reaches process 1 only; both stop behind one step. One process goes on from there."""
    exports = {"hf_save_path": str(tmp_path / "hf"), "hf_save_steps": 2}
    command = inputs.train_lm(tmp_path, steps=5000, **exports)
    with Run(tmp_path, 2, command, devices=4, cache=inputs.cache) as run:
        wait_for_steps(tmp_path, 4)
        run.kill(1, signal.SIGTERM)
        ended = run.wait()
        assert [each.code for each in ended] == [75, 75]
    together = losses(tmp_path)
    taken = len(together)
    assert list(together) == list(range(taken)) and 4 <= taken < 5000
    assert f"stopped by a signal after {taken} of 5,000 steps" in ended[0].output
    newest = find_checkpoints(str(tmp_path / "checkpoints" / "run"))[-1]
    assert newest.step == taken

    total = taken + 2
    config = load(TrainLmConfig, inputs.train_lm(tmp_path, steps=total, **exports)[1:])
    # One plan for both runs, so that it compiles once.
    plan = describe(config, Target(name="local", platform="cpu", kind="cpu", devices=8)).check()
    mesh = plan.mesh.build(devices)
    rest, straight = Losses(), Losses()
    assert execute(plan, mesh, Session(run_id="run", tracker=rest)).taken == total
    assert execute(plan, mesh, Session(run_id="straight", tracker=straight)).taken == total
    assert list(rest.found) == [taken, taken + 1] and list(straight.found) == list(range(total))
    assert {**together, **rest.found} == pytest.approx(straight.found, abs=2e-5)
    # The export that two processes wrote between steps is the one that one process wrote.
    for step in (2, total):
        ours, wanted = (
            load_file(tmp_path / f"hf/{name}/step-{step}/model.safetensors") for name in ("run", "straight")
        )
        assert ours.keys() == wanted.keys()
        for name, value in wanted.items():
            np.testing.assert_allclose(ours[name], value, atol=1e-4, rtol=0, err_msg=name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, inputs):
    """The losses of one process with eight devices."""
    folder = tmp_path_factory.mktemp("alone")
    assert run_entry_point(TrainLmConfig, main, inputs.train_lm(folder, steps=9)[1:]) == 0
    return losses(folder)


@pytest.mark.slow
def test_saved_on_four_resumed_on_two_and_on_one(tmp_path, inputs, alone):
    for count, steps in ((4, 3), (2, 6), (1, 9)):
        run_together(
            tmp_path / str(count), count, inputs.train_lm(tmp_path, steps=steps), devices=8 // count, cache=inputs.cache
        )
    assert list(losses(tmp_path)) == list(range(9))
    assert losses(tmp_path) == pytest.approx(alone, abs=2e-5)


@pytest.mark.slow
def test_begun_from_hugging_face_weights_and_evaluated(tmp_path, inputs):
    """The first loss is that of the weights, and the loss of held-out text that of `eval_lm`, whatever the count."""
    found = []
    for count in (1, 2, 4):
        folder = tmp_path / str(count)
        urls = {"train_urls": [str(inputs.documents)], "validation_urls": [str(inputs.documents)]}
        command = inputs.train_lm(
            folder,
            steps=2,
            data={"tokenizer": str(inputs.model), "components": {"docs": {"source": urls}}, "cache_dir": None},
            initialize_from_hf=str(inputs.model),
            use_hf_model_config=True,
            train_seq_len=48,
            trainer={"steps_per_eval": 1, "per_device_eval_parallelism": 1},
        )
        run_together(folder, count, command, devices=8 // count, cache=inputs.cache)
        lines = map(json.loads, (folder / "tracker" / "metrics.jsonl").read_text().splitlines())
        evaluated = [each["metrics"]["eval/loss"] for each in lines if "eval/loss" in each.get("metrics", {})]
        assert len(evaluated) >= 2
        found.append((losses(folder), evaluated))
    for steps, evaluated in found[1:]:
        assert steps == pytest.approx(found[0][0], abs=2e-5) and evaluated == pytest.approx(found[0][1], abs=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_any_moment_it_goes_on(tmp_path, inputs, count, seed):
    """Every second step is saved; whatever was being written when a process was killed, the next attempt goes on."""
    draw = random.Random(1000 * count + seed)
    command = inputs.train_lm(tmp_path, steps=100_000)
    for attempt in range(2):
        victim, behind = draw.randrange(count), len(losses(tmp_path)) if attempt else 0
        with Run(tmp_path / f"attempt{attempt}", count, command, devices=8 // count, cache=inputs.cache) as run:
            wait_for_steps(tmp_path, behind + draw.randrange(3, 12))
            time.sleep(draw.random() / 5)
            killed = run.kill(victim)
            ended = run.wait()
        check_named(ended, victim)
        assert max(each.at for each in ended) - killed < SECONDS
    newest = find_checkpoints(str(tmp_path / "checkpoints" / "run"))[-1]
    total = newest.step + 2
    run_together(
        tmp_path / "last", count, inputs.train_lm(tmp_path, steps=total), devices=8 // count, cache=inputs.cache
    )
    straight = tmp_path / "straight"
    run_together(straight, count, inputs.train_lm(straight, steps=total), devices=8 // count, cache=inputs.cache)
    # On the same mesh and process count, bit for bit.
    expected = losses(straight)
    assert {step: loss for step, loss in losses(tmp_path).items() if step < total} == expected


@pytest.mark.slow
def test_one_process_compiles_for_longer_than_collectives_wait(tmp_path, inputs):
    """Gloo gives a late peer 30 s; who is done compiling must not be inside a collective by then."""
    script = tmp_path / "slow.py"
    script.write_text(
        "import os, sys, time\n"
        "from jax._src import compiler\n"
        "from levanter.commands.cli.errors import run_entry_point\n"
        "from levanter.commands.train.lm.train_lm import TrainLmConfig, main\n"
        f"slow = {{'jit_evaluate': '0', 'jit_train_step': '1', 'jit_{GATHER}': '1'}}\n"
        "real = compiler.compile_or_get_cached\n"
        "def compile(backend, module, *args, **kwargs):\n"
        "    name = module.operation.attributes['sym_name'].value\n"
        "    if slow.get(name) == os.environ['LEVANTER_PROCESS_ID']:\n"
        "        print('slowly:', name, flush=True)\n"
        "        time.sleep(40)\n"
        "    return real(backend, module, *args, **kwargs)\n"
        "compiler.compile_or_get_cached = compile\n"
        "sys.exit(run_entry_point(TrainLmConfig, main))\n"
    )
    held_out = inputs.train_lm(
        tmp_path,
        steps=2,
        hf_save_path=str(tmp_path / "hf"),
        data={
            **inputs.numbers(tmp_path),
            "num_validation_sequences": {"numbers": 8},
        },
        trainer={"per_device_eval_parallelism": 1},
    )
    outputs = run_together(tmp_path, 2, [str(script), *held_out[1:]], devices=4, cache=inputs.cache)
    slowly = [re.findall(r"slowly: jit_(\S+)", each) for each in outputs]
    assert slowly == [["evaluate"], ["train_step", GATHER]]
    assert "compiling evaluate" in outputs[0] and "compiled evaluate in 0:4" in outputs[0]
    assert "waiting for process 1 of 2" in outputs[0] and list(losses(tmp_path)) == [0, 1]


@pytest.mark.slow
def test_checkpoints_that_not_all_hosts_see_are_refused(tmp_path, inputs):
    """As on disks of their own: process 0 would resume, process 1 begin."""
    command = inputs.train_lm(tmp_path, steps=2, trainer={"checkpointer": {"base_path": str(tmp_path / "0")}})
    run_together(tmp_path / "first", 1, command, devices=8, cache=inputs.cache)
    script = tmp_path / "one.py"
    script.write_text(
        "import os, sys\n"
        "from levanter.commands.cli.errors import run_entry_point\n"
        "from levanter.commands.train.lm.train_lm import TrainLmConfig, main\n"
        f"here = {str(tmp_path)!r} + '/' + os.environ['LEVANTER_PROCESS_ID']\n"
        "sys.exit(run_entry_point(TrainLmConfig, main, [*sys.argv[1:], '--trainer.checkpointer.base_path', here]))\n"
    )
    with Run(tmp_path / "second", 2, [str(script), *command[1:]], devices=4, cache=inputs.cache) as run:
        ended = run.wait()
        assert [each.code for each in ended] == [2, 2]
    assert "the checkpoint to resume from differs between processes" in ended[0].output
    assert "base_path must be storage that all hosts see" in ended[0].output


@pytest.mark.slow
def test_two_processes_sample_as_one(tmp_path, inputs):
    """Samples between steps: process 0 has the engine, the others its calls; also by a tokenizer without files."""
    keys = {"sample_prompts": ["1 4 9", "16 25 36 49"], "sample_every": 1}
    generation = {"sampling": {"temperature": 0, "max_tokens": 6}, "max_rows": 8}
    actual = []
    for count in (1, 2):
        folder = tmp_path / str(count)
        trainer = {"log_dir": str(folder / "logs")}
        command = inputs.train_lm(folder, steps=2, generation=generation, trainer=trainer, **keys)
        run_together(folder, count, command, devices=8 // count, cache=inputs.cache)
        paths = sorted((folder / "logs" / "run" / "samples").iterdir())
        actual.append(
            {path.name: [json.loads(line)["tokens"] for line in path.read_text().splitlines()] for path in paths}
        )
    assert actual[0].keys() == {"step-1.jsonl", "step-2.jsonl"} and actual[0] == actual[1]
    assert all(len(tokens) == 6 for texts in actual[0].values() for tokens in texts)
