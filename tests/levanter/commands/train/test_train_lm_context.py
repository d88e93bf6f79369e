"""Runs whose positions are cut, killed and resumed on another cut, have the losses of one that cuts the batch alone."""

import signal
import time
from pathlib import Path

import pytest
from helpers.train_processes import (
    check_checkpoints,
    logged,
    newest,
    resumed_from,
    start,
    train,
    wait_for_steps,
    write_run,
)

pytestmark = pytest.mark.optimized

RING = ("--trainer.mesh.compute_mapping", "{position: context}", "--trainer.mesh.attention_mapping", "ring")
MESHES = {
    "data": ("--trainer.mesh.axes", "{data: 8, model: 1}"),
    "context": ("--trainer.mesh.axes", "{data: 2, context: 4, model: 1}", *RING),
    "both": ("--trainer.mesh.axes", "{data: 2, context: 2, model: 2}", *RING),
}
SAVING = ("--trainer.checkpointer.save_interval", "0.1s", "--optimizer.lr_schedule", "constant")
STEPS = 20


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """Compiled programs, for all processes of this module."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_on_one_cut_it_goes_on_with_another(tmp_path, cache):
    """Context 4 × data 2 in a zigzag ring, killed; context 2 × model 2 × data 2 goes on; data 8 all along."""
    folder = tmp_path / "cut"
    run = write_run(folder, steps=1_000_000)
    process = start(run, *SAVING, *MESHES["context"], devices=8, cache=cache)
    try:
        wait_for_steps(process, folder, 0)
        while max(logged(folder), default=0) < STEPS or newest(folder) == 0:
            assert process.poll() is None, process.communicate()[0][-5000:]
            time.sleep(0.05)
    finally:
        process.kill()
    said, _ = process.communicate(timeout=250)
    assert process.returncode == -signal.SIGKILL
    assert "mesh data 2 × replica 1 × model 1 × context 4" in said
    at = check_checkpoints(folder)
    until = ("--trainer.num_train_steps", str(at + STEPS))
    assert resumed_from(train(run, *SAVING, *MESHES["both"], *until, devices=8, cache=cache)) == at
    found = logged(folder)
    assert sorted(found) == list(range(max(found) + 1)) and max(found) >= at + STEPS - 1

    straight = write_run(tmp_path / "straight", steps=max(found) + 1)
    train(straight, "--optimizer.lr_schedule", "constant", *MESHES["data"], devices=8, cache=cache)
    expected = {step: value for step, (value,) in logged(tmp_path / "straight").items()}
    for step, values in found.items():
        for value in values:
            assert value == pytest.approx(expected[step], rel=1e-5), step
