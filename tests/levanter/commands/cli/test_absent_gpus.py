"""JAX's CUDA plugin on a machine without a GPU: installed to compile plans, it says nothing in runs."""

import logging

import pytest

from levanter.commands.cli import devices
from levanter.commands.cli.devices import quiet_absent_gpus

pytestmark = pytest.mark.quick
TEXT = "Jax plugin configuration error: Exception when calling %s.initialize()"


@pytest.fixture
def logger(monkeypatch):
    logger = logging.getLogger("jax._src.xla_bridge")
    monkeypatch.setattr(logger, "filters", [])
    return logger


def shown(logger: logging.Logger, *words: str) -> bool:
    return bool(logger.filter(logger.makeRecord(logger.name, logging.ERROR, "f", 1, TEXT, words, None)))


def test_only_the_plugin_without_its_gpu_is_silent(logger, monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "GPU_DEVICES", (str(tmp_path / "nvidiactl"),))
    quiet_absent_gpus()
    quiet_absent_gpus()
    assert len(logger.filters) == 1
    assert not shown(logger, "jax_plugins.xla_cuda13")
    assert shown(logger, "jax_plugins.another")


def test_where_there_is_a_gpu_the_error_is_shown(logger, monkeypatch, tmp_path):
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(devices, "GPU_DEVICES", (str(tmp_path / "nvidiactl"),))
    quiet_absent_gpus()
    assert shown(logger, "jax_plugins.xla_cuda13")
