"""Refusals in axis names, and that the way out they name is one: its YAML, pasted into the config, fits."""

import json
import re
from pathlib import Path

import pytest
import yaml

from haliax_ext.hlo import OutOfMemory
from levanter.commands.evaluate import eval_lm
from levanter.commands.train.lm import train_lm
from levanter.config import read
from levanter.plan.hbm_budget import hbm_budget
from levanter.plan.hbm_lower_bound import program_lower_bound
from levanter.plan.oom_report import explain_oom
from levanter.plan.target_from_name import pod_target

CONFIGS = Path(__file__).parents[3] / "config"
GIB = 1 << 30
ENTRY_POINTS = {"eval": (eval_lm.EvalLmConfig, eval_lm.describe), "train": (train_lm.TrainLmConfig, train_lm.describe)}


def described(path, target):
    kind, describe = ENTRY_POINTS["eval" if "405b" in path.name else "train"]
    loaded = read(kind, paths=[str(path)])
    return describe(loaded.config, pod_target(target), written=loaded.written)


def over(tmp_path, config: str, **document):
    """A config file that changes another one."""
    path = tmp_path / f"{config.replace('/', '_')}_{len(list(tmp_path.iterdir()))}.yaml"
    path.write_text(json.dumps({"extends": str(CONFIGS / f"{config}.yaml"), **document}))
    return path


def refusal(needed: float, available: float) -> OutOfMemory:
    return OutOfMemory(needed=round(needed * GIB), available=round(available * GIB), allocations=(), message="")


def pasted(tmp_path, path, line: str, target: str):
    """The plan with the suggestion in the config, and the bytes on a chip that it says are known."""
    found = re.fullmatch(
        r"may fit: (.*?)  # at least ([\d.]+) (GiB|MiB) on a chip(; train steps|, not compiled).*", line
    )
    assert found, line
    fragment = yaml.safe_load(f"{{{found[1]}}}")
    copy = tmp_path / f"{path.stem}_pasted.yaml"
    copy.write_text(json.dumps({"extends": str(path), **fragment}))
    promised = float(found[2]) * (GIB if found[3] == "GiB" else 1 << 20)
    return described(copy, target), promised, fragment


def known(plan) -> int:
    """The known bytes of the run's main Program."""
    return program_lower_bound(plan, plan.workloads[0].program, hbm_bytes=plan.target.hbm_bytes).total


def test_405b_as_published(tmp_path):
    """Whole on every chip: q 128 heads × 128 × 16384 × 126 layers × 4 bytes = 126 GiB; embedding and head 7.83 each."""
    path = CONFIGS / "eval" / "llama3.1_405b_as_published.yaml"
    plan = described(path, "v4-256")
    lines = explain_oom(None, plan, hbm_budget(plan))
    assert lines[0] == "score needs 168.00 GiB on a chip, 137.25 GiB more than its 30.75 GiB: its inputs alone"
    assert lines[1].startswith("inputs: embedding 7.83 GiB, attention 142.73 GiB, mlp 9.60 GiB, head 7.83 GiB, norm ")
    attention = "model.transformer.layers.stacked.self_attn"
    keys = "float32[layers 126, kv_head 8, head_size 128, embed 16384]"
    assert lines[2:-1] == (
        f"largest input: 126.00 GiB {attention}.q_proj.weight float32[layers 126, kv_head 8, q_heads_per_group 16, "
        "head_size 128, embed 16384], replicated on every chip",
        f"largest input: 7.88 GiB {attention}.k_proj.weight {keys}, replicated on every chip",
        f"largest input: 7.88 GiB {attention}.v_proj.weight {keys}, replicated on every chip",
        "largest input: 7.83 GiB model.embeddings.token_embeddings.weight float32[vocab 128256, embed 16384], "
        "replicated on every chip",
        "largest input: 7.83 GiB model.lm_head.weight float32[vocab 128256, embed 16384], replicated on every chip",
    )
    plan, promised, fragment = pasted(tmp_path, path, lines[-1], "v4-256")
    assert fragment == {
        "trainer": {"mesh": {"shared_mapping": {"heads": ["model", "group"], "vocab": ["model", "group"]}}}
    }
    assert plan.exit_code == 0
    assert known(plan) == pytest.approx(promised, abs=0.01 * GIB)
    assert hbm_budget(plan).arguments["score"] < 30.75 * GIB
    assert explain_oom(None, plan, hbm_budget(plan)) == ()


def test_70b_with_a_whole_residual_stream(tmp_path):
    """Refused at 32.53 GiB in a hand check; with `embed → model` between blocks it compiled to 22.5."""
    document = {"trainer": {"mesh": {"residual_mapping": {"embed": None}}}}
    path = over(tmp_path, "train/llama2_70b_v4-256", **document)
    plan = described(path, "v4-256")
    lines = explain_oom(refusal(32.53, 30.75), plan, hbm_budget(plan), program="train_step")
    inputs = hbm_budget(plan).arguments["train_step"] / GIB
    assert lines[0] == (
        f"train_step needs 32.53 GiB on a chip, 1.78 GiB more than its 30.75 GiB: {inputs:.2f} GiB of inputs, "
        f"{32.53 - inputs:.2f} GiB of temporaries (2.01 GiB of it gradients)"
    )
    # 16 rows a chip × 1024 × 8192 × 2 bytes for each of 80 layers.
    assert any("residual stream" in line and line.endswith("each of 80 layers: 20.00 GiB") for line in lines)
    plan, promised, fragment = pasted(tmp_path, path, lines[-1], "v4-256")
    assert fragment == {"trainer": {"mesh": {"residual_mapping": {"embed": "model"}}}}
    assert plan.exit_code == 0
    assert known(plan) == pytest.approx(promised, abs=0.01 * GIB)


def test_8b_over_four_of_128_chips(tmp_path):
    path = CONFIGS / "train" / "llama3_8b_v6e-128_embed4.yaml"
    plan = described(path, "v6e-128")
    budget = hbm_budget(plan)
    # f32 weights and two moments over 4 chips: 12 × 8.03e9 / 4.
    assert budget.arguments["train_step"] == pytest.approx(12 * 8.0303e9 / 4, rel=1e-3)
    lines = explain_oom(refusal(36.9, 31.25), plan, budget, program="train_step")
    plan, promised, fragment = pasted(tmp_path, path, lines[-1], "v6e-128")
    assert fragment == {"trainer": {"mesh": {"param_mapping": {"embed": ["data", "replica"]}}}}
    assert plan.exit_code == 0
    assert hbm_budget(plan).arguments["train_step"] == pytest.approx(12 * 8.0303e9 / 128, rel=2e-2)
    assert known(plan) == pytest.approx(promised, abs=0.01 * GIB)


def test_a_mapping_is_nearer_than_a_smaller_batch_and_that_than_another_mesh(tmp_path):
    """70B, where what is made on the way cannot shrink by the residual stream any more."""
    path = CONFIGS / "train" / "llama2_70b_v4-256.yaml"
    plan = described(path, "v4-256")
    lines = explain_oom(refusal(32.0, 30.75), plan, hbm_budget(plan), program="train_step")
    plan, _, fragment = pasted(tmp_path, path, lines[-1], "v4-256")
    assert fragment == {"trainer": {"per_device_parallelism": 8}}
    (stage,) = plan.work.batches
    assert (stage.plan.per_device, stage.plan.accumulation) == (8, 2)
    # One row a chip cannot be halved; a wider model axis halves what a row takes.
    path = over(tmp_path, "train/llama_0.78b_64k_v6e-8_as_published")
    plan = described(path, "v6e-8")
    lines = explain_oom(refusal(45.0, 31.25), plan, hbm_budget(plan), program="train_step")
    plan, _, fragment = pasted(tmp_path, path, lines[-1], "v6e-8")
    assert fragment["trainer"]["mesh"].keys() == {"axes"}
    assert plan.exit_code == 0


def test_too_few_chips_whatever_the_mapping():
    """70B in f32 with two moments is 12 × 69e9 bytes; 16 chips of 30.75 GiB are 528e9."""
    plan = described(CONFIGS / "train" / "llama2_70b_v4-256.yaml", "v4-32")
    lines = explain_oom(None, plan, hbm_budget(plan))
    assert lines[-1] == (
        "no mapping fits: even evenly sharded over all 16 chips, the inputs still take 48.18 GiB on each; "
        "they need at least 26 chips"
    )
    assert 25 * 30.75 * GIB < 12 * 68.98e9 < 26 * 30.75 * GIB


def test_nothing_is_said_where_nothing_is_refused(tmp_path):
    plan = described(CONFIGS / "train" / "llama2_7b_v4-32.yaml", "v4-32")
    assert explain_oom(None, plan, hbm_budget(plan)) == ()
    # Whether a Program fits that makes a state from nothing is not for its inputs to say.
    assert explain_oom(None, plan, hbm_budget(plan), program="init_state") == ()


def test_what_arithmetic_proposes_is_legal_for_the_planner(tmp_path):
    """Twelve heads do not divide by 8, so no `model: 8` is proposed, however much is missing."""
    path = over(tmp_path, "train/llama_0.78b_64k_v6e-8_as_published")
    plan = described(path, "v6e-8")
    for needed in (40.0, 60.0, 80.0, 100.0, 200.0):
        line = explain_oom(refusal(needed, 31.25), plan, hbm_budget(plan), program="train_step")[-1]
        if line.startswith("may fit"):
            pasted_plan, promised, _ = pasted(tmp_path, path, line, "v6e-8")
            assert pasted_plan.exit_code == 0
            assert known(pasted_plan) == pytest.approx(promised, rel=0.01)
        else:
            assert line.startswith("none of the changes tried fits")


def test_a_step_that_keeps_everything_takes_fewer_rows_or_recomputes(tmp_path):
    """Llama 2 7B, 16 rows of 1,024 a chip, needs 177 GiB (compiled). With its blocks recomputed that is 9."""
    path = over(tmp_path, "train/llama2_7b_v4-32", model={"gradient_checkpointing": False})
    plan = described(path, "v4-32")
    lines = explain_oom(refusal(177.09, 30.75), plan, hbm_budget(plan), program="train_step")
    assert any("kept of each of 32 layers" in line and "mlp" in line for line in lines if "largest activation" in line)
    pasted_plan, _, fragment = pasted(tmp_path, path, lines[-1], "v4-32")
    assert pasted_plan.exit_code == 0
    assert fragment == {"model": {"gradient_checkpointing": True}}
    # Where half of the rows is enough, all is kept of them.
    lines = explain_oom(refusal(40.0, 30.75), plan, hbm_budget(plan), program="train_step")
    assert pasted(tmp_path, path, lines[-1], "v4-32")[2] == {"trainer": {"per_device_parallelism": 8}}
