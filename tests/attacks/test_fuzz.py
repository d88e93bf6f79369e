"""The generator of mutations itself: the same seed makes the same case, and a few cases of each cheap kind hold."""

import importlib.util
import random
import sys
from pathlib import Path

import pytest
from helpers import drawn_requests
from helpers.attacks import NEVER, Attack, judge, strike

_spec = importlib.util.spec_from_file_location("fuzz", Path(__file__).with_name("fuzz.py"))
assert _spec is not None and _spec.loader is not None
fuzz = importlib.util.module_from_spec(_spec)
sys.modules["fuzz"] = fuzz
_spec.loader.exec_module(fuzz)

CHEAP = ["senseless_number", "misspelt_key", "unknown_choice", "command_line", "config_json", "damaged_json"]


@pytest.mark.parametrize("name", CHEAP)
def test_a_mutation_is_refused(name: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fuzz.sound(tmp_path)
    case = getattr(fuzz, name)(random.Random(7), tmp_path)
    says = (case.says,) if case.says else ()
    attack = Attack(name=case.name, command=case.command, words=case.words, code=case.codes[0], says=says)
    judge(attack, strike(attack, tmp_path))


def test_a_seed_makes_the_same_case_again(tmp_path):
    folders = [tmp_path / "a" / "x", tmp_path / "b" / "x"]
    cases = [fuzz.make(5, 11, folder) for folder in folders]
    first, second = [
        {path.name: path.read_bytes().replace(str(f).encode(), b"") for path in f.rglob("*") if path.is_file()}
        for f in folders
    ]
    assert first == second and cases[0].name.replace(str(folders[0]), "") == cases[1].name.replace(str(folders[1]), "")


def test_drawn_requests_are_read_or_refused(tmp_path):
    """A dozen cases of `make fuzz` for requests, by a seed that it does not use."""
    served, dice = drawn_requests.service(tmp_path), random.Random("requests of this test")
    for _ in range(30):
        path, raw = drawn_requests.drawn_body(dice)
        assert drawn_requests.judge(path, raw, served, dice) == [], (path, raw[:300])


@pytest.mark.parametrize("kind", ["records", "templates", "tokenizers"])
def test_what_is_read_without_a_run_is_read_or_refused(kind: str, tmp_path):
    """A case of each kind, by a seed that `make fuzz` does not use."""
    case = getattr(fuzz, kind)(random.Random(f"{kind} of this test"), tmp_path)
    assert case.judge(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", range(12))
def test_adapters_are_read_or_refused(number: int, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    case = fuzz.make(31, number, tmp_path, ("adapters",))
    outcome = strike(Attack(name=case.name, command=case.command, words=case.words, code=case.codes[0]), tmp_path)
    assert outcome.code in case.codes and not any(text in outcome.text for text in NEVER), (
        case.name,
        outcome.text[-900:],
    )
