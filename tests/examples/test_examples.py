"""The scripts of `examples/`: they run, print what they are about, and stay short."""

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.documents import ROOT
from helpers.processes import QUICK

from levanter.models import registry
from levanter.models.registry import LmConfig

EXAMPLES = ROOT / "examples"
SCRIPTS = {path.name: path for path in sorted(EXAMPLES.glob("*.py"))}
LONGEST = 60
"""Lines of code; blank lines and the docstring of the module are not counted."""


@pytest.fixture(autouse=True)
def restored_registry(monkeypatch):
    """Families that an example registers are unknown to later tests."""
    # Importing a family registers its config. All of them are imported first, so that the examples add only their own.
    for name in LmConfig.choice_names():
        LmConfig.get_choice_class(name)
    monkeypatch.setattr(LmConfig, "_choice_registry", dict(LmConfig.get_known_choices()))
    yield
    registry._loaded.cache_clear()


def run(name: str, folder: Path, monkeypatch, capsys, *words: str) -> str:
    """Runs an example in this process, in an empty folder, and returns what it printed."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [str(SCRIPTS[name]), *words])
    runpy.run_path(str(SCRIPTS[name]), run_name="__main__")
    return capsys.readouterr().out


def number(pattern: str, text: str) -> float:
    """The number that the group of a pattern matches."""
    match = re.search(pattern, text)
    assert match, text
    return float(match[1])


def test_score(tmp_path, monkeypatch, capsys):
    printed = run("score.py", tmp_path, monkeypatch, capsys)
    assert number(r"sentences/loss (\S+)", printed) + 1 < number(r"reversed/loss (\S+)", printed)


def test_plan_and_search(tmp_path, monkeypatch, capsys):
    printed = run("plan_and_search.py", tmp_path, monkeypatch, capsys, "v4-64")
    assert "v4-64" in printed and "refused" not in printed
    assert number(r"the model, (\d+) fit", printed) > 10
    assert "trainer.mesh:" in printed and "model.gradient_checkpointing:" in printed


def test_train_objective(tmp_path, monkeypatch, capsys):
    printed = run("train_objective.py", tmp_path, monkeypatch, capsys, "8")
    assert printed.startswith("after 8 steps")
    # (1 − p)^γ < 1, and a uniform guess among the 16 ids has a loss of ln 16 = 2.77.
    assert number(r"focal loss (\S+),", printed) < number(r"validation loss (\S+)", printed) < 2.77


@pytest.mark.slow
def test_finetune_adapters(tmp_path, monkeypatch, capsys):
    printed = run("finetune_adapters.py", tmp_path, monkeypatch, capsys, str(tmp_path / "colors"))
    assert number(r"with adapters: (\S+)", printed) < number(r"base: (\S+)", printed) / 2
    assert len(list(tmp_path.glob("colors/*/step-10/adapter_model.safetensors"))) == 1


def test_generate(tmp_path, monkeypatch, capsys):
    printed = run("generate.py", tmp_path, monkeypatch, capsys)
    assert "needle: ' 56 00 22 8' (length)" in printed and printed.count("sampled: ") == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_serve(tmp_path):
    pytest.importorskip("starlette", reason="starlette is not installed: the extra `serve`")
    done = subprocess.run(
        [sys.executable, str(SCRIPTS["serve.py"])],
        cwd=tmp_path,
        env=os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count=1 {QUICK}", "PYTHONPATH": _paths()},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "56 00 22 8" in done.stdout and "exit code 0" in done.stdout


def test_model_family(tmp_path, monkeypatch, capsys):
    path = list(sys.path)
    printed = run("model_family.py", tmp_path, monkeypatch, capsys)
    assert "16 layers of 2 kinds, scanned as 4 periods of 4" in printed and "GiB on each chip" in printed
    assert sys.path == path


def test_layer_kind(tmp_path, monkeypatch, capsys):
    printed = run("layer_kind.py", tmp_path, monkeypatch, capsys)
    assert "6 layers of 2 kinds" in printed
    assert number(r"token 10: (\d+)", printed) == 10


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SCRIPTS)
def test_runs_as_a_command(name: str, tmp_path):
    """As its docstring says, on one device and with the optimizations of a run."""
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, str(SCRIPTS[name])],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": _paths()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_is_short_and_says_how_to_run_it(name: str):
    text = SCRIPTS[name].read_text(encoding="utf-8")
    tree = ast.parse(text)
    docstring = ast.get_docstring(tree)
    assert docstring is not None and f"    python examples/{name}" in docstring
    code = [line for line in text.splitlines()[tree.body[0].end_lineno :] if line.strip()]
    assert len(code) <= LONGEST


def test_the_table_lists_every_script():
    rows = re.findall(
        r"^\| \[`(\w+\.py)`\]\((\w+\.py)\) \|", (EXAMPLES / "README.md").read_text(encoding="utf-8"), re.M
    )
    assert sorted(rows) == [(name, name) for name in SCRIPTS]
    assert len(SCRIPTS) == 8


def _paths() -> str:
    return os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
