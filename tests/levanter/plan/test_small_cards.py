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
        f"--{part}.{key}={yaml.safe_dump(value).split(chr(10))[0]}"
        for part, inner in tree.items()
        for key, value in inner.items()
    )


def test_adapters_on_a_24_gb_card():
    """8B in bf16 leaves no room on an L4; recomputed blocks just might, and an int8 base does."""
    plan = described(*LORA, "l4x1")
    limit = plan.target.hbm_bytes or 0
    assert limit == round(0.75 * (23034 << 20)) and needed(plan) > limit
    layout, int8 = explain_oom(None, plan, hbm_budget(plan), program="train_step")[-2:]
    assert "might fit: model: {gradient_checkpointing: true}" in layout
    assert needed(described(*LORA, "l4x1", *pasted(layout))) <= limit
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
    assert last.startswith("would fit: model: {gradient_checkpointing: true}")


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
    both = described("serve", str(path), "l4x2", "--trainer.mesh.axes={data: 1, model: 2}")
    budget = hbm_budget(both)
    assert max(budget.arguments.values()) <= (budget.hbm_bytes or 0)


def test_the_share_of_the_allocator_that_would_be_enough():
    pod = parse_accelerator("l4x1")
    assert gpu_memory_note(parse_accelerator("v4-8"), needed=1) is None
    assert (gpu_memory_note(pod, needed=18 * GIB) or "").endswith("makes it 20.69 GiB, where this run fits")
    for enough in (None, 16 * GIB, 21 * GIB):
        assert (gpu_memory_note(pod, needed=enough) or "").endswith("makes it 20.69 GiB")
