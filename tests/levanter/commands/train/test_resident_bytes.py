"""What stays on a device beside a Program of a training run, by hand."""

import dataclasses

import pytest
from helpers.plan_cases import CASES

from haliax_ext.hlo import MemoryFigures
from levanter.plan.aot import Compiled
from levanter.plan.compile_selection import exceeds_hbm, format_hbm_error
from levanter.plan.target_from_name import pod_target

GIB = 1 << 30


@pytest.fixture(scope="module")
def plan():
    """Llama 2 7B, f32 with two moments, that is evaluated and exported."""
    source = "{type: url, train_urls: ['s3://b/t.jsonl'], validation_urls: ['s3://b/v.jsonl']}"
    words = ("--hf_save_path=/nowhere/hf", f"--data.components={{web: {{source: {source}}}}}")
    case = CASES["llama2_7b_v4-32"]
    case = dataclasses.replace(case, overrides=(*case.overrides, *words))
    return case.describe(pod_target(case.target))


def test_moments_stay_while_parameters_are_evaluated(plan):
    state = plan.sharding.bytes_per_device
    # Parameters and two moments: two thirds are none of the evaluation's inputs.
    assert plan.coresident_bytes["evaluate"] == pytest.approx(state * 2 / 3, rel=1e-3)
    assert "train_step" not in plan.coresident_bytes and "init_state" not in plan.coresident_bytes


def test_all_but_one_array_stays_while_it_is_exported(plan):
    state = plan.sharding.bytes_per_device
    taken = [name for name in plan.coresident_bytes if name.startswith("save.")]
    assert taken and {program.name for program in plan.saving} == set(taken)
    gate = 32 * 4096 * 11008 * 4 // 16
    assert min(plan.coresident_bytes[name] for name in taken if name != "save.parts") == pytest.approx(
        state - gate, rel=1e-4
    )


def test_a_program_that_fits_alone_and_not_beside_the_rest_is_refused(plan):
    limit, others = plan.target.limit_bytes, plan.coresident_bytes["evaluate"]
    sizes = {"argument": 0, "output": 0, "alias": 0, "temp": 0, "generated_code": 0}

    def outcome(peak: int) -> Compiled:
        return Compiled(
            name="evaluate", mesh=plan.mesh, memory=MemoryFigures(**sizes, peak=peak), figures=None, text_error=None,
            coordinates=((0, 0, 0, 0),), lower_seconds=0.0, compile_seconds=0.0,
        )  # fmt: skip

    assert not exceeds_hbm(plan, outcome(limit - others))
    over = outcome(limit - others + (1 << 20))
    assert exceeds_hbm(plan, over)
    message = format_hbm_error(plan, over)
    assert message.startswith("evaluate does not fit: 30.75 GiB > 30.75 GiB (")
