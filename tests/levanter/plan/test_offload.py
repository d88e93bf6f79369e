"""Activations that go to host memory: bytes and seconds against hand arithmetic."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from levanter.commands.train.lm.train_lm import TrainLmConfig, describe
from levanter.config import parse
from levanter.hardware import parse_accelerator
from levanter.plan import offload
from levanter.plan.offload import offloaded_activations
from levanter.plan.preflight.pipeline import preflight
from levanter.plan.preflight.state import Question
from levanter.plan.report import render, to_json
from levanter.plan.step_time_model import StepTime
from levanter.plan.target_from_name import pod_target

PUBLISHED = Path(__file__).parents[3] / "config" / "train" / "published"


def of(config: str, target: str, **overrides: object):
    pod = parse_accelerator(target)
    plan = describe(
        parse(TrainLmConfig, paths=[str(PUBLISHED / f"{config}.yaml")], overrides=overrides), pod_target(pod)
    )
    return offloaded_activations(plan, "train_step", pod=pod)


def test_405b_by_hand():
    """Block inputs, queries, keys, values and the attention's output of 126 layers, cut 64 × 4 ways."""
    found = of("llama3.1_405b_v6e-256", "v6e-256")
    assert found is not None and found.microbatches == 1
    tokens, layers, ways = 256 * 8192 // 64, 126, 4
    stream, queries, keys = 16384, 128 * 128, 8 * 128
    by_hand = 2 * tokens * layers * (2 * stream + queries + 2 * keys) // ways
    assert found.device_bytes == by_hand
    assert set(found.names) == {"residual stream", "query", "key", "value", "attention_output"}
    assert found.host_bytes == 4 * by_hand and found.fits
    assert found.seconds == pytest.approx(by_hand / 15e9)


def test_8b_by_hand_in_microbatches():
    whole = of("llama3.1_8b_v6e-256", "v6e-256")
    parts = of("llama3.1_8b_v6e-256", "v6e-256", trainer={"per_device_parallelism": 1})
    assert whole is not None and parts is not None
    tokens = 4 * 8192
    by_hand = 2 * tokens * 32 * (2 * 4096 + 32 * 128 + 2 * 8 * 128)
    assert (whole.device_bytes, whole.microbatches) == (by_hand, 1)
    # As many bytes cross the link, a quarter of them lies in host memory at a time.
    assert (parts.device_bytes, parts.microbatches) == (by_hand // 4, 4)
    assert parts.seconds == pytest.approx(whole.seconds)
    assert math.isclose(parts.host_bytes * 4, whole.host_bytes)


def test_what_is_kept_on_the_chip_is_not_sent():
    assert of("llama2_7b_v4-32", "v4-32") is None


def test_a_step_takes_at_least_what_is_sent():
    time = StepTime(cycles=1.0, kernels_at_peak=0.0, kernels_expected=0.0, memory=0.0, links=(), transfers=7.0)
    assert (time.low, time.expected, time.bound_by) == (7.0, 7.0, "host transfers")


@pytest.mark.parametrize("room", [None, 100])
def test_a_host_that_has_less_memory_refuses(monkeypatch, room):
    pod = parse_accelerator("v6e-256")
    config = parse(TrainLmConfig, paths=[str(PUBLISHED / "llama3.1_8b_v6e-256.yaml")])
    if room is not None:
        found = offload.offloaded_activations
        monkeypatch.setattr(
            "levanter.plan.preflight.pipeline.offloaded_activations",
            lambda *args, **options: (one := found(*args, **options)) and replace(one, host_limit=room),
        )
    question = Question(
        target=pod.name, describe=lambda target: describe(config, target), provider="", payload={}, compile=False
    )
    verdict = preflight(question)
    text = " ".join(render([verdict]).split())
    assert "to host memory and back" in text and "over each chip's link" in text
    (program,) = (p for p in to_json([verdict])["verdicts"][0]["programs"] if p["name"] == "train_step")
    assert program["offloaded"]["device_bytes"] > 2**33
    if room is None:
        assert verdict.exit_code == 0
    else:
        assert verdict.exit_code == 3 and "host memory" in text and "more than it has" in text
