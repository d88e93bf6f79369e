"""`train_dpo` and `lora_dpo`: what they plan, what a run says, its first loss, its evaluation, resuming."""

import math

import jax
import numpy as np
import pytest
from helpers.preference_runs import LOCAL, LORA, Logged, document, write_inputs

from levanter.commands.train.dpo_config import TrainDpoConfig
from levanter.commands.train.train_dpo import ENTRY_POINT, describe
from levanter.config import parse
from levanter.run import Session

ADAPTED = {"adapter": LORA, "reference": {"type": "adapter_base"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("preferences"))


def read(folder, out, **more) -> TrainDpoConfig:
    return parse(TrainDpoConfig, overrides=document(folder, out, **more))


def run(config: TrainDpoConfig, *, run_id="run"):
    plan = describe(config, LOCAL).check()
    tracker = Logged()
    done = ENTRY_POINT.execute(plan, plan.mesh.build(jax.devices()[:8]), Session(run_id=run_id, tracker=tracker))
    return plan, done, tracker


@pytest.fixture(scope="module")
def separate(folder, tmp_path_factory):
    return run(read(folder, tmp_path_factory.mktemp("separate")))


@pytest.fixture(scope="module")
def adapted(folder, tmp_path_factory):
    return run(read(folder, tmp_path_factory.mktemp("adapted"), **ADAPTED))


def own_programs(plan):
    return [program.name for program in plan.programs if not program.name.startswith(("load.", "save."))]


def test_the_first_loss_is_ln_2(separate, adapted):
    for _, done, tracker in (separate, adapted):
        losses = tracker.series("train/loss")
        assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
        assert losses == tracker.series("train/dpo_loss") and done.taken == 3
        assert losses[1] < math.log(2) - 1e-3, "it must learn for this to say anything"
        assert tracker.series("train/dpo_chosen_reward")[0] == pytest.approx(0, abs=1e-6)


def test_pairs_are_held_out_of_the_end_of_the_set_and_evaluated(separate):
    plan, done, tracker = separate
    assert own_programs(plan) == ["init_optimizer", "train_step", "evaluate_pairs"]
    assert done.evaluation.pairs == {"pairs": 4}  # a tenth of 40
    assert set(tracker.found[2]) >= {f"eval/pairs/{name}" for name in ("loss", "dpo_loss", "dpo_accuracy")}
    assert tracker.found[2]["eval/loss"] == pytest.approx(done.evaluation.sets["pairs"]["loss"])
    assert np.isfinite(done.evaluation.sets["pairs"]["dpo_margin_ref"])


def test_the_plan_has_the_reference_where_there_is_one(separate, adapted):
    (plan, _, _), (lean, _, _) = separate, adapted
    (second,) = [model for model in [plan.work.pairs.resident] if model is not None]
    assert plan.resident_bytes["reference"] == second.plan.bytes_per_device > 0
    assert "reference" not in lean.resident_bytes and lean.load_beside is None
    assert plan.load_beside.source_bytes == plan.load.source_bytes
    assert [p.name for p in plan.loading if p.name.startswith("load.reference")] == [
        p.name for p in plan.load_beside.programs
    ]
    step = {each.name for each in plan.program("train_step").inputs}
    assert step == {"state", "frozen", "reference", "batch"}
    assert {each.name for each in lean.program("train_step").inputs} == {"state", "frozen", "batch"}
