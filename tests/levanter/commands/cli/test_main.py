"""The garbage collector while a command is imported."""

import gc

import pytest

from levanter.commands.catalog import collection_paused

pytestmark = pytest.mark.quick


def test_the_collector_runs_again_after_imports_and_after_an_error():
    def fail() -> None:
        with collection_paused():
            assert not gc.isenabled()
            raise ImportError

    assert gc.isenabled()
    with pytest.raises(ImportError):
        fail()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
