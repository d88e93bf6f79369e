"""`kill -9` at random moments of a run that does nothing but save: what is listed is whole, and nothing is lost."""

import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from levanter.checkpoint import CheckpointRef, RestoreTarget, find_checkpoints, restore

pytestmark = pytest.mark.optimized

SCRIPT = Path(__file__).with_name("save_until_killed.py")


def script_module():
    spec = importlib.util.spec_from_file_location("save_until_killed", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_and_kill(base: Path, first: int, seconds: float) -> None:
    """Starts the run and kills it some time after it has saved twice."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(base), str(first)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not all((base / f"step-{first + n}" / "metadata.json").exists() for n in (1, 2)):
        # A kept or later step may have taken their place already.
        if any(int(path.parent.name[5:]) >= first + 2 for path in base.glob("step-*/metadata.json")):
            break
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the run saves nothing"
        time.sleep(0.01)
    time.sleep(seconds)
    assert process.poll() is None, process.communicate()[0]
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    assert process.stdout is not None
    process.stdout.close()


def check_all(refs: tuple[CheckpointRef, ...], devices: list[jax.Device]) -> None:
    state, one = script_module().state, jax.sharding.SingleDeviceSharding(devices[0])
    for ref in refs:
        wanted = state(ref.step)
        assert ref.metadata == {"after": ref.step}
        found = restore(
            ref,
            {name: RestoreTarget(shape=value.shape, dtype=value.dtype, sharding=one) for name, value in wanted.items()},
        )
        for name, value in wanted.items():
            assert np.asarray(found[name]).tobytes() == value.tobytes(), f"{ref}: {name}"


def kill_often(base: Path, devices: list[jax.Device], times: int, seed: int) -> None:
    """Each attempt goes on from the newest checkpoint of the one before."""
    moments, newest = random.Random(seed), 0
    for _ in range(times):
        run_and_kill(base, newest, moments.uniform(0.0, 1.0))
        refs = find_checkpoints(str(base))
        assert refs[-1].step >= newest + 2
        assert {ref.step for ref in refs if ref.kind == "kept"} == set(range(5, refs[-1].step + 1, 5))
        # Two stay; a third may be there where the kill came between completing one and deleting another.
        assert len([ref for ref in refs if ref.kind == "temporary"]) <= 3
        check_all(refs[-4:], devices)
        newest = refs[-1].step
    check_all(find_checkpoints(str(base)), devices)


def test_killed_at_two_random_moments(devices, tmp_path):
    kill_often(tmp_path, devices, times=2, seed=11)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_twenty_random_moments(devices, tmp_path):
    kill_often(tmp_path, devices, times=20, seed=12)
