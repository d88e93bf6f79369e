"""Runs of `train_lm` that are killed, told to stop and interrupted: the losses are those of the run that was not."""

import random
import signal
import time
from pathlib import Path

import pytest
from helpers.train_processes import (
    check_checkpoints,
    compare,
    count,
    logged,
    newest,
    resumed_from,
    start,
    train,
    wait_for_steps,
    write_run,
)

from levanter.checkpoint import find_checkpoints
from levanter.compat.open import open_checkpoint
from levanter.io import local_path

pytestmark = pytest.mark.optimized

OFTEN = ("--trainer.checkpointer.save_interval", "0.1s", "--trainer.checkpointer.keep", "[{every: 50}]")


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """Compiled programs, for all processes of this module."""
    return tmp_path_factory.mktemp("cache")


def straight(folder: Path, cache: Path, *overrides: str, steps: int) -> dict[int, float]:
    """The losses of a run that nothing happens to."""
    train(write_run(folder, steps=steps), "--trainer.checkpointer.save_interval", "null", *overrides, cache=cache)
    found = {step: values for step, values in logged(folder).items()}
    assert list(found) == list(range(steps)) and all(len(values) == 1 for values in found.values())
    return {step: value for step, (value,) in found.items()}


@pytest.mark.timeout(900)
def test_killed_told_to_stop_and_interrupted(tmp_path, cache):
    """Each attempt resumes from what the one before has left; none is so long that it could end by itself."""
    constant = ("--optimizer.lr_schedule", "constant")
    often, folder = (*OFTEN, *constant), tmp_path / "stopped"
    run = write_run(folder, steps=1_000_000)

    process = start(run, *often, cache=cache)
    wait_for_steps(process, folder, 0)
    while not find_checkpoints(str(folder / "checkpoints/run")):
        time.sleep(0.01)
    process.kill()
    process.communicate(timeout=250)
    assert process.returncode == -signal.SIGKILL
    at = check_checkpoints(folder)
    assert at > 0

    before = count(folder)
    process = start(run, *often, cache=cache)
    wait_for_steps(process, folder, before)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=250)
    assert process.returncode == 130, said[-4000:]
    assert resumed_from(said) == at
    at = check_checkpoints(folder)
    assert f"interrupted: the last checkpoint is of step {at} (" in said and "trainer.id=run resumes from it" in said
    assert "Traceback" not in said

    before = count(folder)
    process = start(run, *often, cache=cache)
    wait_for_steps(process, folder, before)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=250)
    assert process.returncode == 75, said[-4000:]
    assert resumed_from(said) == at
    at = check_checkpoints(folder)
    assert f"stopped by a signal after {at} of 1,000,000 steps" in said
    assert f"checkpoint: {local_path(str(folder))}/checkpoints/run/step-{at}" in said
    compare(folder, straight(tmp_path / "straight", cache, *constant, steps=max(logged(folder)) + 1))


ADAPTERS = ("--adapter", "{type: lora, r: 4, zero_init_b: true, a_init_mode: peft}")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("what", "times"), [((), 20), (ADAPTERS, 6)], ids=["everything", "adapters"])
def test_killed_at_random_moments(what, times, tmp_path, cache):
    steps, moments = 400, random.Random(20)
    expected = straight(tmp_path / "straight", cache, *what, steps=steps)
    folder = tmp_path / "killed"
    run = write_run(folder, steps=steps)
    kills, during_start = 0, 0
    while kills < times:
        before, at = count(folder), check_checkpoints(folder)
        process = start(run, *OFTEN, *what, cache=cache)
        if moments.random() < 0.25:
            # While it starts, restores and compiles.
            time.sleep(moments.uniform(0.0, 6.0))
            during_start += 1
        else:
            wait_for_steps(process, folder, before)
            until = time.monotonic() + 60
            while moments.random() < 0.9 and newest(folder) <= at and time.monotonic() < until:
                time.sleep(0.05)
            time.sleep(moments.uniform(0.0, 1.0))
        assert process.poll() is None, process.communicate()[0][-4000:]
        process.kill()
        said, _ = process.communicate(timeout=250)
        kills += 1
        assert process.returncode == -signal.SIGKILL
        if "training:" in said:
            assert resumed_from(said) == at
        compare(folder, expected, complete=False)
    assert during_start > 0 and 0 < check_checkpoints(folder) < steps
    train(run, *OFTEN, *what, cache=cache)
    compare(folder, expected)
    refs = find_checkpoints(str(folder / "checkpoints/run"))
    assert [ref.step for ref in refs if ref.kind == "kept"] == list(range(50, steps + 1, 50))
    assert {path.name for path in (folder / "checkpoints/run").iterdir()} == {f"step-{ref.step}" for ref in refs}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_exports_are_whole_whenever_it_is_killed(tmp_path, cache):
    """Whatever has the name of an export is one: it reads, and its weights are those of the run that was not killed."""
    steps, moments = 120, random.Random(9)
    often = ("--hf_save_steps", "4", "--trainer.checkpointer.save_interval", "null")
    straight_run = write_run(tmp_path / "straight", steps=steps)
    train(straight_run, *often, "--hf_save_path", str(tmp_path / "whole"), cache=cache)
    run, exports = write_run(tmp_path / "killed", steps=steps), tmp_path / "hf/run"
    for _ in range(8):
        before = count(tmp_path / "killed")
        process = start(run, *often, "--hf_save_path", str(tmp_path / "hf"), cache=cache)
        wait_for_steps(process, tmp_path / "killed", before)
        time.sleep(moments.uniform(0.0, 1.5))
        process.kill()
        said, _ = process.communicate(timeout=250)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, said[-4000:]
        check_exports(exports, tmp_path / "whole/run")
    train(run, *often, "--hf_save_path", str(tmp_path / "hf"), cache=cache)
    assert check_exports(exports, tmp_path / "whole/run") == list(range(4, steps + 1, 4))
    # Those that were killed half-way were replaced.
    assert not list(exports.glob("*.incomplete"))


def check_exports(exports: Path, whole: Path) -> list[int]:
    """Compares everything that calls itself an export; returns the steps."""
    found = [path for path in exports.glob("step-*") if path.suffix == ""]
    for path in found:
        assert open_checkpoint(str(path)).config.num_layers == 2
        weights = [(folder / "model.safetensors").read_bytes() for folder in (path, whole / path.name)]
        assert weights[0] == weights[1], path
    return sorted(int(path.name.removeprefix("step-")) for path in found)
