"""What preflight says of every run we ship or promise something about, without compiling: golden texts and figures.

Numbers that are asserted here come from hand arithmetic or from the published job, not from the code.
"""

import re
from functools import cache

import pytest
from helpers.golden import GOLDEN, assert_golden, assert_golden_json
from helpers.plan_cases import CASES, CONFIGS, verdict_text
from helpers.plan_facts import verdict_facts

from haliax_ext.hlo import OutOfMemory
from levanter.plan.oom_report import explain_oom
from levanter.plan.verdict import Verdict

GIB = 1 << 30
SAMPLES = ("405b_v4-256", "405b_as_published")
"""Whose wording is reviewed: one that fits, one that is refused."""
# Llama 3.1 405B: 126 layers of q and o (2 × 16384²), k and v (2 × 1024 × 16384), MLP (3 × 53248 × 16384) and two norms;
# two matrices of the vocabulary; one norm.
PARAMETERS_405B = 126 * (2 * 16384**2 + 2 * 1024 * 16384 + 3 * 53248 * 16384 + 2 * 16384) + 2 * 128256 * 16384 + 16384

OTHER_PODS = ("qwen3_235b_a22b_v4-256", "qwen3_235b_a22b_v6e-64")


@cache
def verdict_of(name: str) -> Verdict:
    return CASES[name].verdict(compiled=False)


@pytest.mark.golden
@pytest.mark.parametrize(
    "name",
    # The same model on two more pods takes ten seconds.
    [pytest.param(name, marks=pytest.mark.slow) if name in OTHER_PODS else name for name in CASES],
)
def test_plan(name):
    case, verdict = CASES[name], verdict_of(name)
    assert verdict.exit_code == case.exit_code
    assert_golden_json(f"plans/{name}.json", verdict_facts(case, verdict))


@pytest.mark.golden
@pytest.mark.parametrize("name", SAMPLES)
def test_plan_in_words(name):
    assert_golden(f"plans/{name}.txt", verdict_text(CASES[name], verdict_of(name)))


def test_every_golden_plan_is_of_a_case():
    assert {path.name for path in (GOLDEN / "plans").iterdir()} == {
        *(f"{name}.json" for name in CASES),
        *(f"{name}.txt" for name in SAMPLES),
    }
    # Those of GPUs belong to `tests/aot/test_gpus.py`, which plans without a case.
    compiled = {path.stem for path in (GOLDEN / "compiled").iterdir() if not path.stem.startswith("gpu_")}
    assert compiled == {name for name, case in CASES.items() if case.figures and case.compiled is not None}


def test_every_config_is_a_case():
    shipped = {
        str(path.relative_to(CONFIGS).with_suffix(""))
        for folder in ("dpo", "eval", "lora", "train")
        for path in (CONFIGS / folder).rglob("*.yaml")
    } | {str(path.relative_to(CONFIGS).with_suffix("")) for path in (CONFIGS / "harness").glob("*.yaml")}
    # Demos run on the machine at hand.
    assert {name for name in shipped if not name.endswith("/demo")} == {
        case.config for case in CASES.values() if not case.config.startswith("memorization")
    }


def test_405b_has_as_many_parameters_as_published():
    assert PARAMETERS_405B == 405_853_388_800


class TestLlama405B:
    @pytest.mark.parametrize("name", ["405b_as_published", "405b_windows_as_published"])
    def test_as_published_it_is_refused_by_arithmetic_alone(self, name):
        verdict = verdict_of(name)
        assert verdict.exit_code == 3
        assert re.search(r"168\.0\d? GiB > 30\.75 GiB", verdict.headline)
        # What stays whole, with its bytes: f32[126, 128 heads, 128, 16384] is the 135,291,469,824 bytes of the
        # published crash.
        whole = {
            "q_proj": 126 * 128 * 128 * 16384 * 4,
            "k_proj": 126 * 8 * 128 * 16384 * 4,
            "v_proj": 126 * 8 * 128 * 16384 * 4,
            "token_embeddings": 128256 * 16384 * 4,
            "lm_head": 128256 * 16384 * 4,
        }
        assert whole["q_proj"] == 135_291_469_824
        (sharding,) = [stage for stage in verdict.stages if stage.name == "sharding"]
        assert len(sharding.findings) == len(whole)
        for name, size in whole.items():
            (finding,) = [each for each in sharding.findings if f"{name}.weight" in each.split()[0]]
            assert f"is replicated over model 8 × group 16: {size / GIB:.2f} GiB on each device" in finding
        residents = {r.path.split(".")[-2]: r for r in verdict.budget.residents if r.path.startswith("model.")}
        assert {name: residents[name].nbytes for name in whole} == whole
        assert all(residents[name].replicated for name in whole)

    def test_in_its_old_spelling_it_is_translated_and_fits(self):
        verdict = verdict_of("405b_old_style")
        assert verdict.exit_code == 0
        assert verdict.plan.mesh.shape["model"] == 8 and verdict.plan.mesh.shape["group"] == 16
        # K and V are whole over `group`, norms over everything.
        kv, norms = 126 * 2 * 8 * 128 * 16384, (2 * 126 + 1) * 16384
        cut = PARAMETERS_405B - kv - norms
        assert verdict.plan.sharding.bytes_per_device == 4 * (cut // 128 + kv // 8 + norms)
        assert any("factored into model 8 × group 16" in note for note in verdict.notes)
        assert any("vocab → model was added" in note for note in verdict.notes)

    @pytest.mark.parametrize(
        ("name", "chips", "width", "limit"),
        [
            ("405b_v4-256", 128, 2, 7),
            ("405b_windows_v4-256", 128, 2, 7),
            ("405b_v4-256_f32", 128, 4, 13),
            ("405b_v4-128", 64, 2, None),
            ("405b_v4-64", 32, 2, None),
            ("405b_v5p-64", 32, 2, None),
            ("405b_v6e-64", 64, 2, None),
            ("405b_v6e-256", 256, 2, None),
        ],
    )
    def test_parameters_on_a_chip(self, name, chips, width, limit):
        verdict = verdict_of(name)
        assert verdict.exit_code == 0
        assert verdict.plan.mesh.size == chips
        found = verdict.plan.sharding.bytes_per_device
        # All but the norms is cut over every chip.
        assert found == pytest.approx(width * PARAMETERS_405B / chips, rel=2e-4)
        assert limit is None or found <= limit * GIB


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if name.startswith("405b")])
def test_no_weight_takes_more_than_its_shard_and_a_buffer_on_the_way_in(name):
    load = verdict_of(name).load
    if load is None:
        assert name.endswith("as_published")
        return
    leaf, extra = load.device_transient
    assert extra <= 512 << 20, leaf
    assert load.amplification == pytest.approx(1, abs=1e-3)
    assert sum(load.bytes_by_host) == pytest.approx(2 * PARAMETERS_405B, rel=1e-6)


class TestDepth24:
    """24 layers of 1536, 12 heads × 128, gated MLP 4096, vocabulary 32,768: 0.78 B parameters, 65,536 tokens a row."""

    PARAMETERS = 24 * (4 * 1536**2 + 3 * 1536 * 4096 + 2 * 1536) + 2 * 32768 * 1536 + 1536

    def test_it_has_the_parameters_of_the_original(self):
        gated, original = 3 * 1536 * 4096, 2 * 1536 * 6144
        assert gated == original
        assert round(self.PARAMETERS / 1e9, 2) == 0.78

    @pytest.mark.parametrize("ways", [1, 2, 4])
    def test_weights_and_states_are_an_eighth_of_the_model_whatever_the_arrangement(self, ways):
        budget = verdict_of(f"llama_0.78b_64k_tp{ways}").budget
        assert budget.arguments["train_step"] == pytest.approx(12 * self.PARAMETERS / 8, rel=5e-3)
        assert budget.groups["optimizer"] == pytest.approx(8 * self.PARAMETERS / 8, rel=5e-3)
        assert budget.groups["mlp"] == 24 * 3 * 1536 * 4096 * 4 // 8

    def test_eight_ways_do_not_divide_the_heads(self):
        verdict = verdict_of("llama_0.78b_64k_tp8")
        assert verdict.exit_code == 2
        assert "12 attention heads" in verdict.headline and "model 8" in verdict.headline
        (finding,) = verdict.stages[0].findings
        assert "→" in finding

    def test_what_is_published_as_45_gb(self):
        """Weights and moments in f32, and what attention reads of each layer, on one chip: the published arithmetic."""
        plan = verdict_of("llama_0.78b_64k_as_published").plan
        refused = OutOfMemory(needed=round(41.03 * GIB), available=round(31.25 * GIB), allocations=(), message="")
        lines = explain_oom(refused, plan, verdict_of("llama_0.78b_64k_as_published").budget, program="train_step")
        token = 65536 * 1536 * 2
        kept = {"query and attention": 2 * 24 * token, "key and value": 2 * 24 * token}
        for names, size in kept.items():
            (line,) = [line for line in lines if f"({names})" in line]
            assert line.endswith(f"kept of each of 24 layers ({names}): {size / GIB:.2f} GiB")
        (residual,) = [line for line in lines if "residual stream" in line]
        assert residual.endswith(f"kept of each of 24 layers: {24 * token / GIB:.2f} GiB")
        (logits,) = [line for line in lines if "logits" in line]
        assert logits.startswith(f"largest activation: {65536 * 32768 * 4 / GIB:.2f} GiB")
        named = 16 * self.PARAMETERS + sum(kept.values()) + 24 * token + 65536 * 32768 * 4
        # Weights, moments, gradients and what has a name are all that the compiler asks for, to 3 %.
        assert named == pytest.approx(refused.needed, rel=0.03)
        assert refused.needed / 1e9 == pytest.approx(45, rel=0.03)

    def test_as_published_everything_is_whole(self):
        budget = verdict_of("llama_0.78b_64k_as_published").budget
        assert budget.arguments["train_step"] == pytest.approx(12 * self.PARAMETERS, rel=1e-3)
        assert budget.replicated_bytes == pytest.approx(12 * self.PARAMETERS, rel=1e-3)


def test_8b_cut_over_four_chips_keeps_a_quarter_of_weights_and_moments():
    eight = 32 * (2 * 4096**2 + 2 * 1024 * 4096 + 3 * 14336 * 4096 + 2 * 4096) + 2 * 128256 * 4096 + 4096
    assert verdict_of("llama3_8b_v6e-128_embed4").budget.arguments["train_step"] == pytest.approx(
        12 * eight / 4, rel=1e-3
    )
    assert verdict_of("llama3_8b_v6e-128").budget.arguments["train_step"] == pytest.approx(12 * eight / 128, rel=2e-3)


@pytest.mark.parametrize(("model", "parameters"), [("gemma3_27b", 27_009_346_304), ("qwen2.5_72b", 72_706_203_648)])
@pytest.mark.parametrize(("target", "chips"), [("v4-256", 128), ("v5p-128", 64), ("v6e-64", 64), ("v6e-256", 256)])
def test_other_families_are_read_once_and_lie_on_all_chips(model, parameters, target, chips):
    verdict = verdict_of(f"{model}_{target}")
    assert verdict.exit_code == 0
    assert verdict.load is not None and verdict.load.source_bytes == 2 * parameters
    assert verdict.load.amplification == pytest.approx(1.0)
    # Norms and, over `data`, biases of queries, keys and values are whole.
    assert verdict.plan.sharding.bytes_per_device == pytest.approx(2 * parameters / chips, rel=2e-3)
