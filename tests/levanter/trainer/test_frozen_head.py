"""A head that nobody trains, cut over the devices that share the batch: it is gathered once, not for each chunk."""

import json
import re

import jax
import pytest

from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train.dpo.config import TrainDpoConfig
from levanter.commands.train.dpo.train_dpo import describe as describe_pairs
from levanter.commands.train.lm.train_lm import ENTRY_POINT, describe
from levanter.config import load_written
from levanter.runplan import Target

VOCAB, EMBED, CHUNKS = 4096, 64, 4
TARGET = Target(name="local", platform="cpu", kind="cpu", devices=8)
DOCUMENT = {
    "model": {
        "type": "llama",
        "vocab_size": VOCAB,
        "max_seq_len": 64,
        "hidden_dim": EMBED,
        "intermediate_dim": 128,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 4,
        "cross_entropy_block_size": 64 // CHUNKS,
    },
    "train_seq_len": 64,
    "data": {"tokenizer": "passthrough"},
    "adapter": {"type": "lora", "r": 4, "zero_init_b": True, "a_init_mode": "peft"},
    "trainer": {"mp": "p=f32,c=bfloat16", "train_batch_size": 8, "mesh": {"param_mapping": {"embed": "data"}}},
}


def check_gathers(text: str) -> None:
    gathers = [line for line in text.splitlines() if re.search(rf"\[{VOCAB},{EMBED}\]\S* all-gather", line)]
    assert gathers, "the head is whole where it multiplies"
    named = [name[1] for line in gathers if (name := re.search(r'op_name="([^"]*)"', line))]
    assert not [name for name in named if "scan(chunks)/while/body" in name]


def words(document: dict) -> list[str]:
    return [word for key, value in document.items() for word in (f"--{key}", json.dumps(value))]


@pytest.mark.parametrize(
    "described",
    [pytest.param(describe, marks=pytest.mark.slow), ENTRY_POINT.describe_full_finetune],
    ids=["adapters", "full"],
)
def test_a_head_is_gathered_outside_of_the_loop_over_chunks(described):
    loaded = load_written(TrainLmConfig, words(DOCUMENT))
    plan = described(loaded.config, TARGET, written=loaded.written)
    check_gathers(plan.program("train_step").lower(plan.mesh.build(jax.devices())).compile().as_text())


@pytest.mark.parametrize("program", ["train_step", pytest.param("evaluate_pairs", marks=pytest.mark.slow)])
def test_of_pairs_it_is_gathered_once_for_each_model_at_most(program):
    """What has a derivative for each token, and what has none: the policy, and the reference it is compared with."""
    loaded = load_written(TrainDpoConfig, words({**DOCUMENT, "reference": {"type": "adapter_base"}}))
    plan = describe_pairs(loaded.config, TARGET, written=loaded.written)
    check_gathers(plan.program(program).lower(plan.mesh.build(jax.devices())).compile().as_text())
