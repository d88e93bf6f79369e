"""`levanter X …` is `python -m levanter.main.X …`, and helps without importing anything of it."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from levanter.commands.catalog import ENTRY_POINTS
from levanter.commands.cli.main import run_command
from levanter.commands.guides import GROUPS, GUIDES
from levanter.config import parse
from levanter.config.help import key_lines
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
    assert set(GUIDES) <= commands().keys()
    headings = [line[:-1] for line in said.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == [group for group in GROUPS if group in headings] and "Others" not in headings
    absent = said.split("not implemented yet: ")[1].partition("\n")[0].split(", ")
    assert set(absent) == ABSENT.keys() and not ABSENT.keys() & commands().keys()
    assert ENTRY_POINTS.keys() | {"plan", "migrate", "cache_dataset"} <= commands().keys()
    assert max(map(len, said.splitlines())) <= 120
    # Whole descriptions.
    flat = " ".join(said.split())
    assert not [name for name, what in commands().items() if " ".join(what.split()) not in flat]


@pytest.mark.parametrize("name", sorted(GUIDES))
def test_guides_name_keys_and_documents_that_exist(name):
    guide = GUIDES[name]
    assert guide.group in GROUPS and (not guide.example or (ROOT / guide.example).is_file())
    if name in ENTRY_POINTS:
        cls = ENTRY_POINTS[name].config_class()
        assert len(guide.keys) == 5 and set(guide.keys) <= {key.path for key in key_lines(cls)}
        if guide.example:
            parse(cls, paths=[str(ROOT / guide.example)])


def test_every_listed_entry_point_has_a_guide():
    assert ENTRY_POINTS.keys() <= GUIDES.keys()


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("launch", "python -m levanter.infra.launch"),
        ("train", "levanter train_lm"),
        ("chat", "levanter inference_repl"),
    ],
)
def test_words_of_other_tools(word, instead, capsys):
    assert main([word]) == 2
    assert f"error: unknown command {word!r}; here it is `{instead}`" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train_lm", "serve", "export_lm_to_hf"])
def test_a_command_without_words_says_how_to_begin(name, capsys):
    assert run_command(name, []) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {name} needs a configuration: a file, or keys")
    assert all(f"--{key} " in said for key in GUIDES[name].keys) and GUIDES[name].example in said
    assert len(said.splitlines()) < 30


def test_a_missing_extra_is_reported_before_the_plan(capsys, monkeypatch):
    monkeypatch.setattr("levanter.commands.cli.main.find_spec", lambda package: None)
    assert run_command("serve", ["--hf_checkpoint", "acme/no-such-model"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: serve needs starlette and uvicorn, which are not installed\n")
    assert "pip install 'levanter-fork[serve]'" in said.err and not said.out


def test_help_begins_with_the_keys_that_most_runs_set(capsys):
    assert run_command("train_lm", ["--help"]) == 0
    short = capsys.readouterr().out
    first = short.partition("keys that most runs set:\n")[2].partition("\n\n")[0]
    assert [line.split()[0][2:] for line in first.splitlines() if line.startswith("  --")] == list(
        GUIDES["train_lm"].keys
    )
    assert "--trainer  " in short and "--trainer.mesh" not in short
    assert run_command("train_lm", ["--help_all"]) == 0
    long = capsys.readouterr().out
    assert "--trainer.mesh.axes" in long and len(long) > 4 * len(short)
    # Choices that are refused are not offered.
    assert "llama" in short and "whisper" not in long and "kron" not in long


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
assert not heavy and packages == {"upstream", "main", "io", "base", "commands"}, (heavy, ours)
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


def test_a_reader_that_has_seen_enough_ends_the_list_silently():
    """As in `levanter --help | head -1`: the pipe is closed before anything is written."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "levanter", "--help"], stdout=writing, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["train_tokenizer", "cache_dataset", "recipe"])
def test_help_names_the_command_that_was_run(name):
    done = subprocess.run(
        [sys.executable, "-m", f"levanter.main.{name}", "--help"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"usage: python -m levanter.main.{name} ")
