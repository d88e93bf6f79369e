"""How a step goes through its head, by hand arithmetic; what the lowered step does is counted beside its plan."""

import math
import re
from typing import Any

import numpy as np
import pytest

from haliax_ext.mapping import AxisMapping
from haliax_ext.meshspec import MeshSpec
from levanter.commands.train.lm.train_lm import TrainLmConfig, describe
from levanter.config import parse
from levanter.models.llama.config import LlamaConfig
from levanter.models.lm_head.plan import plan_head
from levanter.runplan import Target

MIB = 1 << 20
LOCAL = Target(name="local", platform="cpu", kind="cpu", devices=1)


def planned(*, rows, positions, vocab, platform, devices=1, embed=256, **given: Any):
    config = LlamaConfig(hidden_dim=embed, num_heads=4, num_kv_heads=4, num_layers=1, **given.pop("model", {}))
    return plan_head(
        config,
        batch=("batch", rows),
        positions=positions,
        vocab=vocab,
        mapping=AxisMapping({"batch": "data"}),
        mesh=MeshSpec.of(data=devices),
        dtype=np.dtype(np.float32),
        platform=platform,
        **given,
    )


def test_accelerators_take_large_chunks():
    # Llama 3.1 8B, one sequence a chip: 523 positions of 128,256 float32 logits are 256 MiB; 512 divide 8,192.
    found = planned(rows=128, positions=8192, vocab=128256, platform="tpu", devices=128, embed=4096)
    assert (found.chunk, found.chunks, found.positions) == (523, 16, 512)
    assert found.logits_bytes == 512 * 128256 * 4 and found.all_bytes == 16 * found.logits_bytes
    assert found.products == 3
    assert found.kept_bytes == 8192 * 4096 * 4 + 4096 * 128256 * 4
    assert str(found) == (
        "16 chunks of 512 positions, 250.50 MiB of float32 logits on a device at a time: as many as 256.00 MiB hold, "
        "since each chunk reads the head and reads and writes its gradient (1.96 GiB); 3 products of the logits' size, "
        "and no logits are kept for the backward pass (3.91 GiB for all positions, which would spare no product), only "
        "gradients: 2.08 GiB"
    )


@pytest.mark.parametrize(
    ("rows", "vocab", "positions"),
    [
        # 32 MiB are 170 tokens, fewer than the 512 below which the head is all that moves.
        (8, 49152, 64),
        # 32 MiB are 2,048 tokens.
        (8, 4096, 256),
        # 512 tokens of one row.
        (1, 128256, 512),
        # 512 tokens would be 1.25 GiB; what a device may hold is less.
        (2, 327680, 102),
    ],
)
def test_cpus_take_chunks_near_their_caches(rows, vocab, positions):
    found = planned(rows=rows, positions=2048, vocab=vocab, platform="cpu")
    assert found.chunk == positions
    assert planned(rows=rows, positions=2048, vocab=vocab, platform="gpu").chunk == max(
        1, 256 * MIB // (4 * rows * vocab)
    )


def test_whoever_asks_for_a_chunk_has_it():
    common: dict[str, Any] = dict(rows=8, positions=256, vocab=49152, platform="cpu")
    by_model = planned(**common, model={"cross_entropy_block_size": 100})
    assert by_model.chunk == 100 and by_model.chunks == 4 and "cross_entropy_block_size is 100" in str(by_model)
    by_objective = planned(**common, model={"cross_entropy_block_size": 100}, requested_chunk=7)
    assert by_objective.chunk == 7 and "the objective asks for 7" in str(by_objective)


def test_what_is_not_differentiated_takes_no_product():
    common: dict[str, Any] = dict(rows=2, positions=16, vocab=40, platform="cpu")
    head_alone = planned(**common, learned=("head",))
    assert head_alone.products == 2 and head_alone.kept_bytes == 40 * 256 * 4
    frozen = planned(**common, learned=("activations",))
    assert frozen.products == 2 and frozen.kept_bytes == 2 * 16 * 256 * 4
    later = planned(**common, in_loop=False)
    assert later.products == 4 and "4 products of the logits' size" in str(later)
    assert "all 16 positions at once" in str(later) and "few enough" in str(later)


@pytest.mark.parametrize(
    ("tied", "trainable", "products"),
    [
        (False, None, 3),
        (True, None, 3),
        (False, ["lm_head"], 2),
        (False, ["**.q_proj"], 2),
        (True, ["**.q_proj"], 2),
    ],
)
def test_a_step_does_what_its_plan_says(tied, trainable, products):
    """Products and logits are counted in the lowered text of the Program, which knows nothing of the plan."""
    vocab, rows, positions = 4096, 12, 1024
    overrides = {
        "data.tokenizer": "passthrough",
        "data.vocab_size": vocab,
        "model": {
            "type": "llama",
            "max_seq_len": positions,
            "hidden_dim": 32,
            "intermediate_dim": 48,
            "num_layers": 1,
            "num_heads": 2,
            "num_kv_heads": 2,
            "tie_word_embeddings": tied,
        },
        "trainer.train_batch_size": rows,
        "trainer.trainable": trainable,
    }
    plan = describe(parse(TrainLmConfig, overrides=overrides), LOCAL)
    (note,) = [check.message for check in plan.checks if check.name == "output head"]
    said = re.match(r"([\d,]+) chunks of ([\d,]+) positions, ([\d.]+) MiB.*; (\d) products", note)
    assert said is not None, note
    chunks, in_chunk, mib, counted = (float(number.replace(",", "")) for number in said.groups())
    text = plan.program("train_step").lower(plan.mesh.abstract(), platform="cpu").as_text()
    assert counted == products == len(re.findall(rf"dot_general.*[<x]{vocab}x", text))
    # The largest array with an axis of the vocabulary is a chunk's logits, in the order of their product.
    arrays = [[int(n) for n in shape.split("x")] for shape in re.findall(r"tensor<([\dx]+)xf32>", text)]
    logits = max((shape for shape in arrays if vocab in shape), key=math.prod)
    assert math.prod(logits) * 4 == mib * MIB and math.prod(logits) == rows * in_chunk * vocab
    assert chunks * in_chunk == positions


def test_one_cpu_turns_no_table_around_and_copies_none(devices):
    """A step of a wide head and few tokens, as a run describes it, compiled.

    The head's gradient is made as the head lies, and tables are written in place, whatever norms are reported.
    """
    vocab, embed = 384, 64
    overrides = {
        "data.tokenizer": "passthrough",
        "data.vocab_size": vocab,
        "model": {
            "type": "llama",
            "max_seq_len": 16,
            "hidden_dim": embed,
            "intermediate_dim": 48,
            "num_layers": 1,
            "num_heads": 2,
            "num_kv_heads": 2,
        },
        "trainer.train_batch_size": 2,
    }
    plan = describe(parse(TrainLmConfig, overrides=overrides), LOCAL)
    text = plan.program("train_step").lower(plan.mesh.build(devices[:1])).compile().as_text()
    entry = text[text.index("ENTRY") :]
    made = re.findall(rf"= f32\[{vocab},{embed}\]\S* ([\w-]+)\(", entry)
    assert made.count("parameter") == 6 and made.count("fusion") >= 8
    assert "copy" not in made and "transpose" not in made, made
    assert f"f32[{embed},{vocab}]" not in text
