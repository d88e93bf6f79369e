"""The command `plan` with the real TPU compiler, as a user runs it: from the repository's root, in its own process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.aot, pytest.mark.timeout(400)]


def run_plan(*words: str) -> tuple[int, dict, str]:
    command = [sys.executable, "-m", "levanter.main.plan", *words, "--json", "-"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)
    return done.returncode, json.loads(done.stdout), done.stderr


def test_405b_on_two_pods_at_once(tmp_path):
    """One command, two pods, no weights, no text: numbers for both."""
    page = tmp_path / "page.html"
    config = "config/eval/llama3.1_405b_v4-256.yaml"
    code, document, said = run_plan(
        "eval_lm", "--config_path", config, "--target", "v4-256,v6e-64", "--html", str(page)
    )
    assert code == 0, said
    first, second = document["verdicts"]
    assert (first["target"], second["target"]) == ("v4-256", "v6e-64")
    for verdict in (first, second):
        assert verdict["headline"].startswith("fits: ") and "modelled, not measured" in verdict["headline"]
    assert "compiling score for v6e-64" in said
    assert page.stat().st_size > 10_000


def test_what_is_refused_by_the_compiler_is_explained():
    config = "config/train/llama2_70b_v4-256.yaml"
    code, document, said = run_plan(
        "train_lm", "--config_path", config, "--target", "v4-256", "--trainer.mesh.residual_mapping.embed=null"
    )
    assert code == 3, said
    (verdict,) = document["verdicts"]
    assert verdict["headline"].startswith("does not fit: ")
    text = json.dumps(verdict)
    assert "train_step needs" in text and "largest input" in text
