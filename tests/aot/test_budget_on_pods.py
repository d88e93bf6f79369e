"""Bytes by arithmetic against the TPU compiler: the inputs of Programs.

A TPU stores arrays in tiles, (8, 128) elements of 32 bits over the two innermost axes. Shards whose sizes are multiples
of a tile take their bytes exactly; what is padded is small arrays, a scalar to a whole tile. So the compiler's count is
never below ours, and above it by little.
"""

import importlib.util
import json
from pathlib import Path

import pytest
from aot import described_budgets

from levanter.plan.aot import Compiled, compile_programs
from levanter.plan.hbm_budget import hbm_budget
from levanter.plan.target_from_name import pod_target

pytestmark = [
    pytest.mark.aot,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (the `plan` extra)"),
]
DESCRIBED = Path(described_budgets.__file__)


def config(tmp_path, *, mp: str, num_heads: int) -> str:
    """A Llama of four layers 1024 wide, of about 80 million parameters."""
    document = {
        "data": {"tokenizer": "passthrough", "vocab_size": 32768},
        "model": {
            "type": "llama",
            "max_seq_len": 512,
            "hidden_dim": 1024,
            "intermediate_dim": 2816,
            "num_layers": 4,
            "num_heads": num_heads,
            "num_kv_heads": 4,
        },
        "trainer": {
            "num_train_steps": 10,
            "train_batch_size": 16,
            "mp": mp,
            "mesh": {"axes": {"data": -1, "model": 2}, "shared_mapping": {"vocab": "model"}},
        },
    }
    path = tmp_path / "train.yaml"
    path.write_text(json.dumps(document))
    return str(path)


@pytest.mark.parametrize(
    ("target", "program", "mp", "num_heads"),
    [
        ("v4-8", "score", "p=f32,c=bf16", 8),
        ("v5p-8", "train_step", "p=bf16,c=bf16", 8),
        ("v6e-8", "score", "p=f32,c=bf16", 8),
    ],
)
def test_inputs_as_the_compiler_counts_them(target, program, mp, num_heads, tmp_path):
    payload = {"path": config(tmp_path, mp=mp, num_heads=num_heads)}
    budget = hbm_budget(described_budgets.training(payload, pod_target(target)))
    (outcome,) = compile_programs(f"{DESCRIBED}:training", payload, target=target, programs=(program,))
    assert isinstance(outcome, Compiled)
    exact = budget.arguments[program]
    assert exact <= outcome.memory.argument <= 1.03 * exact
    if program == "train_step":
        # Gradients are among what is made on the way, and not all of it.
        assert budget.gradients > 0.01 * exact
        assert outcome.memory.temp > budget.gradients
