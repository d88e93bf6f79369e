"""Hugging Face exports as several processes: those of one, and whole whenever one of them is killed."""

import json
import random
import time
from pathlib import Path

import pytest
from helpers import save_in_processes
from helpers.processes import Run, check_named, run_together
from helpers.tiny_runs import SECONDS

from levanter.compat.hf.export import INCOMPLETE
from levanter.compat.open import open_checkpoint

# Real processes on a machine that has other things to do.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 14


def train(inputs, folder: Path, *, steps: int) -> list[str]:
    """The command of a run that exports after every step."""
    return inputs.train_lm(folder, steps=steps, hf_save_path=str(folder / "hf"), hf_save_steps=1)


def exports(folder: Path) -> dict[int, dict[str, bytes]]:
    """Whatever has the name of an export: its files by step. All of them read."""
    found = {}
    for path in (folder / "hf" / "run").glob("step-*"):
        if path.suffix == "":
            assert open_checkpoint(str(path)).config.num_layers == 1
            found[int(path.name.removeprefix("step-"))] = {each.name: each.read_bytes() for each in path.iterdir()}
    return found


@pytest.fixture(scope="module", params=[2, 4])
def whole(request, tmp_path_factory, inputs):
    """A run that nothing happens to: its process count, its folder, its exports."""
    folder = tmp_path_factory.mktemp("whole")
    command = train(inputs, folder, steps=STEPS)
    run_together(folder, request.param, command, devices=8 // request.param, cache=inputs.cache)
    found = exports(folder)
    assert sorted(found) == list(range(1, STEPS + 1))
    return request.param, folder, found


@pytest.mark.parametrize("count", [1, 2])
def test_a_checkpoint_of_several_processes_exports_to_the_same_bytes(whole, inputs, tmp_path, count):
    """`export_lm_to_hf` needs no devices; as two processes the first one does it."""
    _, folder, found = whole
    words = ["--checkpoint_path", str(folder / "checkpoints" / "run" / f"step-{STEPS}")]
    command = ["levanter.main.export_lm_to_hf", *words, "--output_dir", str(tmp_path / "hf" / "run" / f"step-{STEPS}")]
    outputs = run_together(tmp_path, count, command)
    assert exports(tmp_path) == {STEPS: found[STEPS]}
    assert "Hugging Face folder" in outputs[0] and all(output == "" for output in outputs[1:])


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_any_moment_every_export_is_whole(whole, inputs, tmp_path, seed):
    count, _, found = whole
    draw = random.Random(300 * count + seed)
    for attempt in range(2):
        victim, behind = draw.randrange(count), max(exports(tmp_path), default=0)
        command, began = train(inputs, tmp_path, steps=1000), time.time()
        with Run(tmp_path / f"attempt{attempt}", count, command, devices=8 // count, cache=inputs.cache) as run:
            wait_for_export(run, tmp_path, behind + draw.randrange(1, 6), began=began)
            time.sleep(draw.random() / 20)
            killed = run.kill(victim)
            ended = run.wait()
        check_named(ended, victim)
        assert max(each.at for each in ended) - killed < SECONDS
        there = exports(tmp_path)
        assert there == {step: found[step] for step in there}
    command = train(inputs, tmp_path, steps=STEPS)
    run_together(tmp_path / "last", count, command, devices=8 // count, cache=inputs.cache)
    assert exports(tmp_path) == found
    assert {path.name for path in (tmp_path / "hf" / "run").iterdir()} == {f"step-{step}" for step in found}


def wait_for_export(run: Run, folder: Path, step: int, *, began: float) -> None:
    """Waits until the export after a step is being written, by this run: the one before may have left half of it."""
    deadline = time.monotonic() + 400
    path = folder / "hf" / "run" / f"step-{step}"
    half = path.with_name(path.name + INCOMPLETE)
    while not path.exists() and not is_newer(half, began):
        assert run.still_running() and time.monotonic() < deadline, f"no {path}"
        time.sleep(0.001)


def is_newer(path: Path, began: float) -> bool:
    try:
        return path.stat().st_mtime > began
    except FileNotFoundError:
        return False


def test_on_disks_of_their_own_process_0_has_the_exports(inputs, tmp_path):
    """A run that was killed before its export was whole makes up for it, though only one host can see that."""
    script = tmp_path / "one.py"
    script.write_text(
        "import os, sys\n"
        "from levanter.commands.cli.errors import run_entry_point\n"
        "from levanter.commands.train.lm.train_lm import TrainLmConfig, main\n"
        f"here = {str(tmp_path)!r} + '/disk' + os.environ['LEVANTER_PROCESS_ID']\n"
        "sys.exit(run_entry_point(TrainLmConfig, main, [*sys.argv[1:], '--hf_save_path', here]))\n"
    )
    for steps, exported in ((2, [1, 2]), (4, [2, 3, 4])):
        command = [str(script), *train(inputs, tmp_path, steps=steps)[1:]]
        run_together(tmp_path / str(steps), 2, command, devices=4, cache=inputs.cache)
        there = {int(path.name.removeprefix("step-")) for path in (tmp_path / "disk0" / "run").iterdir()}
        assert set(exported) <= there and not (tmp_path / "disk1").exists()
        # As if it had been killed while it wrote its last one.
        (tmp_path / "disk0" / "run" / f"step-{steps}").rename(tmp_path / f"step-{steps}")


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_neox"])
def test_pieces_from_other_processes(tmp_path, family):
    """Expert and layer that one process owns, rows and columns of all: brought in pieces of 32 KiB."""
    run_together(tmp_path, 2, [save_in_processes.__file__, str(tmp_path), family, str(32 << 10)], devices=4)
    found = [json.loads((tmp_path / f"ran.{number}.json").read_text()) for number in range(2)]
    assert found[0] == found[1]
    assert found[0]["tensors"] == found[0]["expected"]
    assert sorted(set(found[0]["ran"])) == found[0]["planned"]
    gathered = [name for name in found[0]["ran"] if name.startswith("save.gather")]
    assert len(gathered) > len(found[0]["planned"])
