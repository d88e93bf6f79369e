"""One tiny model for all tests of the server, and one server of it; what wants a service of its own makes one."""

import openai
import pytest
from helpers.compilations import compilations
from helpers.compile_once import compile_once
from helpers.served import listening, loaded, model_folder


@pytest.fixture(scope="session")
def model(tmp_path_factory, devices):
    where = tmp_path_factory.mktemp("served")
    with compile_once(), loaded(model_folder(where / "tiny"), where) as found:
        yield found


@pytest.fixture(scope="session")
def server(model):
    with listening(model) as found:
        yield found


@pytest.fixture(scope="session")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_compiles_that_is_ready(request):
    """Whatever is asked of the server in a test: it was compiled before."""
    if "server" not in request.fixturenames:
        yield
        return
    request.getfixturevalue("server")
    with compilations() as found:
        yield
    assert found == []
