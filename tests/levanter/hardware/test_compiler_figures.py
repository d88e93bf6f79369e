"""The tuned options, held against what the compiler said of real Programs with and without them."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from levanter.hardware import compiler_options, parse_accelerator
from levanter.hardware.compiler import LAYOUTS, as_values, tuned_options

ROOT = Path(__file__).parents[3]
BENCHMARK = ROOT / "benchmarks" / "compiler_options.py"


def loaded_benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("compiler_options", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


benchmark = loaded_benchmark()
KEPT = benchmark.kept()
CASES = {case.name: case for case in benchmark.CASES}


def default_of(name: str) -> dict[str, str]:
    return compiler_options("tpu", parse_accelerator(CASES[name].target).generation.device_kind)


def test_every_figure_is_of_a_case_and_of_its_options():
    assert KEPT and set(KEPT) <= set(CASES)
    for name, sets in KEPT.items():
        for which, answer in sets.items():
            given = {option: value for each in which.split("+") for option, value in benchmark.SETS[each].items()}
            assert answer.options == {**default_of(name), **given}, (name, which)


@pytest.mark.parametrize("name", KEPT)
def test_what_is_tuned_was_compiled_and_is_no_slower_and_fits(name):
    """With the options that `tuned` gives this run; where it gives nothing new, the default is what runs."""
    case = CASES[name]
    kind = parse_accelerator(case.target).generation.device_kind
    work = "train" if case.entry_point == "train_lm" else "score"
    tuned = as_values(tuned_options("tpu", kind, work=work, layout=case.layout))
    # That is what the run itself comes to.
    assert benchmark.described(case, benchmark.TUNED).program(case.program).compiler_options == tuned
    if tuned == default_of(name):
        return
    before = KEPT[name]["default"]
    (after,) = [answer for answer in KEPT[name].values() if answer.options == tuned]
    assert not after.refused and after.peak_gib * benchmark.GIB <= parse_accelerator(case.target).hbm_bytes
    assert after.seconds <= before.seconds


def test_every_tuned_option_has_a_case():
    """No option for a generation, work and layout of which nothing was compiled."""
    measured = {
        (parse_accelerator(CASES[name].target).generation.device_kind, CASES[name].entry_point, CASES[name].layout)
        for name in KEPT
    }
    for kind in ("TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"):
        for work, entry_point in (("train", "train_lm"), ("score", "eval_lm")):
            for layout in LAYOUTS:
                tuned = as_values(tuned_options("tpu", kind, work=work, layout=layout))
                if tuned != compiler_options("tpu", kind):
                    assert (kind, entry_point, layout) in measured


def test_what_is_tuned_holds_for_runs_that_nobody_tuned_to():
    """Each generation and kind of work with tuned options has a run that they were chosen without (`held_out`)."""
    tuned, held = set(), set()
    for name in KEPT:
        case = CASES[name]
        kind = parse_accelerator(case.target).generation.device_kind
        work = "train" if case.entry_point == "train_lm" else "score"
        options = as_values(tuned_options("tpu", kind, work=work, layout=case.layout))
        if options == default_of(name):
            continue
        (held if case.held_out else tuned).add((kind, work))
    assert tuned and tuned == held


def test_the_table_in_the_documentation_is_of_these_figures():
    shown = (ROOT / "docs" / "performance.md").read_text().split("<!-- compiler options -->")[1].strip().splitlines()
    assert shown == benchmark.table(list(KEPT))


def test_the_figures_name_their_compiler():
    made = json.loads(benchmark.FIGURES.read_text())["made_with"]
    assert set(made) == {"jax", "libtpu"}
