"""Threads that write give way to those that compute, and to no others' harm."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorstore

from levanter.checkpoint.orbax_io import NICE_INCREMENT, lower_priority

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")


def _priorities() -> dict[str, list[int]]:
    """Of every thread of this process, by name."""
    found: dict[str, list[int]] = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
            found.setdefault(name, []).append(os.getpriority(os.PRIO_PROCESS, int(task.name)))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def _write(folder: Path) -> None:
    spec = {"driver": "zarr3", "kvstore": f"file://{folder}/", "metadata": {"shape": [64, 1024], "data_type": "int32"}}
    store = tensorstore.open(spec, create=True, delete_existing=True).result()
    store.write(np.zeros((64, 1024), np.int32)).result()


def test_only_tensorstores_threads_give_way(tmp_path):
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    _write(tmp_path / "a")
    with lower_priority():
        inside = _priorities()
    assert set(inside.pop("ts_pool_worker")) == {min(19, usual + NICE_INCREMENT)}
    assert all(priority == usual for of_name in inside.values() for priority in of_name)
    if os.geteuid() == 0:
        assert set(_priorities()["ts_pool_worker"]) == {usual}


def test_threads_that_begin_in_it_give_way_too(tmp_path):
    """In a process of its own, in which TensorStore has no threads yet."""
    program = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from levanter.checkpoint.orbax_io import NICE_INCREMENT, lower_priority
import os, test_priority as t
usual = os.getpriority(os.PRIO_PROCESS, 0)
with lower_priority():
    assert "ts_pool_worker" not in t._priorities()
    t._write(Path({str(tmp_path)!r}) / "b")
    deadline = time.monotonic() + 100.0
    while set(t._priorities()["ts_pool_worker"]) != {{min(19, usual + NICE_INCREMENT)}} and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(t._priorities()["ts_pool_worker"]) == {{min(19, usual + NICE_INCREMENT)}}, t._priorities()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=250)


def test_what_fails_inside_is_raised():
    with pytest.raises(OSError, match="no space"), lower_priority():
        raise OSError("no space")
