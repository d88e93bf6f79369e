"""`train_dpo` killed, told to stop, killed while a reference scores, on a full disk: it goes on, and loses nothing."""

import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from helpers.preference_runs import LORA, document, write_inputs
from helpers.train_processes import (
    check_checkpoints,
    compare,
    count,
    environment,
    logged,
    newest,
    resumed_from,
    start,
    train,
    wait_for_steps,
)

pytestmark = [pytest.mark.optimized, pytest.mark.slow, pytest.mark.timeout(1800)]

MODULE = "train_dpo"
OFTEN = ("--trainer.checkpointer.save_interval", "0.2s", "--trainer.checkpointer.keep", "[{every: 50}]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("preferences"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """Compiled programs, for all processes of this module."""
    return tmp_path_factory.mktemp("cache")


def write_run(folder: Path, out: Path, *, steps: int, **more) -> Path:
    """A run on pairs that keeps everything in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    trainer = {
        "tracker": {"type": "json_file", "output_path": str(out / "logged")},
        "mesh": {"axes": {"data": -1}},
        "steps_per_eval": 1_000_000,
    }
    optimizer = {"learning_rate": 1e-4, "warmup": 0, "lr_schedule": "constant"}
    made = {"validation_split_fraction": None, "optimizer": optimizer, **more}
    path = out / "run.yaml"
    path.write_text(yaml.safe_dump(document(folder, out, steps=steps, trainer=trainer, **made)))
    return path


ADAPTED = {"adapter": LORA, "reference": {"type": "adapter_base"}}


def straight(folder: Path, out: Path, cache: Path, *, steps: int, devices: int = 2, **more) -> dict[int, float]:
    """The losses of a run that nothing happens to."""
    train(write_run(folder, out, steps=steps, **more), devices=devices, cache=cache, module=MODULE)
    found = logged(out)
    assert list(found) == list(range(steps))
    return {step: value for step, (value,) in found.items()}


def test_killed_at_random_moments(folder, tmp_path, cache):
    """Five times; where a moment is by chance, some are while a checkpoint is written, as one is at nearly any time."""
    steps, moments = 300, random.Random(13)
    expected = straight(folder, tmp_path / "straight", cache, steps=steps, **ADAPTED)
    out = tmp_path / "killed"
    run = write_run(folder, out, steps=steps, **ADAPTED)
    for _ in range(5):
        before, at = count(out), check_checkpoints(out)
        process = start(run, *OFTEN, cache=cache, module=MODULE)
        wait_for_steps(process, out, before)
        until = time.monotonic() + 60
        while moments.random() < 0.9 and newest(out) <= at and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(moments.uniform(0.0, 0.4))
        assert process.poll() is None, process.communicate()[0][-4000:]
        process.kill()
        said, _ = process.communicate(timeout=250)
        assert process.returncode == -signal.SIGKILL
        assert resumed_from(said) == at
        compare(out, expected, complete=False)
    assert 0 < check_checkpoints(out) < steps
    train(run, *OFTEN, cache=cache, module=MODULE)
    compare(out, expected)


def test_killed_while_it_saves(folder, tmp_path, cache):
    """The process kills itself between the arrays of its second checkpoint and what makes it complete."""
    expected = straight(folder, tmp_path / "straight", cache, steps=12, **ADAPTED)
    out = tmp_path / "killed"
    run = write_run(folder, out, steps=12, **ADAPTED)
    keep = ("--trainer.checkpointer.keep", "[{every: 4}]")
    done = run_script(SAVING, run, *keep, cache=cache, devices=2)
    assert done.returncode == -signal.SIGKILL, done.stderr[-4000:]
    assert check_checkpoints(out) == 4 and list((out / "checkpoints/run").iterdir()) != []
    said = train(run, *keep, cache=cache, module=MODULE)
    assert resumed_from(said) == 4
    compare(out, expected)


SAVING = """
import os, signal, sys
from levanter.checkpoint.checkpointer import Checkpointer
from levanter.commands.cli.main import run_command

complete, saved = Checkpointer._complete, []

def then_killed(self, ref):
    saved.append(ref)
    if len(saved) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return complete(self, ref)

Checkpointer._complete = then_killed
sys.exit(run_command("train_dpo"))
"""


def run_script(script: str, run: Path, *words: str, cache: Path, devices: int = 1) -> subprocess.CompletedProcess[str]:
    """`train_dpo` in a process that does something else besides."""
    command = [sys.executable, "-c", script, "--config_path", str(run), *words]
    return subprocess.run(
        command, env=environment(devices, cache), capture_output=True, text=True, timeout=600, check=False
    )


def test_told_to_stop_it_saves_and_goes_on(folder, tmp_path, cache):
    # Where two models lie cut on virtual devices of a busy machine, one may wait in a gather of the reference and the
    # other in one of the policy until XLA's 40 seconds are over.
    expected = straight(folder, tmp_path / "straight", cache, steps=400, devices=1)
    out = tmp_path / "stopped"
    run = write_run(folder, out, steps=400)
    process = start(run, devices=1, cache=cache, module=MODULE)
    wait_for_steps(process, out, 0)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=250)
    assert process.returncode == 75, said[-4000:]
    at = check_checkpoints(out)
    assert 0 < at < 400 and f"stopped by a signal after {at} of 400 steps" in said
    assert resumed_from(train(run, devices=1, cache=cache, module=MODULE)) == at
    compare(out, expected)


# A part has 4,096 pairs; these stores have a few.
PARTS = """
import sys
from levanter.data import reference_store
from levanter.commands.cli.main import run_command

reference_store.PART = 8
WRITTEN
sys.exit(run_command("train_dpo"))
"""
KILLED = """
import os, signal
write = reference_store.ReferenceStore.write

def then_killed(self, number, values):
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, number, values)

reference_store.ReferenceStore.write = then_killed
"""
FULL = """
import contextlib, errno, os
from levanter.data import store_write
own = store_write.atomic_write

@contextlib.contextmanager
def full(path):
    with own(path) as file:
        yield file
        if "part-00002" in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

store_write.atomic_write = full
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_went_on(
    written: str, judge: Callable[[subprocess.CompletedProcess[str]], None], folder: Path, tmp_path: Path, cache: Path
) -> None:
    """A build that ends in its third part goes on with it, and leaves the bytes of one that nothing happened to."""
    other = {"type": "precomputed", "model_path": str(folder / "other")}
    whole, cut = (
        write_run(folder, tmp_path / name, steps=3, reference={**other, "cache_dir": str(tmp_path / name / "said")})
        for name in ("whole", "cut")
    )
    done = run_script(PARTS.replace("WRITTEN", ""), whole, cache=cache)
    assert done.returncode == 0, done.stderr[-4000:]
    expected = contents(tmp_path / "whole" / "said")
    assert sum(".f32" in name for name in expected) == 5  # 40 pairs
    judge(run_script(PARTS.replace("WRITTEN", written), cut, cache=cache))
    found = contents(tmp_path / "cut" / "said")
    assert sum(name.endswith(".f32") for name in found) == 2
    assert all(found[name] == expected[name] for name in found if name.endswith(".f32"))
    done = run_script(PARTS.replace("WRITTEN", ""), cut, cache=cache)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "2 of 5 chunks are stored already" in done.stderr
    assert contents(tmp_path / "cut" / "said") == expected
    assert logged(tmp_path / "cut") == logged(tmp_path / "whole")


def test_killed_while_the_reference_scores(folder, tmp_path, cache):
    def judge(done):
        assert done.returncode == -signal.SIGKILL, done.stderr[-4000:]

    check_went_on(KILLED, judge, folder, tmp_path, cache)


def test_a_disk_that_is_full_while_the_reference_scores(folder, tmp_path, cache):
    def judge(done):
        assert done.returncode == 2, done.stderr[-4000:]
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert re.search(r"part-00002\.f32.*No space left on device|No space left on device.*part-00002\.f32", line)
        assert "Traceback" not in done.stderr

    check_went_on(FULL, judge, folder, tmp_path, cache)
