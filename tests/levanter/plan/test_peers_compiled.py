"""The table of MaxText on the same compiler is of the kept figures, and these are of runs that are the same work."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from levanter.hardware import parse_accelerator

ROOT = Path(__file__).parents[3]


def loaded_benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("peers_compiled", ROOT / "benchmarks" / "peers_compiled.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


benchmark = loaded_benchmark()
KEPT = benchmark.kept()
CASES = {case.name: case for case in benchmark.CASES}


def test_the_table_in_the_documentation_is_of_these_figures():
    shown = (ROOT / "docs" / "performance.md").read_text().split("<!-- peers -->")[1].strip().splitlines()
    assert shown == benchmark.table()


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_adds_up(name):
    case = CASES[name]
    pod = parse_accelerator(case.target)
    clock = pod.generation.clock_hz
    assert clock is not None
    for side, answer in KEPT[name].items():
        assert side in (*case.theirs, benchmark.OURS)
        assert answer.seconds == pytest.approx(answer.cycles / clock + answer.kernels + answer.exposed)
        assert 0 < answer.matmuls < answer.cycles and answer.heap_bytes < pod.hbm_bytes
        # Both sides gather the 16-bit parameters once forward and once backward at least.
        gathered = sum(nbytes for what, nbytes in answer.collectives.items() if what.startswith("all-gather"))
        assert gathered > 0 and set(answer.options) >= set(case.theirs.get(side, case.theirs[min(case.theirs)]).options)


def test_the_line_of_ours_says_how_it_compares():
    case = CASES[next(iter(KEPT))]
    (best,) = [answer for side, answer in KEPT[case.name].items() if side != benchmark.OURS]
    row = next(line for line in benchmark.table() if f"{case.target} | ours" in line)
    ours = KEPT[case.name][benchmark.OURS]
    assert f"({ours.cycles / best.cycles:.3f} ×)" in row and f"({ours.heap_bytes / best.heap_bytes:.3f} ×)" in row
