"""Published training speeds on GPUs of other people's code, and the same shapes as runs of ours."""

from dataclasses import dataclass
from typing import Any

import pytest

from levanter.commands.train.lm.train_lm import TrainLmConfig, describe
from levanter.config import parse
from levanter.hardware import parse_accelerator
from levanter.plan.target_from_name import pod_target
from levanter.runplan import RunPlan


@dataclass(frozen=True)
class Published:
    """A row of the training benchmarks of MosaicML's llm-foundry: MPT under PyTorch FSDP, in 16 bits."""

    target: str
    size: str
    seq: int
    microbatch: int
    rows: int
    recomputed: bool
    tokens: int
    parameters: float
    saved: tuple[str, ...] = ()
    """Activations of a block that are kept although it is recomputed."""
    replicated: bool = False
    """Whether every host holds all parameters, sharded over its GPUs."""


SIZES = {"7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 48, 56), "70b": (8192, 80, 64)}
"""Width, layers, heads."""
ROWS = (
    Published("h100x8", "7b", 2048, 6, 48, False, 10643, 6.659e9),
    Published("h100x8", "7b", 4096, 16, 256, True, 8611, 6.667e9),
    Published("h100x16", "13b", 2048, 2, 32, False, 4767, 12.854e9),
    Published("h100x64", "70b", 2048, 8, 2048, True, 1039, 64.862e9),
    Published("h100x32", "30b", 2048, 14, 1344, True, 2308, 29.975e9),
    Published("a100x8", "30b", 2048, 3, 504, True, 916, 29.975e9),
    Published("a100x64", "70b", 2048, 8, 2048, True, 410, 64.862e9),
)


LLAMA = {
    "llama3-8b": (4096, 14336, 32, 32, 8, 128256),
    "llama2-7b": (4096, 11008, 32, 32, 32, 32000),
    "llama2-13b": (5120, 13824, 40, 40, 40, 32000),
    "llama2-70b": (8192, 28672, 80, 64, 8, 32000),
    "llama3-70b": (8192, 28672, 80, 64, 8, 128256),
}
"""Width, features of the MLP, layers, heads, heads with keys and values, vocabulary."""
HELD_OUT = (
    Published("a100x64", "llama2-13b", 4096, 2, 128, False, 2162, 13.016e9),
    Published("a100x64", "llama2-70b", 4096, 2, 128, True, 353, 68.977e9),
    Published("a100x64", "llama3-70b", 8192, 1, 64, True, 331, 70.554e9),
    Published("h100x8", "llama3-8b", 8192, 2, 16, True, 6667, 8.030e9),
    Published("h100x128", "llama3-8b", 8192, 2, 256, True, 6514, 8.030e9),
)
"""torchtitan's benchmarks of Llama under FSDP2, which no share of peak was read off: A100 as in its docs/performance.md
of 2024, H100 of December 2024 (compiled; cards of 500 W with 2.4 TB/s). Those of 8 B recompute every second product:
taken as recomputed, since they would be 50 % slower than the estimate otherwise. Speeds are tokens a second and GPU."""


_PRODUCTS = ("query", "key", "value", "attention", "attention_output", "gate", "up")
_PROJECTIONS = ("query", "key", "value")
JAX_ROWS = (
    Published("h100x8", "llama2-7b", 4096, 2, 16, True, 11362, 6.738e9, saved=_PRODUCTS),
    Published("h100x8", "llama2-7b", 4096, 4, 32, True, 10676, 6.738e9, saved=_PRODUCTS),
    Published("h100x256", "llama2-7b", 4096, 4, 1024, True, 10923, 6.738e9, saved=_PRODUCTS, replicated=True),
    Published("h100x64", "llama2-70b", 4096, 2, 128, True, 1170, 68.977e9, saved=_PROJECTIONS),
    Published("h100x128", "llama2-70b", 4096, 2, 256, True, 1158, 68.977e9, saved=_PROJECTIONS),
    Published("h100x128", "llama3-70b", 8192, 2, 256, True, 1052, 70.554e9, saved=_PROJECTIONS),
    Published("h200x256", "llama3-70b", 8192, 2, 512, True, 1056, 70.554e9, saved=_PRODUCTS[:5]),
)
"""MaxText with cuDNN's attention in bf16: NVIDIA's JAX-Toolbox (25.10) and MaxText's A3 page for 7 B on one host,
Google's recipes for A3 Mega and A3 Ultra (H200), NVIDIA's DGX Cloud recipes for 70 B on H100. What they save of a block
is their policy `minimal_flash` (all products), `save_qkv_proj`, or `save_dot_with_context_except_mlp`."""


def model_of(row: Published) -> dict[str, object]:
    if row.size in SIZES:
        width, layers, heads = SIZES[row.size]
        sizes = {"type": "gpt2", "num_heads": heads, "mlp_scale": 4, "vocab_size": 50432}
    else:
        width, features, layers, heads, kv, vocab = LLAMA[row.size]
        sizes = {"type": "llama", "intermediate_dim": features, "num_heads": heads, "num_kv_heads": kv}
        sizes |= {"vocab_size": vocab}
    remat: bool | dict[str, list[str]] = {"save_block_internals": list(row.saved)} if row.saved else row.recomputed
    checkpointing = {"max_seq_len": row.seq, "gradient_checkpointing": remat}
    return {"hidden_dim": width, "num_layers": layers, **sizes, **checkpointing}


def document(row: Published, **trainer: object) -> dict[str, Any]:
    """The run as a configuration.

    Args:
        row: what was published.
        trainer: options in addition.
    """
    target = parse_accelerator(row.target)
    # All chips hold a share of everything, as FULL_SHARD has it.
    across = {"embed": ["replica_dcn", "data"]} if target.slices > 1 and not row.replicated else {"embed": "data"}
    return {
        "model": model_of(row),
        "data": {"tokenizer": "no-such/tokenizer", "components": {"a": {"source": {"train_urls": ["a.txt"]}}}},
        "trainer": {
            "mp": "p=f32,c=bfloat16", "train_batch_size": row.rows, "per_device_parallelism": row.microbatch,
            "num_train_steps": 1, "mesh": {"param_mapping": across}, **trainer,
        },
    }  # fmt: skip


def planned(row: Published, **trainer: object) -> RunPlan:
    """The run's plan."""
    return describe(parse(TrainLmConfig, overrides=document(row, **trainer)), pod_target(parse_accelerator(row.target)))


def published_seconds(row: Published, plan: RunPlan) -> float:
    """The seconds of a step as published, of the same model: its parameters to bias terms and positions."""
    assert not isinstance(plan.searchable, str)
    ours = sum(leaf.nbytes // leaf.dtype.itemsize for leaf in plan.searchable.parameters)
    assert ours == pytest.approx(row.parameters, rel=0.02)
    return plan.workloads[0].tokens / (row.tokens * parse_accelerator(row.target).devices)
