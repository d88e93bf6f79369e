"""The cost of five runs, each number repeated by hand from shapes and kept step times.

`tests/golden/before_you_pay/compiled.json` has the times that the compiled Programs of each run once had, low, expected
and high, and the seconds of compiling them. Everything else is arithmetic on this page: it uses no code of `levanter`.
"""

import json
import math
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
from helpers.golden import GOLDEN, assert_golden, assert_golden_json
from helpers.plan_cases import CASES, Case

from haliax_ext.hlo import MemoryFigures
from levanter.plan.aot import Compiled
from levanter.plan.calibration import TimeCalibration
from levanter.plan.report import to_json
from levanter.plan.report.before_you_pay import cost_lines, cost_rows, cost_values
from levanter.plan.step_time_model import StepTime
from levanter.plan.verdict import ProgramVerdict, Verdict
from levanter.runplan import PlanOptions

FOLDER = GOLDEN / "before_you_pay"
TIMES: dict[str, Any] = json.loads((FOLDER / "compiled.json").read_text(encoding="utf-8"))
RUNS = {
    "llama3_8b_v5p-8": Case(
        name="llama3_8b_v5p-8",
        entry_point="train_lm",
        config="train/llama3_8b_v6e-128",
        target="v5p-8",
        overrides=("--trainer.train_batch_size=16",),
    ),
    # Two rows of 8,192 tokens a chip, one at a time, everything recomputed.
    "llama3.1_70b_2xv6e-256": Case(
        name="llama3.1_70b_2xv6e-256",
        entry_point="train_lm",
        config="train/published/llama3.1_70b_v6e-256",
        target="2xv6e-256",
        overrides=(
            "--trainer.train_batch_size=1024",
            "--model.gradient_checkpointing=true",
            "--trainer.per_device_parallelism=1",
        ),
    ),
    "dpo_llama3_8b_v5p-8": CASES["dpo_llama3_8b_v5p-8"],
    "lora_llama3_8b_v5p-8": CASES["lora_llama3_8b_v5p-8"],
    "serve_llama3.1_70b_int8_v5e-8": Case(
        name="serve_llama3.1_70b_int8_v5e-8",
        entry_point="serve",
        config="serve/llama3.1_70b_int8",
        target="v5e-8",
    ),
}
PRICES = PlanOptions(price={"v5p": 4.0, "v5p:spot": 1.5, "v6e": 3.0, "v5e": 1.0})
"""Made-up numbers."""
NOTHING = MemoryFigures(argument=0, output=0, alias=0, temp=0, generated_code=0, peak=0)
# Llama 3.1 8B: 32 layers of q and o, k and v, the MLP and two norms; embedding and head; the last norm.
PARAMETERS_8B = 32 * (2 * 4096**2 + 2 * 1024 * 4096 + 3 * 14336 * 4096 + 2 * 4096) + 2 * 128256 * 4096 + 4096
# 80 layers of twice the width, and a vocabulary of the same size.
PARAMETERS_70B = 80 * (2 * 8192**2 + 2 * 1024 * 8192 + 3 * 28672 * 8192 + 2 * 8192) + 2 * 128256 * 8192 + 8192
# Rank 16: a factor for the inputs and one for the outputs of q and o, k and v, and the three matrices of the MLP.
FACTORS_8B = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
COUNTERS = 4 + 8 + 4 + 4
"""Bytes of the step, the key, and the counters of Adam and of its schedule."""


@cache
def described(name: str) -> Verdict:
    return RUNS[name].verdict(compiled=False)


def verdict_of(name: str, options: PlanOptions = PRICES) -> Verdict:
    """The verdict with the kept times instead of a compiler's answers."""
    verdict = described(name)
    programs = tuple(_timed(program, verdict, TIMES[name].get(program.name)) for program in verdict.programs)
    return replace(verdict, programs=programs, options=options)


def _timed(program: ProgramVerdict, verdict: Verdict, kept: dict[str, Any] | None) -> ProgramVerdict:
    if kept is None:
        return program
    low, expected, high = kept["seconds"]
    assert verdict.plan is not None
    time = StepTime(
        cycles=0.0,
        kernels_at_peak=low,
        kernels_expected=expected,
        memory=0.0,
        links=(),
        calibration=TimeCalibration(spread=(1.0, high / expected)),
    )
    outcome = Compiled(
        name=program.name,
        mesh=verdict.plan.mesh,
        memory=NOTHING,
        figures=None,
        text_error=None,
        coordinates=None,
        lower_seconds=0.0,
        compile_seconds=kept["compile_seconds"],
    )
    return replace(program, time=time, outcome=outcome)


def span(value: Any) -> list[float]:
    """The three numbers of a span."""
    return [value["low"], value["expected"], value["high"]]


def close(values: list[float]) -> Any:
    return pytest.approx(values, rel=1e-9)


@pytest.mark.golden
@pytest.mark.parametrize("name", RUNS)
def test_golden(name):
    values = cost_values(verdict_of(name))
    assert values is not None
    assert_golden_json(f"before_you_pay/{name}.json", {"command": RUNS[name].command, **values})


@pytest.mark.golden
def test_golden_text():
    assert_golden("before_you_pay/llama3_8b_v5p-8.txt", "\n".join(cost_lines(verdict_of("llama3_8b_v5p-8"))))


def test_parameters_are_those_of_the_published_model():
    assert PARAMETERS_8B == 8_030_261_248
    assert PARAMETERS_70B == 70_553_706_496
    assert FACTORS_8B == 41_943_040


class ByHand:
    """A training run on one page: every name is a number of the run."""

    def __init__(
        self,
        *,
        name: str,
        steps: int,
        tokens: int,
        checkpoint: int,
        permanent: int,
        chips: int,
        hosts: int,
        link: float,
        loaded: int = 0,
        reread: int = 0,
        restored: float | None = None,
        exports: int = 0,
        exported: int = 0,
    ):
        kept = TIMES[name]["train_step"]
        compiling = kept["compile_seconds"]
        work = [steps * seconds for seconds in kept["seconds"]]
        a_host = checkpoint / hosts
        # Published rates of one host, and the assumed one, from fast to slow.
        rates = [9.3e9, 2e9, 0.16e9]
        writing, loading = [a_host / rate for rate in rates], [loaded / rate for rate in rates]
        # A save every 15 minutes, and the last one.
        between = min(900.0, work[1])
        count = permanent + math.floor(work[1] / 900)
        copy = a_host / (link * chips / hosts)
        blocked = [copy, copy, 2 * copy]
        assert max(writing) < between
        # Everything is saved before an export, which one host writes.
        exporting = [exports * (seconds + exported / rate) for seconds, rate in zip(writing, rates, strict=True)]
        again = reread + (a_host if restored is None else restored)
        restart = [compiling + again / rate for rate in rates]
        # 419 interruptions in 54 days of 16,384 devices.
        rate = 419 / 54 / 16384 * chips / 86400
        lost = [0, between / 2, between]
        stretch = [1.0, 1 / (1 - rate * (lost[1] + restart[1])), 1 / (1 - rate * (lost[2] + restart[2]))]
        self.total = [
            compiling + loading[n] + (work[n] + count * blocked[n] + exporting[n]) * stretch[n] + writing[n]
            for n in range(3)
        ]
        same = [
            compiling + loading[n] + (work[1] + count * blocked[n] + exporting[n]) * stretch[n] + writing[n]
            for n in range(3)
        ]
        self.work, self.writing, self.blocked, self.restart, self.lost = work, writing, blocked, restart, lost
        self.count, self.per_day = count, rate * 86400
        # A pod is interrupted between its start and the write at the end.
        self.stops = rate * (work[1] + count * blocked[1] + exporting[1]) * stretch[1]
        self.goodput = [work[1] / seconds for seconds in reversed(same)]
        self.chip_hours = [seconds * chips / 3600 for seconds in self.total]
        self.share = [
            count * blocked[0] / (count * blocked[0] + work[2]),
            count * blocked[1] / (count * blocked[1] + work[1]),
            count * blocked[2] / (count * blocked[2] + work[0]),
        ]
        self.tokens_per_second = [tokens / seconds for seconds in reversed(kept["seconds"])]
        self.exporting = [exports and seconds / exports for seconds in exporting]
        self.end = (permanent + 1) * checkpoint + exports * exported
        self.most = self.end + checkpoint
        self.read = loaded * hosts + 4 * tokens * steps + self.stops * again * hosts

    def check(self, values: dict[str, Any], prices: dict[str, float]) -> None:
        assert span(values["work_seconds"]) == close(self.work)
        assert span(values["total_seconds"]) == close(self.total)
        assert span(values["chip_hours"]) == close(self.chip_hours)
        assert set(values["dollars"]) == set(prices)
        for kind, price in prices.items():
            assert span(values["dollars"][kind]) == close([price * hours for hours in self.chip_hours])
        saves, stops, storage = values["saves"], values["interruptions"], values["storage"]
        assert saves["count"] == self.count
        assert span(saves["writing_seconds"]) == close(self.writing)
        assert span(saves["blocked_seconds"]) == close(self.blocked)
        assert span(saves["share"]) == close(self.share)
        assert stops["per_day"] == pytest.approx(self.per_day) and stops["assumed"]
        assert stops["count"] == pytest.approx(self.stops)
        assert span(stops["lost_seconds"]) == close(self.lost)
        assert span(stops["restart_seconds"]) == close(self.restart)
        assert span(stops["goodput"]) == close(self.goodput)
        assert span(values["input_tokens_per_second"]) == close(self.tokens_per_second)
        assert (storage["end_bytes"], storage["most_bytes"]) == (self.end, self.most)
        assert storage["read_bytes"] == pytest.approx(self.read)


def test_8b_from_scratch():
    values = cost_values(verdict_of("llama3_8b_v5p-8"))
    assert values is not None
    checkpoint = 12 * PARAMETERS_8B + COUNTERS
    hand = ByHand(
        name="llama3_8b_v5p-8",
        steps=100_000,
        tokens=16 * 4096,
        checkpoint=checkpoint,
        # One every 10,000 steps, the last of them at the end.
        permanent=10,
        chips=4,
        hosts=1,
        link=15e9,
    )
    hand.check(values, {"any": 4.0, "spot": 1.5})
    assert values["host_bytes"] == {"saving": checkpoint}
    # v5p: 448 GB on a host of four chips.
    assert values["host_limit_bytes"] == 448_000_000_000


def test_exports_of_8b():
    """An export in 16 bits every 10,000 steps: bytes from shapes, and the loop waits for the checkpoint before it."""
    case = RUNS["llama3_8b_v5p-8"]
    written = ("--hf_save_path=exports", "--hf_save_dtype=bfloat16")
    plan = replace(case, overrides=(*case.overrides, *written)).verdict(compiled=False).plan
    assert plan is not None
    verdict = replace(verdict_of("llama3_8b_v5p-8"), plan=plan)
    values = cost_values(verdict)
    assert values is not None
    hand = ByHand(
        name="llama3_8b_v5p-8",
        steps=100_000,
        tokens=16 * 4096,
        checkpoint=12 * PARAMETERS_8B + COUNTERS,
        permanent=10,
        chips=4,
        hosts=1,
        link=15e9,
        exports=10,
        exported=2 * PARAMETERS_8B,
    )
    hand.check(values, {"any": 4.0, "spot": 1.5})
    assert (values["exports"]["count"], values["exports"]["bytes"]) == (10, 2 * PARAMETERS_8B)
    assert span(values["exports"]["seconds"]) == close(hand.exporting)
    assert rows_of(verdict)["an export"][0] == "14.96 GiB"


def test_exports_of_adapters_and_of_the_model_with_them():
    case = RUNS["lora_llama3_8b_v5p-8"]

    def exported(*words: str) -> int:
        plan = replace(case, overrides=(*case.overrides, *words)).verdict(compiled=False).plan
        assert plan is not None and plan.job is not None
        return plan.job.export_bytes

    # Factors are trained and exported as float32; the base has the 16 bits of its files.
    assert exported("--peft_save_path=adapters") == 4 * FACTORS_8B
    merged = ("--peft_save_path=adapters", "--merged_hf_save_path=merged")
    assert exported(*merged) == 4 * FACTORS_8B + 2 * PARAMETERS_8B


def test_adapters():
    values = cost_values(verdict_of("lora_llama3_8b_v5p-8"))
    assert values is not None
    base = 2 * PARAMETERS_8B
    hand = ByHand(
        name="lora_llama3_8b_v5p-8",
        steps=1000,
        tokens=16 * 4096,
        checkpoint=12 * FACTORS_8B + COUNTERS,
        permanent=1,
        chips=4,
        hosts=1,
        link=15e9,
        loaded=base,
        reread=base,
    )
    hand.check(values, {"any": 4.0, "spot": 1.5})


def test_70b_on_two_slices():
    values = cost_values(verdict_of("llama3.1_70b_2xv6e-256"))
    assert values is not None
    checkpoint = 12 * PARAMETERS_70B + COUNTERS
    hand = ByHand(
        name="llama3.1_70b_2xv6e-256",
        steps=100_000,
        tokens=1024 * 8192,
        checkpoint=checkpoint,
        permanent=10,
        chips=512,
        hosts=128,
        link=15e9,
        # Each slice has the whole state: a host reads the parts of its four chips, of the 256 of its slice.
        restored=4 * (12 * PARAMETERS_70B / 256 + COUNTERS),
    )
    hand.check(values, {"any": 3.0})
    assert values["host_bytes"]["saving"] == checkpoint / 128
    assert round(hand.stops) == 6


def test_preferences_read_two_models():
    """The policy begins as 16 bits and is saved as 12 bytes a parameter; the reference is read again at every start."""
    values = cost_values(verdict_of("dpo_llama3_8b_v5p-8"))
    assert values is not None
    checkpoint = 12 * PARAMETERS_8B + COUNTERS
    hand = ByHand(
        name="dpo_llama3_8b_v5p-8",
        steps=1000,
        # Pairs of two sequences.
        tokens=32 * 2 * 2048,
        checkpoint=checkpoint,
        permanent=1,
        chips=4,
        hosts=1,
        link=15e9,
        loaded=2 * 2 * PARAMETERS_8B,
        reread=2 * PARAMETERS_8B,
    )
    hand.check(values, {"any": 4.0, "spot": 1.5})


def test_a_server_costs_dollars_for_a_million_tokens():
    values = cost_values(verdict_of("serve_llama3.1_70b_int8_v5e-8"))
    assert values is not None
    assert values["total_seconds"] is None and values["dollars"] == {} and values["saves"] is None
    # Eight chips at a dollar. A call makes one token of each row.
    assert values["dollars_per_hour"] == {"any": 8.0}
    seconds = TIMES["serve_llama3.1_70b_int8_v5e-8"]["decode_44"]["seconds"]
    for load in values["dollars_per_million_tokens"]:
        assert span(load["any"]) == close([8 / 3600 * second / load["rows"] * 1e6 for second in seconds])
    assert [load["rows"] for load in values["dollars_per_million_tokens"]] == [1, 8, 32, 44]
    # Weights are read as stored, in 16 bits.
    assert span(values["loading_seconds"]) == close([2 * PARAMETERS_70B / rate for rate in (9.3e9, 2e9, 0.16e9)])
    compiled = [program["compile_seconds"] for program in TIMES["serve_llama3.1_70b_int8_v5e-8"].values()]
    assert span(values["compile_seconds"]) == close([max(compiled), sum(compiled), sum(compiled)])
    rows = rows_of(verdict_of("serve_llama3.1_70b_int8_v5e-8"))
    assert rows["dollars an hour"][0] == "$8.00" and "total time" not in rows
    assert rows["10⁶ tokens, 44 rows"][0].startswith("$2.31")
    # Without a compiler only a lower bound of the time is known.
    plain = replace(described("serve_llama3.1_70b_int8_v5e-8"), options=PRICES)
    assert rows_of(plain)["10⁶ tokens, 44 rows"][0].startswith("at least $")


def rows_of(verdict: Verdict) -> dict[str, tuple[str, str]]:
    return {row.name: (row.value, row.reason) for row in cost_rows(verdict)}


def test_stated_rates_replace_the_assumed_ones():
    options = PlanOptions(
        chip_hour_price=2.0,
        interruptions_per_day=3.0,
        restart_wait=timedelta(minutes=10),
        store_rate=4.0,
        storage_price=0.02,
        egress_price=0.1,
    )
    values = cost_values(verdict_of("llama3_8b_v5p-8", options))
    assert values is not None
    checkpoint = 12 * PARAMETERS_8B + COUNTERS
    seconds = checkpoint / 4e9
    assert span(values["saves"]["writing_seconds"]) == close([seconds] * 3)
    compiling = TIMES["llama3_8b_v5p-8"]["train_step"]["compile_seconds"]
    assert span(values["interruptions"]["restart_seconds"]) == close([600 + compiling + seconds] * 3)
    assert (values["interruptions"]["per_day"], values["interruptions"]["assumed"]) == (3.0, False)
    assert span(values["dollars"]["any"]) == close([2 * hours for hours in span(values["chip_hours"])])
    rows = rows_of(verdict_of("llama3_8b_v5p-8", options))
    # 11 checkpoints of 96.4 GB at two cents.
    assert "; $21.2 a month (your price)" in rows["storage"][1]
    assert f"; ${values['storage']['read_bytes'] / 1e10:,.0f} (your price)" in rows["read from storage"][1]


def test_no_interruption_and_too_many():
    calm = cost_values(verdict_of("llama3_8b_v5p-8", PlanOptions(interruptions_per_day=0)))
    assert calm is not None and calm["interruptions"]["count"] == 0
    # One a minute: no step is ever saved. The total has no end, and neither have the dollars.
    options = PlanOptions(interruptions_per_day=1440, chip_hour_price=1.0)
    rows = rows_of(verdict_of("llama3_8b_v5p-8", options))
    assert rows["total time"][0] == "without end"
    assert "∞" in rows["dollars"][0] and "nan" not in str(rows)
    values = to_json([verdict_of("llama3_8b_v5p-8", options)])["verdicts"][0]["cost"]
    assert values["total_seconds"]["expected"] is None
    assert values["interruptions"]["goodput"]["expected"] == 0


def test_a_save_that_is_slower_than_the_time_between_two_blocks():
    """0.05 GB/s: 96.4 GB take 1,927 s, and the next save waits for all but 900 s of them."""
    values = cost_values(verdict_of("llama3_8b_v5p-8", PlanOptions(store_rate=0.05)))
    assert values is not None
    checkpoint = 12 * PARAMETERS_8B + COUNTERS
    wait = checkpoint / 5e7 - 900
    copy = checkpoint / 60e9
    assert span(values["saves"]["blocked_seconds"]) == close([copy + wait, copy + wait, 2 * copy + wait])
    reason = rows_of(verdict_of("llama3_8b_v5p-8", PlanOptions(store_rate=0.05)))["writing one"][1]
    assert "Save less often" in reason


def test_waiting_for_a_pod_is_no_time_in_which_it_stops():
    """Once a day, and a day of waiting: the rest takes twice as long."""
    waits = {}
    for days in (0, 1):
        options = PlanOptions(interruptions_per_day=1.0, restart_wait=timedelta(days=days))
        values = cost_values(verdict_of("llama3_8b_v5p-8", options))
        assert values is not None
        waits[days] = values
    around = waits[0]["compile_seconds"]["expected"] + waits[0]["saves"]["writing_seconds"]["expected"]
    without, with_wait = (waits[days]["total_seconds"]["expected"] - around for days in (0, 1))
    assert with_wait == pytest.approx(2 * without)
    assert waits[0]["interruptions"]["count"] == pytest.approx(waits[1]["interruptions"]["count"])


def test_a_single_save_waits_for_no_other():
    verdict = verdict_of("lora_llama3_8b_v5p-8", PlanOptions(store_rate=1e-6))
    assert verdict.plan is not None and verdict.plan.job is not None
    job = replace(verdict.plan.job, save_seconds=None)
    verdict = replace(verdict, plan=replace(verdict.plan, job=job))
    values = cost_values(verdict)
    assert values is not None and values["saves"]["count"] == 1
    copy = (12 * FACTORS_8B + COUNTERS) / 60e9
    assert span(values["saves"]["blocked_seconds"]) == close([copy, copy, 2 * copy])
    assert "Save less often" not in rows_of(verdict)["writing one"][1]


def test_without_a_compiler_hours_are_unknown_and_bytes_are_not():
    rows = rows_of(described("llama3_8b_v5p-8"))
    assert rows["total time"] == ("unknown", "no step time is modelled")
    assert rows["first compilation"][0] == "unknown"
    assert rows["a checkpoint"][0] == "89.75 GiB"


def test_a_run_that_does_not_fit_costs_nothing():
    assert cost_values(replace(verdict_of("llama3_8b_v5p-8"), exit_code=3)) is None
    assert cost_lines(replace(verdict_of("llama3_8b_v5p-8"), accelerator=None)) == []


def test_prices_of_other_generations_are_not_taken():
    options = PlanOptions(price={"v6e": 3.0})
    assert rows_of(verdict_of("llama3_8b_v5p-8", options))["dollars"] == (
        "unknown",
        "no price is known: --price v5p=DOLLARS, for a chip-hour",
    )


def test_unknown_executions_and_default_steps_are_named():
    verdict = verdict_of("llama3_8b_v5p-8")
    step = next(program for program in verdict.programs if program.name == "train_step")
    plan = verdict.plan
    assert step.workload is not None and plan is not None and plan.job is not None
    scored = replace(step, name="evaluate", workload=replace(step.workload, executions=None))
    job = replace(plan.job, default_steps=True)
    verdict = replace(verdict, programs=(*verdict.programs, scored), plan=replace(plan, job=job))
    reason = rows_of(verdict)["total time"][1]
    assert "without evaluate, executed an unknown number of times" in reason
    assert "trainer.num_train_steps is not set: 100,000 is the default" in reason
    alone = replace(verdict, programs=(scored,))
    assert rows_of(alone)["total time"] == ("unknown", "the number of executions of evaluate is unknown")
