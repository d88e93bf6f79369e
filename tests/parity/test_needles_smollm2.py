"""Needles in the whole context of SmolLM2-135M, 8,192 tokens: three tasks at two lengths; one device and eight."""

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers.torch_smollm2 import MODEL

from levanter.commands.cli.devices import local_target
from levanter.commands.evaluate.needles.config import EvalNeedlesConfig
from levanter.commands.evaluate.needles.run import NeedlesResult, describe, execute
from levanter.config import parse
from levanter.eval.needles.results import summarize_needles
from levanter.mesh import describe_devices
from levanter.runplan import Session

TASKS = ("niah_single_1", "niah_multikey_1", "vt")
# Two to six minutes a case on a busy machine: 78,000 tokens of 135 million weights, and attention over 8,192 of them.
pytestmark = [pytest.mark.slow, pytest.mark.optimized, pytest.mark.timeout(3600)]
ONE, RING = "{data: 1, context: 1}", "{data: 1, context: 8}"


def asked(folder: Path, axes: str, devices: int, **keys: str) -> NeedlesResult:
    overrides: dict[str, Any] = {"hf_checkpoint": MODEL, "trainer.mp": "f32", "output_path": str(folder), **keys}
    overrides |= {"trainer.mesh.axes": axes, "trainer.mesh.compute_mapping": "{position: context}"}
    overrides |= {"trainer.mesh.attention_mapping": "ring"}
    config, some = parse(EvalNeedlesConfig, overrides=overrides), jax.devices()[:devices]
    plan = describe(config, local_target(describe_devices(some, config.trainer.mesh))).check()
    return execute(plan, plan.mesh.build(some), Session())


def test_one_device_and_eight_find_the_same(tmp_path):
    keys = {"tasks": "[niah_single_1]", "lengths": "[4096]", "samples": "1"}
    ((question, one),) = asked(tmp_path / "one", ONE, 1, **keys).answered
    ((_, eight),) = asked(tmp_path / "eight", RING, 8, **keys).answered
    assert 4000 < len(question.tokens) < 4096 and one.ranks == eight.ranks
    np.testing.assert_allclose(eight.logprobs, one.logprobs, atol=2e-4, rtol=0)
    assert -sum(one.logprobs) / len(one.logprobs) < math.log(10)


@pytest.mark.parametrize("length", [4096, 8192])
@pytest.mark.parametrize("task", TASKS)
def test_three_tasks_at_4k_and_8k(task, length, tmp_path, record_property):
    """A task and a length at a time, so that each ends within minutes; eight devices, a ring."""
    keys = {"tasks": f"[{task}]", "lengths": f"[{length}]", "samples": "2"}
    done = asked(tmp_path / "all", RING, 8, **keys)
    summary = summarize_needles(done.answered, depths=5)
    assert summary["questions"] == 2 and summary["tasks"].keys() == {task}
    row = summary["tasks"][task][str(length)]
    assert summary["tasks"][task].keys() == {str(length)}
    record_property("found", f"{row['score']:.0%}, {row['nats_per_token']:.3f} nats per token")
    assert 0.95 * length < row["tokens"] <= length
    assert math.isfinite(row["nats_per_token"]) and 0 <= row["score"] <= 1
    if task == "niah_single_1":
        # Better than knowing that digits follow.
        assert row["nats_per_token"] < math.log(10)
