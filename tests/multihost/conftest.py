"""What the runs of several processes work on."""

import pytest
from helpers.tiny_runs import Inputs, make_inputs


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> Inputs:
    """A tiny checkpoint, documents, a book."""
    return make_inputs(tmp_path_factory.mktemp("multihost"))
