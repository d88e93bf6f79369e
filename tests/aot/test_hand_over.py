"""What the TPU compiler makes of handing weights from training to generation: each byte arrives once."""

import importlib.util
from pathlib import Path

import jax.numpy as jnp
import pytest
from helpers.hand_overs import EIGHT, plan_of, received_bytes

from haliax_ext.meshspec import MeshSpec
from levanter.models import LlamaConfig
from levanter.plan.aot import Compiled, compile_programs

pytestmark = [
    pytest.mark.aot,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (the `plan` extra)"),
]
PROGRAM = f"{Path(__file__).parent / 'hand_over_programs.py'}:hand_over"


@pytest.mark.parametrize("int8", [False, True], ids=["bfloat16", "int8"])
def test_each_byte_of_8b_arrives_once(int8):
    """All 32 layers from FSDP over 4 × tensor parallelism over 4 to tensor parallelism alone, on v5e-16."""
    axes = {"data": 4, "model": 4}
    payload = {"axes": axes, "dtype": "bfloat16", "int8": int8}
    (step,) = compile_programs(PROGRAM, payload, target="v5e-16", programs=["hand_over"])
    assert isinstance(step, Compiled) and step.figures is not None, step
    spec = MeshSpec(axes=tuple(axes.items()))
    plan, _ = plan_of(LlamaConfig(**EIGHT), spec, dtype=jnp.dtype("bfloat16"), int8=int8, platform="tpu")
    arriving, reduced = received_bytes(step.figures)
    assert 0.99 * plan.moved_bytes <= arriving <= 1.01 * plan.moved_bytes
    scales = sum(x.bytes_per_device for x in plan.sharding.leaves if x.leaf.path.endswith(".scale"))
    assert reduced <= 2 * scales if int8 else reduced == 0
    # Beside the weights of training lies the copy, and of temporaries less than one more.
    assert step.memory.output <= 1.02 * plan.copied_bytes
