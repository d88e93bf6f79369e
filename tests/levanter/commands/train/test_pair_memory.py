"""What a step on pairs takes beside the same adapters' step on text of twice the rows, as compiled: no more.

Both texts of a pair are rows of one forward pass, and the reference's pass keeps nothing. Logits are in chunks: where
one chunk has all positions, the backward pass holds one array of them more (26 % here, most of it being logits).
"""

import json

import jax
import pytest

from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train.dpo import train_dpo
from levanter.commands.train.dpo.config import TrainDpoConfig
from levanter.commands.train.lm import train_lm
from levanter.config import load_written
from levanter.runplan import Target

TARGET = Target(name="local", platform="cpu", kind="cpu", devices=8)
POSITIONS, PAIRS = 128, 2
DOCUMENT = {
    "train_seq_len": POSITIONS,
    "data": {"tokenizer": "passthrough"},
    "adapter": {"type": "lora", "r": 4, "zero_init_b": True, "a_init_mode": "peft"},
}
MODEL = {
    "type": "llama",
    "vocab_size": 2048,
    "max_seq_len": POSITIONS,
    "hidden_dim": 128,
    "intermediate_dim": 512,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 4,
}


def temporaries(command, config_class, rows: int, *, remat: bool, chunk: int, **more) -> int:
    """Bytes on a device."""
    model = {**MODEL, "gradient_checkpointing": remat, "cross_entropy_block_size": chunk}
    document = {**DOCUMENT, **more, "model": model, "trainer": {"train_batch_size": 8 * rows}}
    words = [word for key, value in document.items() for word in (f"--{key}", json.dumps(value))]
    loaded = load_written(config_class, words)
    plan = command.describe(loaded.config, TARGET, written=loaded.written)
    compiled = plan.program("train_step").lower(plan.mesh.build(jax.devices())).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("remat", [False, True])
def test_pairs_take_what_twice_the_rows_take(remat):
    text = temporaries(train_lm, TrainLmConfig, 2 * PAIRS, remat=remat, chunk=16)
    pairs = temporaries(train_dpo, TrainDpoConfig, PAIRS, remat=remat, chunk=16, reference={"type": "adapter_base"})
    block_inputs = MODEL["num_layers"] * 2 * PAIRS * POSITIONS * MODEL["hidden_dim"] * 4
    assert text > 2 * block_inputs, "there must be something to compare"
    assert pairs <= 1.02 * text
