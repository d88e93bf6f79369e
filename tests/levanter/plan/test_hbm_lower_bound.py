"""Known bytes: by hand, and never more than what the real compiler asked for."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.plan_cases import CASES

from levanter.plan.hbm_budget import hbm_budget, program_residents
from levanter.plan.hbm_lower_bound import program_lower_bound
from levanter.plan.preflight.pipeline import preflight
from levanter.plan.preflight.state import Question
from levanter.plan.target_from_name import pod_target
from levanter.runplan import NOT_DECIDED, Target

GIB = 1 << 30
COMPILED = Path(__file__).parents[2] / "golden" / "compiled"
REFUSED = ("llama3_8b_v6e-128_embed4", "llama_0.78b_64k_as_published", "llama_0.78b_64k_as_published_kept")
"""Whose known bytes alone are more than a chip has."""

QUICK = (*REFUSED, "405b_v6e-64", "405b_old_style", "llama2_70b_v4-256_whole")
"""Those of `make test`."""


def plan_of(name, *overrides):
    case = replace(CASES[name], overrides=(*CASES[name].overrides, *overrides))
    return case.describe(pod_target(case.target))


def known(name, *overrides):
    plan = plan_of(name, *overrides)
    assert plan.target.hbm_bytes is not None
    return program_lower_bound(plan, hbm_budget(plan).largest, hbm_bytes=plan.target.hbm_bytes)


def test_7b_by_hand():
    """6.738e9 parameters over 16 chips; 16 rows of 1,024 a chip; 32 layers, 4,096 and 11,008 wide, bfloat16."""
    found = known("llama2_7b_v4-32")
    assert found.inputs == pytest.approx(12 * 6.738e9 / 16, rel=2e-3)
    assert found.gradients == pytest.approx(4 * 6.738e9 / 16, rel=2e-3)
    block_input = 16 * 1024 * 4096 * 2
    assert found.kept == 32 * block_input
    assert found.at_work == 16 * 1024 * 11008 * 2
    # The layers' weights in bfloat16, 202.4 million parameters each (the two tables of the vocabulary are 262 million).
    assert found.weights == pytest.approx(2 * 32 * 202.4e6 / 16, rel=1e-3)
    assert found.accumulated == 0
    assert found.stacked == pytest.approx(4 * (6.738e9 - 131e6) / 16, rel=1e-3)
    # Gathered gate, up and down; gate, up and the gradient of their product; gradients of the layer's ends.
    assert found.layer == 3 * 4096 * 11008 * 2 + 3 * found.at_work + 2 * block_input
    # The head in bfloat16 and its float32 gradient, the final activations, a chunk of logits.
    assert found.head == 32000 * 4096 * (2 + 4) + block_input + 16 * 128 * 32000 * 4
    beside = found.weights + found.kept + found.stacked + found.layer
    assert found.total == found.inputs + beside - found.saved and found.saved == round(0.05 * beside)
    # Two microbatches: the gradient of the first is kept, and half of the activations.
    two = known("llama2_7b_v4-32", "--trainer.per_device_parallelism=8")
    assert two.accumulated == found.gradients and two.kept == found.kept // 2
    # Sent to host memory, or recomputed from the beginning, none of them is kept; queries of every layer are by name.
    for policy in ("offload", "recompute"):
        assert known("llama2_7b_v4-32", f"--model.gradient_checkpointing={policy}").kept == 0
    names = "--model.gradient_checkpointing={save_block_internals: [query]}"
    assert known("llama2_7b_v4-32", names).kept == 2 * 32 * block_input
    everything = known("llama2_7b_v4-32", "--model.gradient_checkpointing=false")
    # Block inputs, queries, keys with values, and what is inside the feed-forward part: what has a name.
    assert not everything.recomputed and everything.kept == 32 * (3 * block_input + 16 * 1024 * 11008 * 2)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("llama2_7b_v4-32", ["--trainer.mesh.axes.replica=4", "--hf_save_path=exports"]),
        ("405b_v4-256", []),
    ],
)
def test_the_inputs_of_every_program_are_those_of_their_shards(name, overrides):
    """What saves included: replicas that are cut into parts were once counted whole, 75 GiB of 7B on every chip."""
    plan = plan_of(name, *overrides)
    assert plan.target.hbm_bytes is not None
    assert ("save.parts" in [each.name for each in plan.programs]) == bool(overrides)
    for program in plan.programs:
        found = program_lower_bound(plan, program.name, hbm_bytes=plan.target.hbm_bytes)
        assert found.inputs == sum(each.nbytes for each in program_residents(program, plan.mesh)), program.name


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.stem, marks=[] if path.stem in QUICK else [pytest.mark.slow])
        for path in sorted(COMPILED.glob("*.json"))
        if path.stem in CASES
    ],
)
def test_never_more_than_the_compiler_asked_for(name):
    if "windows" in name:
        pytest.skip("its text is not here")
    plan, figures = plan_of(name), json.loads((COMPILED / f"{name}.json").read_text())["programs"]
    limit = plan.target.hbm_bytes
    assert limit is not None
    seen = 0
    for program, facts in figures.items():
        found, asked = program_lower_bound(plan, program, hbm_bytes=limit), facts.get("needed") or facts.get("peak")
        assert 0 < found.inputs <= found.total <= asked, program
        seen += 1
        assert (found.total > limit) == (name in REFUSED)
    assert seen


def asked(name, *overrides, target=None):
    case = replace(CASES[name], overrides=(*CASES[name].overrides, *overrides))
    question = Question(
        target=target or case.target,
        describe=case.describe,
        provider="",
        payload={},
        local=lambda: Target(name="local", platform="cpu", kind="cpu", devices=8),
        compile=False,
    )
    return preflight(question)


def test_without_the_compiler_what_is_known_refuses():
    """A length of ten million, and a run that a compiler refused too; each with a way out that says what it lacks."""
    long = asked("405b_v4-256", "--max_eval_length=10000000")
    assert long.exit_code == 3 and long.headline.startswith("does not fit: at least ")
    assert "(score; not compiled)" in long.headline
    published = asked("llama_0.78b_64k_as_published")
    assert published.exit_code == 3
    assert published.headline == "does not fit: at least 39.25 GiB > 31.25 GiB (train_step; not compiled)"
    (verdict,) = [program for program in published.programs if program.name == "train_step"]
    assert verdict.why_not[0].startswith(
        "train_step needs at least 39.25 GiB on a chip, 8.00 GiB more than its 31.25 GiB: 8.72 GiB of inputs + "
        "1.27 GiB of weights in the compute dtype + 22.50 GiB of kept activations + 8.38 GiB of the head "
        "- 1.61 GiB that a compiler may save (not compiled: without kernels'"
    )
    assert verdict.why_not[-1].startswith("may fit: trainer: {")
    assert "× their bound when compiled" in verdict.why_not[-1]


def test_many_rows_need_more_than_their_block_inputs():
    """64 rows a chip of Llama 2 7B on v4-32, for which the compiler needs 34.78 of 30.75 GiB.

    4.7 of inputs, 16 of block inputs, 1.6 of gradients, and most of the rest in the backward pass of a layer.
    """
    found = known("llama2_7b_v4-32", "--trainer.train_batch_size=4096", "--trainer.per_device_parallelism=64")
    assert found.kept == 32 * 64 * 1024 * 4096 * 2
    assert 0.8 * 34.78 * GIB < found.total < 34.78 * GIB


def test_a_mesh_that_cuts_the_batch_less_often_comes_with_its_rows():
    """A file that does not say how many rows a device takes lets it take all of its share: 4,096 where nothing cuts the
    batch, for which the compiler needs 167.67 GiB."""
    refused = asked("llama2_7b_v4-32", "--trainer.train_batch_size=4096")
    (verdict,) = [program for program in refused.programs if program.name == "train_step"]
    assert refused.exit_code == 3 and verdict.why_not[-1].startswith("may fit: trainer: {")
    assert "per_device_parallelism: " in verdict.why_not[-1], verdict.why_not


def test_what_fits_by_what_is_known_is_not_compiled_and_what_is_not_known_is_not_decided():
    fits = asked("llama2_7b_v4-32")
    assert fits.exit_code == 0
    assert fits.headline == "not compiled: at least 12.12 of 30.75 GiB a chip"
    (stage,) = [stage for stage in fits.stages if stage.name == "compile"]
    assert "not counted: kernels'" in stage.message
    # Nobody says what a device has.
    local = asked("nano_v4-8", target="local")
    assert local.exit_code == NOT_DECIDED == 6
    assert local.headline.startswith("not decided: ")
