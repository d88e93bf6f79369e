"""What a save reports about itself."""

import logging
import time

import jax
import numpy as np
import pytest

from levanter.checkpoint import Checkpointer, SaveWatch
from levanter.checkpoint.save_monitor import log


def test_a_save_tells_how_long_it_takes_where_it_is_and_what_it_allocated(devices, tmp_path, caplog, monkeypatch):
    # Long enough that the save has reached its own thread, whose stack is looked for below.
    watch = SaveWatch(interval=0.05, stacks_after=3.0, frames=4, top=3)
    kept = []

    def said_of(*words):
        messages = [record.getMessage() for record in caplog.records if record.name == log.name]
        return [line for line in messages if all(word in line for word in words)]

    def slow(ref):
        """Lasts until everything has been said that is said of a save that lasts."""
        kept.append(bytearray(10 << 20))
        deadline = time.monotonic() + 100
        while len(said_of("running for", "GiB resident")) < 2 or not said_of("stacks after"):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    array = jax.device_put(np.arange(8), devices[0])
    caplog.set_level(logging.INFO, logger=log.name)
    with Checkpointer(str(tmp_path), keep=[(1, None)], save_interval_seconds=None, watch=watch) as checkpointer:
        monkeypatch.setattr(checkpointer, "_retire", slow)
        checkpointer.save(1, {"weight": array}, {})
    assert all(line.startswith("saving step 1: ") for line in said_of())
    assert len(said_of("running for", "GiB resident")) >= 2
    (stacks,) = said_of("stacks after")
    assert "thread MainThread:" in stacks and "thread checkpoint_0:" in stacks
    assert said_of("ended after")
    allocated = said_of("saving step 1: allocated ")
    assert len(allocated) == 3 and any("test_save_monitor.py" in line for line in allocated)


def test_what_is_senseless_is_refused():
    with pytest.raises(ValueError, match=r"interval: .*got 0\nframes: must not be negative, got -1"):
        SaveWatch(interval=0, frames=-1)
