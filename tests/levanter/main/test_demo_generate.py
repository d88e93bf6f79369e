"""The demonstration of generating text: three questions with answers, once more as int8, and what both came to."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from levanter.commands.generate.demo import QUESTIONS

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_demo():
    """As `make demo-generate` runs it, with the real model."""
    words = ["--config_path", "config/generate/demo.yaml", "--inference.max_rows", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "levanter.main.demo_generate", *words],
        **{"cwd": ROOT, "capture_output": True, "text": True, "check": False},
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout
    assert "programs: start_rows" in said, "the plan comes first"
    assert [said.count(f"> {question}\n") for question in QUESTIONS] == [2] * 3
    assert said.count("\ngreedy: ") == 6 and said.count("\nsampled: ") == 3
    assert "Paris" in said.partition("=== the same as int8")[0]
    assert "MiB of weights" in said and "characters that the greedy answers begin with alike" in said
