"""Two real processes save one run: one decides, both write, either's absence is told by name."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers.processes import free_port

from levanter.checkpoint import RestoreTarget, find_checkpoints, restore

SCRIPT = Path(__file__).with_name("save_together.py")


def run_two(base: Path, mode: str) -> list[dict]:
    port = free_port()
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    running = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(number), str(port), str(base), mode],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=250) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (_, errors) in zip(running, outputs, strict=True):
        assert process.returncode == 0, errors[-4000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


@pytest.mark.slow
def test_process_0_decides_and_both_write(devices, tmp_path):
    found = run_two(tmp_path, "run")
    # By process 0's clock: 3 s after the start, 5 by step, 8 (3 s later), 10 by step; 13 would be next.
    assert found == [{"saved": [3, 5, 8, 10], "latest": 10}] * 2
    refs = find_checkpoints(str(tmp_path))
    assert [(ref.step, ref.kind) for ref in refs] == [(5, "kept"), (8, "temporary"), (10, "kept")]
    # What each process wrote has its digest.
    assert all(ref.digests.keys() == ref.leaves.keys() for ref in refs)
    assert not list(tmp_path.glob("*/*.digests.*"))
    spec = importlib.util.spec_from_file_location("save_together", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    one = jax.sharding.SingleDeviceSharding(devices[0])
    target = RestoreTarget(shape=(16, 8), dtype=np.dtype(np.float32), sharding=one)
    for ref in refs:
        # Both processes' shards, read by one process on one device.
        arrays = restore(ref, {"weight": target, "copies": target}, unexpected="skip")
        assert np.asarray(arrays["weight"]).tobytes() == script.weight(ref.step).tobytes()
        assert np.asarray(arrays["copies"]).tobytes() == script.weight(-ref.step % 100).tobytes()


def test_a_process_that_is_missing_is_an_error_after_the_timeout(tmp_path):
    said = run_two(tmp_path, "absent")[1]["said"]
    assert "process 1 of 2 waited 2 s at 'checkpoints/0: due' for the other processes" in said
