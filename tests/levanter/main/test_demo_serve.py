"""The demonstration of a server: asked as people ask it, and ended as they end it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_demo():
    """As `make demo-serve` runs it, with the real model."""
    done = subprocess.run(
        [sys.executable, "-m", "levanter.main.demo_serve", "--config_path", "config/serve/demo.yaml"],
        **{"cwd": ROOT, "capture_output": True, "text": True, "check": False},
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout
    assert said.index("programs: start_rows") < said.index("ready: http://127.0.0.1:"), "the plan comes first"
    assert "Paris" in said.partition("=== curl")[2].partition("=== the openai package")[0]
    assert "levanter_requests_total 2\n" in said and "levanter_compiles_after_ready_total 0\n" in said
    assert said.endswith("the server ended with exit code 0\n")
