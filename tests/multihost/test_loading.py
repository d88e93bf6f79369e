"""Two real processes load one checkpoint: together they read it once, and every shard is right."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import load_in_two_processes
from helpers.tiny_llama import tiny_tensors

TESTS = Path(load_in_two_processes.__file__).resolve().parent.parent
IN_ORDER = list(range(8))
# Each process has half of every row of the mesh: `model` crosses the hosts, `data` does not.
ACROSS = [0, 4, 1, 5, 2, 6, 3, 7]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def together(folder: Path, **given) -> list[dict]:
    """Runs two processes of 4 virtual devices each; what they report."""
    given = {"mesh": {"data": 4, "model": 2}, "order": IN_ORDER, "dtype": "float32", "limit": 1 << 30, **given}
    np.savez(folder / "tensors.npz", **tiny_tensors())
    port = str(free_port())
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
    }
    script = str(Path(load_in_two_processes.__file__))
    running = [
        subprocess.Popen(
            [sys.executable, script, str(number), "2", port, str(folder), json.dumps(given)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for process, output in zip(running, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]
    return [json.loads((folder / f"found.{number}.json").read_text()) for number in range(2)]


def check_bytes(found: list[dict]) -> None:
    total = found[0]["total"]
    assert sum(each["bytes_read"] for each in found) <= 1.02 * total
    for each in found:
        assert each["bytes_read"] == each["planned"]
        assert each["progress"] == [each["planned"], each["planned"], sum(e["planned"] for e in found)]
        assert len(each["seconds_by_host"]) == 2
    assert found[0]["seconds_by_host"] == found[1]["seconds_by_host"]


def test_replicated_row_and_column_sharded_leaves(tmp_path):
    """`embed` over the hosts: inner in gate_proj (columns), outer in down_proj (rows); `norm` stays whole."""
    found = together(tmp_path, order=ACROSS, mapping={"embed": "model", "mlp": "data", "vocab": None})
    check_bytes(found)
    strategies = {path.split(".")[-2]: strategy for path, strategy in found[0]["strategies"].items()}
    assert strategies["gate_proj"] == "exchange" and strategies["down_proj"] == "direct"


@pytest.mark.slow
@pytest.mark.parametrize("order", [IN_ORDER, ACROSS], ids=["in order", "across"])
@pytest.mark.parametrize(
    "mapping",
    [
        {},
        {"embed": "data", "mlp": "model", "kv_head": "model", "vocab": "model"},
        {"embed": ["model", "data"]},
        {"head_size": "data", "q_heads_per_group": "model"},
    ],
    ids=["replicated", "default", "embed over all", "heads inside"],
)
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1 << 30), ("float32", 4000), ("bfloat16", 1 << 30)])
def test_every_way_to_cut(tmp_path, order, mapping, dtype, limit):
    found = together(tmp_path, order=order, mapping=mapping, dtype=dtype, limit=limit)
    check_bytes(found)
    if not mapping:
        assert set(found[0]["strategies"].values()) == {"exchange"}
        assert (max(found[0]["pieces"].values()) > 1) == (limit == 4000)
