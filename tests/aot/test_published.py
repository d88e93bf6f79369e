"""Modelled step times of a plain JAX Llama beside published ones. Nothing in the model is fitted to them.

Published: Llama 2 7B and 70B at 53 % MFU on v4-32 and v4-256 (PyTorch/XLA, sequence 1024), Llama 3.1 8B at 7,207
tokens/s/chip on v6e-256 (MaxText; it keeps q, k, v and the attention output in host memory where this program
recomputes them, so the program here must be slower). On v4 the partitioner's windowed matmuls are turned off, as
published runs do: on, the compiler itself estimates 36 % more cycles for the same step.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from aot import plain_llama

from levanter.hardware import parse_accelerator
from levanter.plan.aot import Compiled, Outcome, Refused, compile_programs
from levanter.plan.comms import Network
from levanter.plan.cost import StepTime, step_time, training_flops

pytestmark = [
    pytest.mark.aot,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (the `plan` extra)"),
]
HERE = Path(__file__).parent
NOT_WINDOWED = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}


def compile_step(target: str, payload: dict[str, Any], **options: Any) -> Outcome:
    payload = {"changes": {}, "model_ways": 1} | payload
    (outcome,) = compile_programs(f"{HERE / 'plain_llama.py'}:described", payload, target=target, **options)
    return outcome


def time_of(outcome: Outcome, target: str, payload: dict[str, Any]) -> tuple[StepTime, float]:
    """The modelled range and the tokens of one chip and step."""
    assert isinstance(outcome, Compiled) and outcome.figures is not None and outcome.figures.unknown == ()
    sizes, pod = plain_llama.sizes_of({"changes": {}} | payload), parse_accelerator(target)
    flops = training_flops(
        matmul_parameters=sizes.matmul_parameters,
        layers=sizes.layers,
        heads=sizes.heads,
        head_size=sizes.head_size,
        seq=sizes.seq,
    )
    tokens = sizes.batch * sizes.seq
    network = Network.of(outcome.mesh, pod, outcome.coordinates)
    step = step_time(outcome.figures, network, model_flops=flops.causal * tokens)
    assert step is not None
    return step, tokens / pod.chips


@pytest.mark.parametrize(
    ("target", "payload", "published"),
    [
        ("v4-32", {"model": "LLAMA2_7B", "data": 16}, 3467),
        (
            "v4-256",
            {"model": "LLAMA2_70B", "data": 32, "model_ways": 4, "changes": {"residual": "embed"}},
            345,
        ),
    ],
)
def test_v4_as_published(target, payload, published):
    outcome = compile_step(target, payload, compiler_options=NOT_WINDOWED)
    step, tokens = time_of(outcome, target, payload)
    assert tokens / step.high == pytest.approx(published, rel=0.10)
    assert tokens / step.high < tokens / step.low


def test_8b_on_v6e():
    payload = {"model": "LLAMA31_8B", "data": 256}
    outcome = compile_step("v6e-256", payload)
    step, tokens = time_of(outcome, "v6e-256", payload)
    # libtpu 0.0.42.1; a hand sum that overlooked one copy a layer gave 2.09 s.
    assert step.cycles == pytest.approx(2.13, rel=0.05)
    assert tokens / step.low == pytest.approx(7207, rel=0.10)
    # Three kinds of weights-sized collectives a layer, all over `data`.
    assert [link.over for link in step.links] == ["data"]


def test_70b_with_a_whole_residual_is_refused():
    payload = {"model": "LLAMA2_70B", "data": 32, "model_ways": 4, "changes": {"residual": "whole"}}
    outcome = compile_step("v4-256", payload)
    assert isinstance(outcome, Refused)
    assert 31.5 < outcome.refusal.needed / (1 << 30) < 33
    assert outcome.refusal.available == round(30.75 * (1 << 30))
