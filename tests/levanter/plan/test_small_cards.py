"""What a plan answers where a small card is too small: the changes that it names are pasted, and fit by arithmetic."""

import re
from pathlib import Path

import yaml

from levanter.commands.catalog import ENTRY_POINTS
from levanter.config import load_written
from levanter.hardware import parse_accelerator
from levanter.plan.gpu_memory import gpu_memory_note
from levanter.plan.hbm_budget import hbm_budget
from levanter.plan.hbm_lower_bound import program_lower_bound
from levanter.plan.oom_report import advise_on_slots, explain_oom
from levanter.plan.search.candidates import candidates
from levanter.plan.target_from_name import pod_target
from levanter.runplan import RunPlan

CONFIGS = Path(__file__).parents[3] / "config"
LORA = ("lora_lm", str(CONFIGS / "lora/llama3_8b_v6e-8.yaml"))
GIB = 1 << 30


def described(entry_point: str, path: str, target: str, *options: str) -> RunPlan:
    reference = ENTRY_POINTS[entry_point]
    loaded = load_written(reference.config_class(), ["--config_path", path, *options])
    return reference.load().describe(loaded.config, pod_target(parse_accelerator(target)), written=loaded.written)


def needed(plan: RunPlan) -> int:
    limit = plan.target.hbm_bytes
    assert limit is not None
    return program_lower_bound(plan, "train_step", hbm_bytes=limit).total


def pasted(line: str) -> tuple[str, ...]:
    (fragment,) = re.findall(r"fit: (.*?)  #", line)
    tree = yaml.safe_load(f"{{{fragment}}}")
    return tuple(
        f"--{part}.{key}={yaml.safe_dump(value, default_flow_style=True, width=1000).splitlines()[0]}"
        for part, inner in tree.items()
        for key, value in inner.items()
    )


def test_adapters_on_a_24_gb_card():
    """8B in bf16 leaves no room on an L4, not even with recomputed blocks; an int8 base does."""
    plan = described(*LORA, "l4x1")
    limit = plan.target.hbm_bytes or 0
    assert limit == round(0.75 * (23034 << 20)) and needed(plan) > limit
    layout, int8 = explain_oom(None, plan, hbm_budget(plan), program="train_step")[-2:]
    assert layout.startswith("none of the changes tried fits; there is one GPU")
    assert needed(described(*LORA, "l4x1", "--model.gradient_checkpointing=true")) > limit
    # Projections by hand: attention 2 × 4096² + 2 × 4096 × 1024, MLP 3 × 4096 × 14336, 32 times, and a head of 128,256.
    projections = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128256 * 4096
    assert f"take {projections / GIB:.2f} GiB less" in int8
    assert pasted(int8) == ("--lora.base_dtype=int8", "--model.gradient_checkpointing=true")
    small = described(*LORA, "l4x1", *pasted(int8))
    # What it says leaves out a float32 scale for each channel.
    (stated,) = re.findall(r"at least ([\d.]+) GiB", int8)
    assert 0 < needed(small) / GIB - float(stated) < 0.02 and needed(small) <= limit
    # With an int8 base only the layout is left to change.
    quantized = described(*LORA, "l4x1", "--lora.base_dtype=int8")
    (*_, last) = explain_oom(None, quantized, hbm_budget(quantized), program="train_step")
    assert last.startswith("may fit: model: {gradient_checkpointing: true}")


def test_a_server_on_a_24_gb_card(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "extends": str(CONFIGS / "model/llama3.1_8b.yaml"),
                "model": {"max_seq_len": 8192},
                "tokenizer": "passthrough",
                "inference": {"max_rows": 8, "max_seq_len": 8192},
                "trainer": {"mp": "bfloat16", "tracker": {"type": "noop"}},
            }
        )
    )
    plan = described("serve", str(path), "l4x1")
    (advice,) = advise_on_slots(plan, parse_accelerator("l4x1"))
    # 15 GiB of weights and a GiB of cache a row: nothing but another card, or fewer bytes.
    assert advice.startswith("1 rows of 8,192 positions fit, 8 asked") and "l4x2 with model 2" in advice
    assert any("model.scan_layers" in check.message for check in plan.checks)
    both = described("serve", str(path), "l4x2", "--trainer.mesh.axes={data: 1, model: 2}")
    budget = hbm_budget(both)
    assert max(budget.arguments.values()) <= (budget.hbm_bytes or 0)


def test_parameters_are_sharded_over_hosts_where_a_host_is_too_small():
    """96 GiB of state on each of eight GPUs of a host; an eighth of that with all eight hosts."""
    run = ("train_lm", str(CONFIGS / "train/llama2_70b_v4-256.yaml"), "h100x64", "--trainer.train_batch_size=64")
    plan = described(*run)
    budget = hbm_budget(plan)
    (*_, line) = explain_oom(None, plan, budget, program="train_step")
    assert "param_mapping: {embed: [replica_dcn, data]}" in line
    wider = hbm_budget(described(*run, *pasted(line)))
    assert wider.arguments["train_step"] < 0.14 * budget.arguments["train_step"]
    assert wider.arguments["train_step"] <= (wider.hbm_bytes or 0)
    # A slice of a TPU pod is large enough: what crosses slices there is not suggested, nor searched.
    sizes = {"embed": 8192, "vocab": 32000, "mlp": 28672, "kv_head": 8, "q_heads_per_group": 8}
    tensor = (("mlp",), ("kv_head", "q_heads_per_group"))
    for across in (False, True):
        listed = candidates(sizes, tensor_axes=tensor, devices=8, global_batch=64, slices=8, across=across)
        assert {c.kind == "across" for c in listed} == ({False, True} if across else {False})
        options = [c.mesh_options()["param_mapping"]["embed"] for c in listed if c.across]
        assert all(option == ["replica_dcn", "data"] for option in options)


def test_the_share_of_the_allocator_that_would_be_enough():
    pod = parse_accelerator("l4x1")
    assert gpu_memory_note(parse_accelerator("v4-8"), needed=1) is None
    assert (gpu_memory_note(pod, needed=18 * GIB) or "").endswith("makes it 20.69 GiB, where this run fits")
    for enough in (None, 16 * GIB, 21 * GIB):
        assert (gpu_memory_note(pod, needed=enough) or "").endswith("makes it 20.69 GiB")
