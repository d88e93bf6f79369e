"""`--help`, and what is wrong with a document, cost no more than the configuration: nothing that runs is imported."""

import json
import subprocess
import sys

import pytest

from levanter.commands.catalog import ENTRY_POINTS

RUNS = (
    "equinox",
    "haliax",
    "huggingface_hub",
    "jax",
    "jaxlib",
    "matplotlib",
    "optax",
    "orbax",
    "pyarrow",
    "tensorstore",
    "tokenizers",
    "torch",
    "transformers",
)
"""Packages that runs need and configurations do not."""

PROGRAM = """
import json, runpy, sys
sys.argv[0] = ""
try:
    runpy.run_module(sys.argv[1], run_name="__main__", alter_sys=False)
except SystemExit as stop:
    code = stop.code
print("\\n" + json.dumps({"code": code, "modules": sorted(sys.modules)}))
"""


def imported_by(door: str, *words: str) -> tuple[int, set[str], str]:
    """Exit code, packages imported, what was printed."""
    program = PROGRAM.replace("sys.argv[1]", repr(f"levanter.main.{door}"))
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    shown, _, last = done.stdout.rstrip().rpartition("\n")
    found = json.loads(last)
    return found["code"], {name.partition(".")[0] for name in found["modules"]}, shown + done.stderr


TRAINING = {"train_lm", "lora_lm", "sft", "sft_mixture", "train_dpo", "lora_dpo"}


@pytest.mark.parametrize("door", sorted(ENTRY_POINTS.keys() - TRAINING))
def test_help_imports_nothing_that_runs(door):
    code, packages, shown = imported_by(door, "--help_all")
    assert code == 0 and shown.startswith(f"usage: python -m levanter.main.{door} ")
    assert "--trainer.mesh.axes" in shown
    assert not packages & set(RUNS)


def test_help_behind_plan_imports_nothing_that_runs():
    code, packages, shown = imported_by("plan", "eval_lm", "--help_all")
    assert code == 0 and "--trainer.mesh.axes" in shown
    assert not packages & set(RUNS)


def test_a_misspelt_key_is_said_before_anything_that_runs_is_imported():
    code, packages, shown = imported_by("eval_lm", "--hf_checkpoint", "x", "--max_eval_lenght", "8")
    assert code == 2 and "max_eval_length" in shown
    assert not packages & set(RUNS)


def test_help_of_one_family_has_its_keys():
    code, _, shown = imported_by("eval_lm", "--model.type", "gemma2", "--help", "model")
    assert code == 0 and "llama" in shown and "apertus" not in shown
    assert "--model.attn_logit_softcapping" in shown
