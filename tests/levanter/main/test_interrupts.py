"""An interrupt inside of a callback that may not raise ends the program all the same."""

import gc
import signal
import sys
import time

import pytest

from levanter.main.interrupts import interrupts_kept


def test_an_interrupt_inside_of_garbage_collection_is_raised_again():
    def interrupted(phase, _):
        if phase == "start":
            gc.callbacks.remove(interrupted)
            signal.raise_signal(signal.SIGINT)

    def collect_and_wait():
        gc.collect()
        time.sleep(10)

    gc.callbacks.append(interrupted)
    with pytest.raises(KeyboardInterrupt), interrupts_kept():
        collect_and_wait()


def test_other_exceptions_are_told_of_as_before(monkeypatch):
    heard = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)

    class Bad:
        def __del__(self):
            raise ValueError("in a destructor")

    with interrupts_kept():
        Bad()
    assert [found.exc_type for found in heard] == [ValueError]
    assert sys.unraisablehook == heard.append
