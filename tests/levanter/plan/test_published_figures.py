"""The calibration, from the kept sums of published shapes: one half gives the constants, the other tests them."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.golden import GOLDEN
from helpers.published_tables import TABLES, assert_table

from levanter.hardware import parse_accelerator
from levanter.hardware.compiler import LAYOUTS, as_values, tuned_options
from levanter.plan.calibration import (
    BEYOND,
    CALIBRATED,
    KERNEL_EFFICIENCY,
    TimeCalibration,
    calibration,
    scale_with_options,
    untested_options_calibration,
)
from levanter.plan.step_time_model import CYCLE_SCALE

pytestmark = pytest.mark.quick

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "published_step_times.py"


def loaded_benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("published_step_times", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


published = loaded_benchmark()
KEPT = published.read()
CASES = {case.config: case for case in published.CASES if case.config in KEPT}


def test_every_shared_scale_has_both_halves():
    assert set(KEPT) <= {case.config for case in published.CASES}
    for generations in published.TOGETHER:
        halves = {c.half for c in CASES.values() if parse_accelerator(c.target).generation.name in generations}
        assert halves == {"calibration", "test"}


def test_the_constants_are_the_fit_of_the_calibration_half():
    assert published.fitted(KEPT) == CYCLE_SCALE


def test_todays_step_would_hardly_be_fitted_otherwise():
    """What has made the step faster since is not fitted away; a step that is further off wants a new calibration."""
    assert published.fitted(KEPT, today=True) == pytest.approx(CYCLE_SCALE, abs=0.03)


@pytest.mark.parametrize(
    "case", [c for c in CASES.values() if KEPT[c.config].options is not None], ids=lambda c: c.config
)
def test_rows_are_compiled_with_what_runs_by_default(case):
    figures, kind = KEPT[case.config], parse_accelerator(case.target).generation.device_kind
    by_default = [as_values(tuned_options("tpu", kind, work="train", layout=layout)) for layout in LAYOUTS]
    assert figures.options in by_default


def test_no_step_that_calibrates_v6e_has_rings():
    """So the scale holds for steps that are compiled without them (`trainer.compiler: tuned`)."""
    calibrating = [KEPT[case.config] for case in CASES.values() if case.half == "calibration" and "v6e" in case.target]
    assert [figures.permutes for figures in calibrating] == [0, 0]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_modelled_speeds_are_near_the_published_ones(case):
    """Within 15 % where runs of that size calibrate the generation; inside the stated range anywhere else."""
    figures = KEPT[case.config]
    time = published.time_of(case, figures)
    if time.calibration.reason:
        assert (
            published.per_chip(case, figures, time.high) <= case.tokens <= published.per_chip(case, figures, time.low)
        )
    else:
        assert abs(published.deviation(case, figures)) <= 0.15
    assert figures.layers_compiled <= 126


# Published over modelled speed of the schedule as the compiler states it: its cycles without a scale, kernels and what
# collectives show. A step that is made slower raises one of these, and has to say so here.
OWN = TABLES["train_high_end"]
SLOW = 1.10
"""Rows whose own cycles are slower than this have their costs named in docs/performance.md."""


def own(case: Any) -> float:
    figures = KEPT[case.config]
    seconds = figures.cycles + figures.kernels_at_peak / KERNEL_EFFICIENCY + figures.exposed
    return case.tokens / published.per_chip(case, figures, seconds)


def test_no_row_is_slower_by_its_own_cycles_than_it_was():
    assert CASES.keys() == OWN.keys()
    assert {name: own(case) for name, case in CASES.items() if own(case) > OWN[name] + 0.005} == {}


@pytest.mark.golden
def test_the_table_of_the_page_is_of_these_figures():
    head = "| config | pod | published tokens/s/chip | MFU | modelled tokens/s/chip | MFU | off | exposed | half |"
    rows = (published.row(case, KEPT[name]) for name, case in CASES.items())
    assert_table("table", [head, "|---" * 9 + "|", *rows])


@pytest.mark.golden
def test_rows_whose_own_cycles_are_slow_name_their_three_largest_costs():
    """In the table of today's compiles, which `test_step_experiments.py` compares with the page, or in an older one."""
    before = TABLES["train_slow_rows_of_before"]
    today = json.loads((GOLDEN / "step_experiments.json").read_text())["compiled"]
    slow = {name: round(own(case), 2) for name, case in CASES.items() if own(case) > SLOW}
    assert slow.keys() == today.keys() | before.keys()
    lines = ["| row | high end over published | matmuls | largest others |", "|---|---|---|---|"]
    for name, row in before.items():
        assert row["high_end"] == slow[name] and len(row["others"]) == 3
        lines.append(f"| {name} | {row['high_end']:.2f} | {row['matmuls']} | {'; '.join(row['others'])} |")
    assert_table("slow rows of before", lines)


# Published over modelled speed of every row that is known, at the scale of its generation, whether its sums are kept
# here or not: those of the preflight specification that was written before.
SEEN = {name: speed / modelled for name, (speed, modelled) in TABLES["train_before"].items()}


def test_a_time_that_nothing_calibrates_has_room_for_every_published_run():
    before = {name: 1 / faster for name, faster in SEEN.items()}
    now = {name: 1 + published.deviation(case, KEPT[name]) for name, case in CASES.items()}
    fastest, slowest = BEYOND
    assert all(fastest < share < slowest for share in (*before.values(), *now.values()))
    # Both ends are one run's: its step was planned with rings of small matmuls, and is planned without them.
    assert min(before, key=lambda name: before[name]) == max(now, key=lambda name: now[name]) == "nanochat_d24_v6e-8"


@pytest.mark.parametrize(
    ("generation", "parameters", "said"),
    [
        ("v5e", 16e9, "not calibrated: no published run on v5e"),
        ("v6e", 0.78e9, "the smallest model with a published speed on v6e has 8 B parameters, this one 0.78 B"),
        ("v5p", 1.4e9, "the smallest model with a published speed on v5p has 6.7 B parameters, this one 1.4 B"),
        ("v4", 405e9, "the largest model with a published speed on v4 has 69 B parameters, this one 405 B"),
    ],
)
def test_what_is_not_calibrated_says_so(generation, parameters, said):
    found = calibration(generation, parameters)
    assert said in found.reason and found.spread == BEYOND


@pytest.mark.parametrize(("generation", "parameters"), [("v4", 7e9), ("v6e", 0.78e9)])
def test_options_that_no_published_row_is_compiled_with_are_outside_of_every_calibration(generation, parameters):
    before = calibration(generation, parameters)
    found = untested_options_calibration(before, generation)
    assert found.spread == BEYOND and found.reason.startswith(before.reason)
    assert "not calibrated for these compiler options" in found.reason
    # Where no scale was fitted, none is lost.
    assert untested_options_calibration(calibration("v5e", 16e9), "v5e") == calibration("v5e", 16e9)


@pytest.mark.parametrize(
    ("generation", "options", "scale"),
    [
        ("v6e", {}, 0.8),
        ("v6e", {"xla_tpu_scoped_vmem_limit_kib": "98304"}, 1.0),
        ("v6e", {"xla_tpu_scoped_vmem_limit_kib": "65536", "xla_other": "98304"}, 0.8),
        ("v6e", {"xla_tpu_scoped_vmem_limit_kib": "-1"}, 0.8),
        ("v5p", {"xla_tpu_scoped_vmem_limit_kib": "98304"}, 0.8),
    ],
)
def test_the_scale_stands_for_vector_memory_that_a_program_may_have(generation, options, scale):
    assert scale_with_options(0.8, generation, options) == scale


def test_8b_with_the_publishers_vector_memory_needs_no_scale():
    """Its step on v6e-256, compiled with 96 MiB (2026-11-22): within 3 % of the published one, with 0.80 not."""
    case = CASES["llama3.1_8b_v6e-256"]
    with_it = replace(KEPT[case.config], cycles=3.2840483394285713, kernels_at_peak=0.47429913355043135)
    time = published.time_of(case, with_it)
    speeds = [published.per_chip(case, with_it, seconds) / case.tokens for seconds in (time.high, time.expected)]
    assert speeds[0] == pytest.approx(1, abs=0.03) and speeds[1] > 1.15


@pytest.mark.parametrize(("generation", "sizes"), CALIBRATED.items())
def test_what_is_calibrated_says_nothing(generation, sizes):
    for parameters in (*sizes, None):
        assert calibration(generation, parameters) == TimeCalibration()
    of_rows = [
        KEPT[case.config].flops_full / KEPT[case.config].tokens / 6
        for case in CASES.values()
        if parse_accelerator(case.target).generation.name == generation
        # Rows of models outside of that size say so.
        and not published.time_of(case, KEPT[case.config]).calibration.reason
    ]
    # A token's FLOPs are six for each parameter and some for attention.
    assert not of_rows or (sizes[0] < 1.25 * min(of_rows) and max(of_rows) < 1.25 * sizes[1])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_our_count_of_flops_is_the_publishers(case):
    """Published MFU over published tokens/s/chip is somebody else's count of a token's FLOPs."""
    figures = KEPT[case.config]
    theirs = case.mfu * parse_accelerator(case.target).peak_flops() / case.tokens
    ours = (figures.flops_full if case.counts == "full" else figures.flops_causal) / figures.tokens
    assert theirs / ours == pytest.approx(1, abs=0.02)


class TestLlama405BOnTrillium:
    """Two recipes of one publisher for one model on one pod; the numbers are of their logs and of their table."""

    def test_the_recipes_logs_count_a_tokens_flops_as_we_do(self):
        figures = KEPT["llama3.1_405b_v6e-256"]
        for tflops, tokens in ((365.740, 139.307), (392.454, 149.482)):
            assert tflops * 1e12 / tokens == pytest.approx(figures.flops_full / figures.tokens, rel=1e-3)

    def test_the_tables_tokens_are_not_those_of_its_utilization(self):
        figures, peak = KEPT["llama3.1_405b_v6e-256"], parse_accelerator("v6e-256").peak_flops()
        of_the_table = [
            0.3855 * peak / (flops / figures.tokens) for flops in (figures.flops_full, figures.flops_causal)
        ]
        assert of_the_table == pytest.approx([134.8, 140.2], abs=0.1)

    def test_tensor_parallelism_costs_what_it_cost_them(self):
        """365.7 TFLOP/s with it, 392.5 (first 400) without; ours with the same constants."""
        with_it, without = "llama3.1_405b_v6e-256", "llama3.1_405b_v6e-256_fsdp"
        speeds = {
            name: published.per_chip(CASES[name], KEPT[name], published.time_of(CASES[name], KEPT[name]).expected)
            for name in (with_it, without)
        }
        assert speeds[with_it] == pytest.approx(139.3, rel=0.1)
        assert speeds[without] == pytest.approx(149.5, rel=0.1)
        assert speeds[with_it] < speeds[without]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_no_modelled_share_of_peak_is_above_one(case):
    figures = KEPT[case.config]
    time = published.time_of(case, figures)
    pod = parse_accelerator(case.target)
    assert figures.flops_causal / (pod.devices * pod.peak_flops() * time.low) <= 1
    assert time.low <= time.expected <= time.high


def test_what_goes_to_host_memory_is_kept_on_the_chip_in_a_shallow_compile():
    policy = {"save_carries": "offload", "save_block_internals": ["gate"], "offload_block_internals": ["query"]}
    assert published.offloads(policy)
    kept = published.on_the_chip(policy)
    assert kept == {"save_carries": True, "save_block_internals": ["gate", "query"], "offload_block_internals": []}
    assert not published.offloads(kept) and not published.offloads(True)
