"""The heaps of `tests/golden/step_memory.json`, assigned again by the TPU compiler.

A worker is ended as soon as the compiler has written its buffer assignment: the machine code that follows takes most of
a compilation. `UPDATE_GOLDEN=1` writes the file anew.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.drawn_steps import DrawnStep, steps_by_name
from helpers.golden import GOLDEN, updating

pytestmark = [
    pytest.mark.aot,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (the `plan` extra)"),
]
KEPT = GOLDEN / "step_memory.json"
COMPILE = """
import sys
from helpers import drawn_steps
from levanter.plan.aot import compile_programs
provider = f"{drawn_steps.__file__}:described"
compile_programs(provider, {"overrides": sys.argv[2:]}, target=sys.argv[1], programs=("train_step",))
"""


def heap_bytes(step: DrawnStep, folder: Path, *, seconds: float = 1500) -> int:
    """The bytes of a step's heap on a device, its inputs included."""
    flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_pass_re=NONE"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen([sys.executable, "-c", COMPILE, step.target, *step.overrides], env=env)
    try:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for report in folder.glob("*train_step*after_optimizations-memory-usage-report.txt"):
                if (total := re.search(r"Total bytes: (\d+)", report.read_text())) is not None:
                    return int(total[1])
            assert process.poll() is None, f"{step.name}: no buffer assignment was written"
            time.sleep(0.5)
        raise AssertionError(f"{step.name}: no buffer assignment after {seconds} s")
    finally:
        # On Ctrl-C the process ends its worker.
        process.send_signal(signal.SIGINT)
        process.wait()


@pytest.mark.parametrize("name", steps_by_name())
def test_the_heap_is_the_kept_one(name, tmp_path):
    found = heap_bytes(steps_by_name()[name], tmp_path)
    kept = json.loads(KEPT.read_text())
    libtpu = importlib.metadata.version("libtpu")
    if updating():
        kept["made_with"] = {"libtpu": libtpu}
        kept["heap_bytes"][name] = found
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
        return
    if kept["made_with"]["libtpu"] != libtpu:
        pytest.skip(f"kept of libtpu {kept['made_with']['libtpu']}, here is {libtpu}")
    assert found == pytest.approx(kept["heap_bytes"][name], rel=1e-3)
