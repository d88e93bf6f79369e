"""Where JAX keeps compiled programs: by what was asked for, what JAX was told already, and the kind of device."""

import os
import subprocess
import sys

import jax
import pytest

from levanter.commands.cli.compilation_cache import LARGEST_CACHE, keep_compiled
from levanter.config import parse
from levanter.trainer.config import TrainerConfig

OPTIONS = ("jax_compilation_cache_dir", "jax_compilation_cache_max_size")


@pytest.fixture(autouse=True)
def untouched(monkeypatch, tmp_path):
    """JAX's options as they were, and a cache of this test's own."""
    monkeypatch.setenv("LEVANTER_CACHE", str(tmp_path / "cache"))
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def asked(value: object) -> TrainerConfig:
    return parse(TrainerConfig, overrides={} if value is None else {"jax_compilation_cache_dir": value})


@pytest.mark.parametrize(
    ("value", "platform", "folder"),
    [
        (None, "tpu", "cache/compiled"),
        (None, "gpu", "cache/compiled"),
        (None, "cpu", None),
        (True, "cpu", "cache/compiled"),
        (False, "tpu", None),
        ("own", "cpu", "own"),
    ],
)
def test_the_folder(tmp_path, value, platform, folder):
    found = keep_compiled(asked(str(tmp_path / value) if isinstance(value, str) else value), platform=platform)
    assert found == (None if folder is None else str(tmp_path / folder))
    assert jax.config.jax_compilation_cache_dir == found
    assert found is None or os.path.isdir(found)
    if folder == "cache/compiled":
        assert jax.config.jax_compilation_cache_max_size == LARGEST_CACHE


def test_what_jax_was_told_stays_unless_the_config_says_otherwise(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "told"))
    assert keep_compiled(asked(None), platform="tpu") == str(tmp_path / "told")
    assert keep_compiled(asked(str(tmp_path / "own")), platform="tpu") == str(tmp_path / "own")
    assert keep_compiled(asked(False), platform="tpu") is None and jax.config.jax_compilation_cache_dir is None


def test_a_folder_that_cannot_be_made_is_an_error_only_where_it_was_asked_for(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"trainer\.jax_compilation_cache_dir: .*/file/x"):
        keep_compiled(asked(str(tmp_path / "file/x")), platform="tpu")
    monkeypatch.setenv("LEVANTER_CACHE", str(tmp_path / "file"))
    assert keep_compiled(asked(None), platform="tpu") is None and jax.config.jax_compilation_cache_dir is None


CODE = """
import jax, sys
from levanter.commands.cli.compilation_cache import keep_compiled
from levanter.trainer.config import TrainerConfig
keep_compiled(TrainerConfig(jax_compilation_cache_dir=sys.argv[1]), platform="cpu")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
found = []
jax.monitoring.register_event_listener(lambda event, **_: found.append(event))
print(jax.jit(lambda x: x * 2 + 1)(3.0))
print(sum(event == "/jax/compilation_cache/cache_hits" for event in found))
"""


def test_a_second_process_reads_what_the_first_compiled(tmp_path):
    def hits() -> str:
        command = [sys.executable, "-W", "ignore", "-c", CODE, str(tmp_path / "kept")]
        done = subprocess.run(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        value, found = done.stdout.split()
        assert value == "7.0"
        return found

    assert hits() == "0"
    assert int(hits()) >= 1
