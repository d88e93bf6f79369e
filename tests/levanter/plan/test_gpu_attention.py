"""What the other attention kernel would cost: arithmetic by hand, and which runs have a choice."""

from collections.abc import Mapping

import pytest

from levanter.commands.train.lm.train_lm import TrainLmConfig, describe
from levanter.config import parse
from levanter.hardware import parse_accelerator
from levanter.plan.gpu_attention import attention_cost, attention_note
from levanter.plan.target_from_name import pod_target

LLAMA = {
    "type": "llama", "hidden_dim": 1024, "intermediate_dim": 2048, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4,
    "head_dim": 128, "vocab_size": 32000, "max_seq_len": 4096,
}  # fmt: skip


def planned(target: str, *, separate: bool = True, trainer: Mapping[str, object] | None = None, **model: object):
    run = {
        "model": LLAMA | model,
        "data": {
            "tokenizer": "passthrough",
            "components": {"a": {"source": {"train_urls": ["a.txt"]}}},
            "block_cross_document_attention": separate,
        },
        "trainer": {"mp": "p=f32,c=bfloat16", "train_batch_size": 16, "num_train_steps": 1, **(trainer or {})},
    }
    return describe(parse(TrainLmConfig, overrides=run), pod_target(parse_accelerator(target)))


def test_seconds_and_bytes_by_hand():
    """2 rows of 4,096 tokens a GPU, 8 heads of 128, 4 layers, recomputed."""
    plan, pod = planned("h100x8"), parse_accelerator("h100x8")
    assert not isinstance(plan.searchable, str)
    kernel, blocks, plain = (
        attention_cost(plan, plan.searchable, pod, name) for name in ("cudnn", "blockwise", "reference")
    )
    # Products of 2 · rows · heads · (4096² / 2) · 128 operations: 2 forward, 2 again, 5 backward, in 4 layers.
    assert kernel.seconds == pytest.approx(9 * 2 * 2 * 8 * 4096**2 / 2 * 128 * 4 / (989e12 * 0.5)) and not kernel.nbytes
    scores = 2 * 8 * 4096**2
    assert blocks.seconds == pytest.approx(4 * scores * (23 + 23 + 64) / (3350e9 * 0.85))
    assert plain.seconds == pytest.approx(4 * scores * (24 + 18 + 24) / (3350e9 * 0.85))
    assert blocks.nbytes == 2 * 4 * 2 * 8 * 4096 * 512 and plain.nbytes == 2 * 4 * scores
    saved = planned("h100x8", gradient_checkpointing=False)
    assert not isinstance(saved.searchable, str)
    assert attention_cost(saved, saved.searchable, pod, "cudnn").seconds == pytest.approx(kernel.seconds * 7 / 9)


@pytest.mark.parametrize(
    ("target", "options", "expected"),
    [
        ("h100x8", {}, ("cudnn, ", "attn_backend: blockwise it would", "of scores")),
        ("h100x8", {"attn_backend": "blockwise"}, ("blockwise, ", "attn_backend: cudnn it would")),
        ("h100x8", {"max_seq_len": 1024}, ("cudnn, ", "attn_backend: reference it would")),
        ("a100x8", {}, ("blockwise, ", "attn_backend: cudnn and data.block_cross_document_attention: false it")),
        ("a100x8", {"separate": False}, ("cudnn, ", "attn_backend: blockwise it would")),
        # Nothing else is possible, or the kernel is not of this project's GPU choices.
        ("h100x8", {"trainer": {"mp": "float32"}}, None),
        ("h100x8", {"attn_backend": "jax_native"}, None),
        ("v5e-8", {}, None),
    ],
)  # fmt: skip
def test_the_note(target, options, expected):
    note = attention_note(planned(target, **options), parse_accelerator(target))
    assert (note is None) == (expected is None)
    assert all(part in (note or "") for part in expected or ())
