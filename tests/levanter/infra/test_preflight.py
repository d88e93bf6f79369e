"""Preflight before a launch; the pod's side is a stand-in for gcloud that must not be called."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from helpers.stand_in_gcloud import StandIn

from levanter.infra import preflight
from levanter.infra.errors import LaunchError
from levanter.infra.launch import main

ROOT = Path(__file__).resolve().parents[3]
POD = ["--tpu_name", "books", "--tpu_type", "v4-256", "--zone", "us-central2-b"]


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    made = StandIn(tmp_path / "cloud", hosts=32)
    monkeypatch.setenv("PATH", f"{made.bin}:{os.environ['PATH']}")
    monkeypatch.chdir(ROOT)
    return made


@pytest.mark.slow
def test_stand_in_what_cannot_fit_contacts_nobody(stand_in, capsys):
    """The published 405B configuration: 168 GiB on a chip of 30.75 GiB."""
    command = ["python", "-m", "levanter.main.eval_lm", "--config_path", "config/eval/llama3.1_405b_as_published.yaml"]
    assert main([*POD, "--", *command]) == 3
    shown = capsys.readouterr()
    assert stand_in.calls == []
    assert "DOES NOT FIT  168.00 GiB > 30.75 GiB" in shown.out
    assert "not launched: it does not fit (preflight's exit code 3); nothing was contacted" in shown.err


@pytest.mark.slow
def test_stand_in_bad_input_contacts_nobody(stand_in, capsys):
    assert main([*POD, "--", "python", "-m", "levanter.main.eval_lm", "--config_path", "config/eval/demo.yml"]) == 2
    assert stand_in.calls == [] and "its input is bad" in capsys.readouterr().err


def test_stand_in_without_the_extra(stand_in, capsys, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "libtpu" else real(name))
    assert main([*POD, "--", "python", "-m", "levanter.main.eval_lm", "--config_path", "config/eval/demo.yaml"]) == 2
    error = capsys.readouterr().err
    assert stand_in.calls == []
    assert "pip install 'levanter-fork[plan]'" in error and "--plan_first=false" in error and "libtpu is not" in error


def test_stand_in_what_cannot_be_planned_says_the_way_past(stand_in, capsys):
    assert main([*POD, "--", "bash", "-c", "true"]) == 2
    assert stand_in.calls == [] and "--plan_first=false" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "says"), [(0, None), (1, "it failed"), (4, "the compiler crashed on it"), (130, "interrupted")]
)
def test_stand_in_what_a_plan_ends_with(stand_in, capsys, monkeypatch, code, says):
    """The plan itself is a stand-in too, which only ends; a real one is in the tests above."""
    script = f"print('the verdict', flush=True); raise SystemExit({code})"
    monkeypatch.setattr(preflight, "plan_command", lambda *_: (sys.executable, "-c", script))
    # What comes behind the plan ends at the first question.
    stand_in.rules({"match": "describe", "stderr": "ERROR: (gcloud) asked\n"})
    assert main([*POD, "--", "python", "-m", "levanter.main.eval_lm"]) == (code or 2)
    shown = capsys.readouterr()
    assert "the verdict" in shown.out
    assert len(stand_in.calls) == (1 if code == 0 else 0)
    assert ("ERROR: (gcloud) asked" if says is None else says) in shown.err


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["python", "-m", "levanter.main.eval_lm", "--config_path", "x.yaml"], ["eval_lm", "--config_path", "x.yaml"]),
        (["uv", "run", "src/levanter/main/train_lm.py", "--a.b", "1"], ["train_lm", "--a.b", "1"]),
        (["python", "-u", "-m", "levanter.main.eval_careless_lm"], ["eval_careless_lm"]),
    ],
)
def test_the_words_of_the_plan(command, words):
    planned = list(preflight.plan_command(command, "v4-256"))
    assert planned[1:] == ["-m", "levanter.main.plan", words[0], "--target", "v4-256", *words[1:]]


def test_other_modules_are_no_entry_points():
    with pytest.raises(LaunchError, match="preflight needs"):
        preflight.plan_command(["python", "-m", "pytest", "levanter/main/x"], "v4-8")
