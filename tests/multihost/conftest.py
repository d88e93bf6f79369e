"""What the runs of several processes work on."""

import pytest
from helpers.tiny_runs import Inputs, make_inputs


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> Inputs:
    """A tiny checkpoint, documents, a book."""
    return make_inputs(tmp_path_factory.mktemp("multihost"))


@pytest.fixture(scope="module", autouse=True)
def compiled_once() -> None:
    """Nothing: what this process computes is compared, bit for bit, with what others computed."""
