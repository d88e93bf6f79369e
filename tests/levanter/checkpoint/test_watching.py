"""What a save reports about itself."""

import logging
import time

import jax
import numpy as np
import pytest

from levanter.checkpoint import Checkpointer, SaveWatch
from levanter.checkpoint.watching import log


def test_a_save_tells_how_long_it_takes_where_it_is_and_what_it_allocated(devices, tmp_path, caplog, monkeypatch):
    watch = SaveWatch(interval=0.2, stacks_after=0.5, frames=4, top=3)
    kept = []

    def slow(ref):
        kept.append(bytearray(10 << 20))
        time.sleep(1.2)

    array = jax.device_put(np.arange(8), devices[0])
    caplog.set_level(logging.INFO, logger=log.name)
    with Checkpointer(str(tmp_path), keep=[(1, None)], save_interval_seconds=None, watch=watch) as checkpointer:
        monkeypatch.setattr(checkpointer, "_retire", slow)
        checkpointer.save(1, {"weight": array}, {})
    said = [record.getMessage() for record in caplog.records if record.name == log.name]
    assert all(line.startswith("saving step 1: ") for line in said)
    lines = [line for line in said if "running for" in line and "GiB resident" in line]
    assert len(lines) >= 2
    (stacks,) = [line for line in said if "stacks after" in line]
    assert "thread MainThread:" in stacks and "thread checkpoint_0:" in stacks
    assert any("ended after" in line for line in said)
    allocated = [line for line in said if line.startswith("saving step 1: allocated ")]
    assert len(allocated) == 3 and any("test_watching.py" in line for line in allocated)


def test_what_is_senseless_is_refused():
    with pytest.raises(ValueError, match=r"interval: .*got 0\nframes: must not be negative, got -1"):
        SaveWatch(interval=0, frames=-1)
