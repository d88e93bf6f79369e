"""Searches against what brute force compiled (`benchmarks/searches.py`): they find the fastest layout of it."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).parents[4] / "benchmarks" / "searches.py"
ENOUGH = 10
"""Layouts that must be compiled for a case to say anything."""


def loaded_benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("searches", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


searches = loaded_benchmark()
COMPILED = [case for case in searches.CASES if len(searches.kept(case)) >= ENOUGH]


def test_what_is_kept_belongs_to_the_cases():
    known = {case.name: case for case in searches.CASES}
    documents = {path.stem: path for path in searches.KEPT.glob("*.json")}
    assert COMPILED and documents.keys() <= known.keys()
    for name in documents:
        case, answers = known[name], searches.kept(known[name])
        # Kept under the words that the search prints, of layouts that divide.
        assert answers.keys() <= {str(candidate) for candidate in searches.every(case)}


@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.name)
def test_the_winner_is_the_fastest_of_all_that_were_compiled(case):
    answers = searches.kept(case)
    found = searches.replayed(case, answers)
    assert found.best is not None
    speeds = {text: answer.tokens / answer.seconds for text, answer in answers.items() if answer.fits}
    fastest = max(speeds, key=lambda text: speeds[text])
    assert speeds[str(found.best.candidate)] == speeds[fastest], fastest
    # And it asks for fewer of them.
    assert len(found.compiled) < len(answers)
