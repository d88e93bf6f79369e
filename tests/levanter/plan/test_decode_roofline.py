"""What a verdict says of a run that generates text: rates from times by hand, what binds, and what would fit."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.golden import assert_golden
from helpers.seventy_rows import HEAD, LAYERS, SEVENTY
from helpers.verdicts import compiled, fitting_verdict, loading, tiny_budget, tiny_plan

from levanter.hardware import parse_accelerator
from levanter.html.format import columns
from levanter.plan.aot import Compiled
from levanter.plan.calibration import TimeCalibration, decode_calibration
from levanter.plan.decode_roofline import serving_report
from levanter.plan.job_cost import token_price
from levanter.plan.oom_report import advise_on_slots, format_slot_advice
from levanter.plan.preflight.cost import with_program_calibration
from levanter.plan.report import render, to_html, to_json
from levanter.plan.report.serving import as_text, serving_sheets
from levanter.plan.report.text_table import WIDTH
from levanter.plan.step_time_model import LinkUse, StepTime
from levanter.plan.target_from_name import pod_target
from levanter.plan.verdict import ProgramVerdict, Verdict

pytestmark = pytest.mark.quick

V5E = parse_accelerator("v5e-8")
GIB = 1 << 30
DECODE, LONG, SHORT = 0.040, 0.090, 0.070
"""Seconds of a step, and of the calls for 512 and 4 × 128 tokens of prompts."""


def program(name: str, seconds: float) -> ProgramVerdict:
    """A Program that was compiled, with a time by hand: a quarter of it links that nothing hides."""
    link = LinkUse(over="model", network="ici", busy=seconds / 4, exposed=seconds / 4, total_bytes=1 << 20)
    time = StepTime(cycles=0.75 * seconds, kernels_at_peak=0.0, kernels_expected=0.0, memory=seconds / 2, links=(link,))
    outcome = replace(compiled(tiny_budget(tiny_plan())), name=name)
    return ProgramVerdict(name=name, outcome=outcome, time=time)


def verdict(*, served=SEVENTY, compiled: bool = True, **changes: Any) -> Verdict:
    """Eight chips of v5e with rows of text."""
    times = {"decode_46": DECODE, "prefill_1x512": LONG, "prefill_4x128": SHORT}
    programs = tuple(program(name, seconds) for name, seconds in times.items())
    if not compiled:
        programs = tuple(ProgramVerdict(name=name, outcome=None) for name in times)
    plan = tiny_plan(
        entry_point="serve",
        target=pod_target(V5E),
        work=SimpleNamespace(serving=served),
        computing=tuple(SimpleNamespace(name=name) for name in times),
    )
    made = fitting_verdict(plan=tiny_plan())
    budget = replace(tiny_budget(tiny_plan()), hbm_bytes=V5E.hbm_bytes)
    return replace(
        made, plan=plan, accelerator=V5E, target="v5e-8", programs=programs, budget=budget, load=loading(), **changes
    )


def test_rates_by_hand():
    found = serving_report(verdict(served=SEVENTY))
    assert found is not None
    assert [load.rows for load in found.loads] == [1, 8, 32, 46]
    for load in found.loads:
        assert load.time == pytest.approx((DECODE * 0.75, DECODE, DECODE))
        assert load.rate == pytest.approx(load.rows / DECODE / 8)
        assert load.share == pytest.approx(load.floor.seconds / DECODE)
        # Eight chips for an hour, over the tokens of that hour.
        price = token_price(load, 1.2).expected
        assert price == pytest.approx(1.2 * 8 / (load.rows / DECODE * 3600) * 1e6)
    assert [load.floor.binds for load in found.loads] == ["weights"] * 4
    assert found.loads[2].share == pytest.approx(17.2 / 40, abs=0.005)


def test_generating_on_v6e_has_a_scale_of_its_own():
    """Fitted to published loads; elsewhere, and in runs that generate nothing, what train steps have stays."""
    time, plan = StepTime(cycles=1.0, kernels_at_peak=0.0, kernels_expected=0.0, memory=0.0, links=()), verdict().plan
    on_v6e = with_program_calibration(replace(time, cycle_scale=0.8), plan, "decode_46", "v6e")
    assert on_v6e.expected == pytest.approx(0.85) and on_v6e.calibration == decode_calibration(TimeCalibration(), "v6e")
    assert (on_v6e.low, on_v6e.high) == pytest.approx((0.7 * 0.85, 1.3 * 0.85))
    step = (SimpleNamespace(name="step", compiler_options={}),)
    assert (
        with_program_calibration(replace(time, cycle_scale=0.8), tiny_plan(computing=step), "step", "v6e").cycle_scale
        == 0.8
    )
    served = tiny_plan(computing=step, work=plan.work)
    assert with_program_calibration(time, served, "step", "v5p").cycle_scale == 1.0


def test_steps_of_a_call_share_its_time():
    four = serving_report(verdict(served=replace(SEVENTY, steps=4)))
    assert four is not None and four.loads[0].time is not None
    assert four.loads[0].time[1] == pytest.approx(DECODE / 4)


def test_time_to_the_first_token():
    found = serving_report(verdict())
    assert found is not None
    assert {call.name: call.time and call.time[1] for call in found.buckets} == pytest.approx(
        {"prefill_1x512": LONG, "prefill_4x128": SHORT}
    )
    short, middle, long = found.prompts
    assert (short.tokens, middle.tokens, long.tokens) == (128, 2048, 8192)
    assert short.time is not None and short.time[1] == pytest.approx(SHORT)
    assert middle.time is not None and middle.time[1] == pytest.approx(4 * LONG)
    assert long.time is not None and long.time[1] == pytest.approx(16 * LONG)
    assert long.calls == {"prefill_1x512": 16} and long.floor is not None
    assert long.floor.flops == pytest.approx(0.77, abs=0.02)


def test_rows_that_fit_leave_what_the_compiler_says_that_programs_make():
    found = serving_report(verdict())
    assert found is not None and found.memory.compiled
    # 4 GiB at the peak beyond the inputs, of which 4 KiB are padding of these; a row of 8,192 positions is 0.1587 GiB,
    # in bfloat16 0.3125.
    assert found.memory.temporaries == 4 * GIB - 4096
    free = 15.75 - 4 - SEVENTY.weights.total / GIB
    assert found.contexts["int8"]["8K"] == int(free / 0.15869)
    in_bfloat16 = {f"{k}K": int(free / (0.3125 * k / 8)) for k in (2, 8, 32, 128)}
    assert found.contexts["bfloat16"] == in_bfloat16
    assert found.memory.free == V5E.hbm_bytes - SEVENTY.weights.total - SEVENTY.cache_bytes - 4 * GIB + 4096


def test_the_program_that_makes_the_cache_is_not_beside_it():
    """It has the whole cache for a result; the room is that of the calls that find it there."""
    one = verdict()
    start = program("start_rows", 0.001)
    assert isinstance(start.outcome, Compiled)
    memory = replace(start.outcome.memory, peak=start.outcome.memory.argument + 7 * GIB)
    start = replace(start, outcome=replace(start.outcome, memory=memory))
    assert one.plan is not None
    plan = replace(one.plan, computing=(SimpleNamespace(name="start_rows"), *one.plan.computing))
    with_start = serving_report(replace(one, plan=plan, programs=(start, *one.programs)))
    assert with_start is not None and with_start.memory.temporaries == 4 * GIB - 4096


def test_without_a_compiler_there_are_floors_and_no_times():
    found = serving_report(verdict(compiled=False))
    assert found is not None and not found.memory.compiled
    assert all(load.time is None and load.share is None for load in found.loads)
    assert found.loads[2].rate == pytest.approx(32 / 17.2e-3 / 8, rel=0.01)
    text = "\n".join(as_text(serving_sheets(verdict(compiled=False))))
    assert "≤ 232" in text or "≤ 233" in text


def test_a_run_that_generates_no_text_has_no_such_part():
    assert serving_report(fitting_verdict()) is None
    assert serving_sheets(fitting_verdict()) == ()
    assert to_json([fitting_verdict()])["verdicts"][0]["serving"] is None
    assert advise_on_slots(tiny_plan()) == []


@pytest.mark.golden
def test_golden_text():
    shown = "\n".join(as_text(serving_sheets(verdict(served=SEVENTY))))
    assert_golden("report/serving.txt", shown + "\n")
    assert max(columns(line) for line in shown.splitlines()) <= WIDTH


def test_all_forms_have_it():
    one = verdict()
    assert "decoding, by running rows" in render([one])
    assert "Decoding, by running rows" in to_html([one])
    values = to_json([one])["verdicts"][0]["serving"]
    json.dumps(values, allow_nan=False)
    assert values["decode"][2]["tokens_per_second_per_chip"] == pytest.approx(32 / DECODE / 8)
    assert values["decode"][2]["floor"]["binds"] == "weights"
    assert set(values) == {
        *("rows", "rows_automatic", "max_seq_len", "cache_dtype", "bytes", "rows_by_context", "prefill"),
        *("time_to_first_token", "decode", "compute_bound_rows", "start"),
    }
    assert values["start"]["compile_seconds"]["decode_46"] == pytest.approx(13.75)


def test_heads_that_are_cut_further_repeat_the_cache():
    wide = replace(SEVENTY, devices=16, repeated=2)
    text = "\n".join(as_text(serving_sheets(verdict(served=wide))))
    assert f"repeated 2× over group: {SEVENTY.cache_bytes / 2 / GIB:.2f} GiB" in text


def test_rows_that_fit_leave_what_programs_were_compiled_to_take():
    """The assumption before a compiler was asked is not what is left free after it."""
    served = replace(SEVENTY, rows=64, temp_bytes=0)
    one = verdict(served=served)
    outcome = one.programs[0].outcome
    assert one.plan is not None and isinstance(outcome, Compiled)
    temporaries = outcome.peak_bytes - outcome.memory.argument
    assert temporaries > GIB
    free = V5E.hbm_bytes - served.weights.total - temporaries
    (advice,) = advise_on_slots(one.plan, V5E, [outcome])
    assert advice.startswith(f"{free // (LAYERS * 2 * 8192 * (HEAD + 2))} rows of 8,192 positions fit, 64 asked")
    (assumed,) = advise_on_slots(one.plan, V5E)
    assert assumed.startswith("46 rows") and assumed != advice


class TestTooManyRows:
    ASKED = replace(SEVENTY, rows=64, dtype="bfloat16", temp_bytes=0)

    def test_int8_and_a_shorter_context_and_a_larger_pod(self):
        said = format_slot_advice(replace(self.ASKED, rows=40), V5E.hbm_bytes, V5E)
        assert said.startswith("23 rows of 8,192 positions fit, 40 asked: inference.max_rows: 23 (or auto)")
        assert "inference.cache_dtype: int8, 46 rows" in said
        assert "inference.max_seq_len: 4096, 47 rows" in said
        # Half of the weights a chip, and a row as large as on eight chips: its heads are not cut further.
        assert "v5litepod-32 with model 8 × group 4" in said or "v5litepod-16 with model 8 × group 2" in said

    def test_what_is_too_little_says_so(self):
        said = format_slot_advice(self.ASKED, V5E.hbm_bytes, V5E)
        assert "inference.cache_dtype: int8, 46 rows only" in said

    def test_int8_asked_for_64(self):
        said = format_slot_advice(replace(SEVENTY, rows=64, temp_bytes=0), V5E.hbm_bytes, V5E)
        assert said.startswith("46 rows of 8,192 positions fit, 64 asked")
        # 4.17 GiB of weights a chip, so that 11.58 are left for rows of 162.5 MiB.
        assert "v5litepod-16 with model 8 × group 2, 72 rows of 162.50 MiB a chip" in said

    def test_query_heads_that_cannot_be_cut_further_name_no_pod(self):
        said = format_slot_advice(replace(SEVENTY, rows=64, query_groups=1, temp_bytes=0), V5E.hbm_bytes, V5E)
        assert "group" not in said and "inference.max_seq_len: 4096" in said

    def test_weights_in_bfloat16_are_told_of_int8(self):
        held = SEVENTY.weights
        plain = replace(
            SEVENTY, weights=replace(held, integers=0, scales=0, others=2 * held.integers), rows=40, temp_bytes=0
        )
        # Nothing fits with 16.4 GiB of weights.
        said = format_slot_advice(plain, V5E.hbm_bytes, V5E)
        assert said.startswith("0 rows") and "quantize: int8, 46 rows" in said
