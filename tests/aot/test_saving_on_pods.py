"""What a device holds while a large array is exported: arithmetic against the TPU compiler.

Gemma 3 27B's embedding is 5.25 GiB in float32; brought whole to every chip, it needed 15.85 GiB of a v5e's 15.75,
before anything else lay there.
"""

import importlib.util
import math

import pytest
from aot import described_savings

from levanter.plan.aot import Compiled, compile_programs
from levanter.plan.compile_cache import CompileCache

pytestmark = [
    pytest.mark.aot,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (the `plan` extra)"),
]
LIMIT = 512 << 20
CASES = [
    pytest.param("gemma3_27b", "v5litepod-16", {"data": 16}, marks=pytest.mark.ci),
    ("gemma3_27b", "v5litepod-256", {"data": 64, "model": 4}),
    ("expert", "v5litepod-16", {"data": 4, "model": 4}),
    ("llama3_405b", "v4-256", {"data": 16, "model": 8}),
]


@pytest.mark.parametrize(("name", "target", "mesh"), CASES)
def test_a_piece_takes_no_more_than_its_buffer(name, target, mesh):
    payload = {"array": name, "mesh": mesh}
    taking = described_savings.taking_of(payload)
    planned = taking.transient_bytes
    assert planned <= LIMIT
    found = compile_programs(f"{described_savings.__file__}:savings", payload, target=target, kept=CompileCache.here())
    assert {each.name for each in found} == {program.name for program in taking.programs}
    for outcome in found:
        assert isinstance(outcome, Compiled)
        memory = outcome.memory
        assert memory.output + memory.temp <= planned, outcome.name
        # Few pieces: what is brought at a time is not much less than what there is room for.
        assert memory.output + memory.temp > planned / 16 or math.prod(taking.part) == math.prod(taking.local)
