"""Sophia differentiates the loss twice, which kernels of attention do not support: blocks instead, or a refusal."""

# pyright: reportAttributeAccessIssue=false, reportOptionalSubscript=false, reportArgumentType=false

import pytest

from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train.lm.train_lm import describe
from levanter.config import parse_text
from levanter.runplan import RunPlan, Target

TPU = Target(name="v5p-8", platform="tpu", kind="TPU v5p", devices=4)


def plan(optimizer: str, attention: str = "") -> RunPlan:
    model = "hidden_dim: 1024, intermediate_dim: 2048, num_layers: 2, num_heads: 8, num_kv_heads: 8, max_seq_len: 4096"
    text = (
        f"model: {{type: llama, {model}{attention}}}\ndata: {{tokenizer: passthrough, vocab_size: 512}}\n"
        f"optimizer: {{type: {optimizer}}}\ntrainer: {{train_batch_size: 8, mp: 'p=f32,c=bf16'}}\ntrain_seq_len: 4096\n"
    )
    return describe(parse_text(TrainLmConfig, text), TPU)


def test_sophia_picks_blocks_where_others_pick_a_kernel():
    assert plan("adam").work.model.attn_backend == "splash"
    sophia = plan("sophia-h")
    assert sophia.work.model.attn_backend == "blockwise"
    messages = [check.message for check in sophia.checks if check.name == "kernels"]
    assert any("the optimizer differentiates the loss twice" in message for message in messages)


def test_a_kernel_that_is_asked_for_is_refused():
    assert plan("sophia-h", ", attn_backend: reference").work.model.attn_backend == "reference"
    with pytest.raises(ValueError, match=r"sophia-h differentiates the loss twice.*set model\.attn_backend: blockwise"):
        plan("sophia-h", ", attn_backend: splash")
