"""`levanter X …` is `python -m levanter.main.X …`, and helps without importing anything of it."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from levanter.commands.catalog import ENTRY_POINTS
from levanter.main.__main__ import commands, main
from levanter.upstream.unsupported.entry_points import ABSENT

ROOT = Path(__file__).parents[3]


def test_the_installed_script_is_this_function():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"levanter": f"{main.__module__}:{main.__name__}"}


def test_every_command_is_listed_with_what_it_does(capsys):
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    for name, what in commands().items():
        assert what.endswith((".", "?")), name
        assert f"  {name} " in said
    absent = said.split("not implemented yet: ")[1].partition("\n")[0].split(", ")
    assert set(absent) == ABSENT.keys() and not ABSENT.keys() & commands().keys()
    assert ENTRY_POINTS.keys() | {"plan", "migrate", "cache_dataset"} <= commands().keys()
    assert max(map(len, said.splitlines())) <= 160


@pytest.mark.parametrize(("word", "near"), [("eval-ml", "`eval_lm`"), ("trainlm", "`train_lm`"), ("plann", "`plan`")])
def test_a_misspelt_command(word, near, capsys):
    assert main([word, "--config_path", "a.yaml"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: unknown command '{word}'; did you mean {near}")
    assert "  memorization_report " in said


def test_without_a_word_it_says_what_there_is(capsys):
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("usage: levanter COMMAND")


def test_help_imports_nothing_of_the_commands():
    script = """
import sys
from levanter.main.__main__ import main
main(["--help"])
heavy = {"jax", "numpy", "haliax", "equinox", "draccus", "yaml", "transformers"} & sys.modules.keys()
ours = {name for name in sys.modules if name.startswith("levanter")}
packages = {name.split(".")[1] for name in ours if "." in name}
assert not heavy and packages == {"upstream", "main", "io", "base"}, (heavy, ours)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["migrate", "lora-lm"])
def test_it_becomes_the_command(name, tmp_path):
    """Same output, same exit code, same program name in it."""
    words = ["no such file.yaml"] if name == "migrate" else ["--help"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    answers = [
        subprocess.run([sys.executable, "-m", *program, *words], capture_output=True, text=True, env=env, cwd=tmp_path)
        for program in (["levanter.main", name], [f"levanter.main.{name.replace('-', '_')}"])
    ]
    assert (answers[0].returncode, answers[0].stdout, answers[0].stderr) == (
        answers[1].returncode,
        answers[1].stdout,
        answers[1].stderr,
    )
    assert answers[0].returncode == (2 if name == "migrate" else 0)
    assert answers[0].stdout + answers[0].stderr
