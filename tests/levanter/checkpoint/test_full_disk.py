"""A disk that takes no more: a clear error, what was complete before is intact, and the space is free again."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from levanter.checkpoint import RestoreTarget, find_checkpoints, restore

SCRIPT = Path(__file__).with_name("fill_the_disk.py")


@pytest.mark.parametrize("limit", [200_000, 0], ids=["arrays do not fit", "nothing fits"])
def test_the_disk_is_full_for_two_saves(devices, tmp_path, limit):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), str(limit)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    # What Orbax logs of the same failure, a traceback from each of its threads, is left out.
    assert "ERROR:absl" not in done.stderr
    assert json.loads(done.stdout) == [
        f"{tmp_path}/step-{step}: the checkpoint of step {step} was not written: File too large; "
        f"the last complete one is of step 2 ({tmp_path}/step-2); it takes 1.00 MiB\n"
        "  → raise the limit on the size of files (ulimit -f), or choose a path that allows more"
        for step in (3, 4)
    ]
    # 1 was temporary and stayed until 5 was there; nothing is left of 3 and 4.
    refs = find_checkpoints(str(tmp_path))
    assert [ref.step for ref in refs] == [2, 5, 6]
    assert {path.name for path in tmp_path.iterdir()} == {"step-2", "step-5", "step-6"}
    spec = importlib.util.spec_from_file_location("fill_the_disk", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    target = RestoreTarget(
        shape=(1 << 18,), dtype=np.dtype(np.float32), sharding=jax.sharding.SingleDeviceSharding(devices[0])
    )
    for ref in refs:
        assert np.asarray(restore(ref, {"weight": target})["weight"]).tobytes() == script.weight(ref.step).tobytes()
