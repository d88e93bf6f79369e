"""Fifty saves leave the process as large as it was."""

import gc
import os
import statistics
from pathlib import Path

import jax
import numpy as np
import pytest

from levanter.checkpoint import Checkpointer, find_checkpoints


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc/self/statm")
def test_resident_memory_is_flat_over_fifty_saves(devices, tmp_path):
    """Each save holds 32 MiB; a leak of one of them would be seen, and so would 400 KiB of each."""
    array = jax.device_put(np.random.default_rng(0).normal(size=1 << 23).astype(np.float32), devices[0])
    sizes = []
    with Checkpointer(str(tmp_path), keep=[], save_interval_seconds=60.0) as checkpointer:
        for step in range(1, 61):
            checkpointer.save(step, {"weight": array, "step": jax.device_put(np.int32(step))}, {"step": step})
            checkpointer.wait()
            gc.collect()
            sizes.append(resident_bytes())
    # The first ten fill the allocators' pools.
    early, late = statistics.median(sizes[10:20]), statistics.median(sizes[-10:])
    assert abs(late - early) < 16 << 20, [size >> 20 for size in sizes]
    assert [ref.step for ref in find_checkpoints(str(tmp_path))] == [60]


def test_a_save_leaves_no_lists_behind(devices, tmp_path):
    """TensorStore never frees the lists in which it gives its counters; Orbax asked for them twice a save."""
    arrays = {f"weights.{n}": jax.device_put(np.ones(4, np.float32), devices[0]) for n in range(3)}

    def lists() -> int:
        gc.collect()
        return sum(type(each) is list for each in gc.get_objects())

    # What other tests have left is neither collected nor counted, here and from here on (tests/conftest.py).
    gc.collect()
    gc.freeze()
    with Checkpointer(str(tmp_path), keep=[], save_interval_seconds=60.0) as checkpointer:
        counts = []
        for step in range(1, 8):
            checkpointer.save(step, arrays, {})
            checkpointer.wait()
            counts.append(lists())
    # To ask for them once makes eleven lists or more, so a hundred and ten here; what begins late has a few of its own.
    assert counts[-1] - counts[1] < 60, counts
