"""`train_dpo` and `lora_dpo`: what they plan, what a run says, its first loss, its evaluation, resuming."""

import math

import jax
import numpy as np
import pytest
from helpers.preference_runs import LOCAL, LORA, Logged, document, write_inputs

from levanter.commands.train.dpo.config import TrainDpoConfig
from levanter.commands.train.dpo.train_dpo import ENTRY_POINT, describe
from levanter.config import parse
from levanter.runplan import Session

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
    (second,) = [model for model in [plan.work.models.resident] if model is not None]
    assert plan.resident_bytes["reference"] == second.plan.bytes_per_device > 0
    assert "reference" not in lean.resident_bytes and lean.second_load is None
    assert plan.second_load.source_bytes == plan.load.source_bytes
    assert [p.name for p in plan.loading if p.name.startswith("load.reference")] == [
        p.name for p in plan.second_load.programs
    ]
    step = {each.name for each in plan.program("train_step").inputs}
    assert step == {"state", "frozen", "reference", "batch"}
    assert {each.name for each in lean.program("train_step").inputs} == {"state", "frozen", "batch"}


@pytest.mark.slow
def test_text_is_evaluated_besides_and_before_the_first_step(folder, tmp_path):
    (folder / "text.jsonl").write_text('{"text": "the cat sat on the mat"}\n' * 5)
    text = {
        "tokenizer": str(folder / "model"),
        "cache_dir": None,
        "components": {"plain": {"source": {"validation_urls": [str(folder / "text.jsonl")]}}},
    }
    config = read(
        folder,
        tmp_path,
        **ADAPTED,
        steps=2,
        lm_validation_data=text,
        lm_validation_prefix="held",
        run_initial_eval=True,
        scheduled_eval_steps=[1],
        reference_eval_cache={"mode": "build_or_load"},
    )
    plan, _, tracker = run(config)
    assert own_programs(plan)[-3:] == ["reference_logprobs", "evaluate_pairs", "evaluate"]
    assert tracker.found[0]["eval/pairs/dpo_chosen_reward"] != 0 and len(tracker.series("held/plain/loss")) == 2
    assert sorted((tmp_path / "tokens" / "reference_logprobs" / "pairs" / "train").iterdir())


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit(folder, tmp_path):
    """Two steps, and two more in another attempt, are four; another loss, or another reference, is another run."""
    keep = {"checkpointer": {"base_path": str(tmp_path / "checkpoints"), "keep": [{"every": 2}]}}
    # The learning rate of a step does not depend on how many there will be.
    like = {**ADAPTED, "steps": 4, "optimizer": {"learning_rate": 0.003, "warmup": 0, "lr_schedule": "constant"}}
    _, _, first = run(read(folder, tmp_path, **like, trainer={**keep, "id": "whole"}), run_id="whole")
    run(read(folder, tmp_path, **like, trainer={**keep, "num_train_steps": 2}))
    _, done, rest = run(read(folder, tmp_path, **like, trainer=keep))
    assert done.taken == 4 and sorted(rest.found) == [2, 3]
    assert rest.series("train/loss") == first.series("train/loss")[2:]
    for change in ({"beta": 0.2}, {"loss": {"type": "ipo"}}):
        plan = describe(read(folder, tmp_path, **{**ADAPTED, **change}, steps=4, trainer=keep), LOCAL)
        assert any(f"{next(iter(change))}" in str(error) and "different run" in str(error) for error in plan.errors)


@pytest.mark.slow
def test_a_precomputed_reference_is_made_once(folder, tmp_path, monkeypatch):
    """The second run reads what the first one stored: it loads no reference, and trains the same."""
    from levanter.commands.train.dpo import run as dpo_run

    reference = {"type": "precomputed", "model_path": str(folder / "other"), "cache_dir": str(tmp_path / "said")}
    plan, _, first = run(read(folder, tmp_path / "one", reference=reference))
    assert own_programs(plan)[0] == "reference_logprobs" and "reference" not in plan.resident_bytes
    assert {each.name for each in plan.program("train_step").inputs} == {"state", "frozen", "batch"}
    monkeypatch.setattr(dpo_run, "load_reference_model", lambda *_: pytest.fail("the reference was loaded again"))
    _, _, second = run(read(folder, tmp_path / "two", reference=reference))
    assert second.series("train/loss") == first.series("train/loss")
    other = {**reference, "model_path": str(folder / "model")}
    with pytest.raises(ValueError, match="these log-probabilities are of another reference, or of other pairs"):
        run(read(folder, tmp_path / "three", reference=other))
