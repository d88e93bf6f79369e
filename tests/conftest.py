"""Every test sees 8 virtual CPU devices and JAX's strict promotion rules."""

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
# Nor do `gs://` and `s3://` of a document ask a network: their client libraries are installed for tests of their own.
os.environ["STORAGE_EMULATOR_HOST"] = os.environ["AWS_ENDPOINT_URL_S3"] = "http://127.0.0.1:1"
os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
# Servers of these tests are on this machine.
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost"

import hypothesis
import jax
import pytest

sys.path.insert(0, str(Path(__file__).parent))

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# A change is judged by the same examples every time; `HYPOTHESIS_PROFILE=developer` searches for new ones. How long one
# takes says more about the machine than about the code.
_UNTIMED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("judge", derandomize=True, **_UNTIMED)
hypothesis.settings.register_profile("developer", **_UNTIMED)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "judge"))


# A shell's background job ignores Ctrl-C, and what `nohup` starts ignores a hangup; every process that a test starts
# and then sends a signal would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def devices() -> list[jax.Device]:
    """The 8 virtual CPU devices."""
    found = jax.devices()
    assert len(found) == 8, "tests need 8 virtual CPU devices; XLA was started before conftest"
    return found


@pytest.fixture(scope="module", autouse=True)
def compiled_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """What this module's tests compile here is compiled quickly, and alike computations once.

    Most tests compile for longer than they run. Those that run a real model, compare bits with another process's, or
    look at machine code say `pytestmark = pytest.mark.optimized`; so do, unsaid, those for the TPU compiler.
    """
    from helpers.compile_once import compile_once

    asked = any(request.node.get_closest_marker(name) for name in ("optimized", "aot"))
    with contextlib.nullcontext() if asked else compile_once():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays until the end, and no search for garbage walks over it.

    A million objects: each full search among them took a second, and tests of compiled programs start many.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests (several processes, real models) go first: at the end, one would have all cores for itself."""
    items.sort(key=lambda item: item.path.parent.name not in ("multihost", "parity"))
