"""What a device holds while weights are exchanged: arithmetic against the TPU compiler.

The spec's promise is a leaf's own shard and one buffer of at most 512 MiB. The plan counts slabs, what is sent, what is
received, and the result; a TPU pads some of these to whole tiles.
"""

import importlib.util

import pytest
from aot import described_exchanges
from helpers.plan_cases import CASES

from levanter.hardware import parse_accelerator
from levanter.plan.aot import Compiled, compile_programs
from levanter.plan.load_budget import beyond_shards, shard_bytes
from levanter.plan.target_from_name import pod_target

pytestmark = [
    pytest.mark.aot,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (the `plan` extra)"),
]
LIMIT = 512 << 20


@pytest.mark.parametrize("name", ["405b_v4-256", "405b_v4-128"])
def test_an_exchange_takes_no_more_than_its_buffer(name):
    case = CASES[name]
    plan = case.describe(pod_target(parse_accelerator(case.target))).load
    assert plan is not None
    pieces = {}
    for step in plan.steps:
        if step.piece is not None:
            pieces.setdefault(plan.step_programs(step)[-1].name, step)
    assert {n.split(".")[-3] for n in pieces} >= {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    payload = {"case": name, "programs": list(pieces)}
    outcomes = compile_programs(f"{described_exchanges.__file__}:exchanges", payload, target=case.target)
    assert len(outcomes) == len(pieces)
    for outcome in outcomes:
        assert isinstance(outcome, Compiled)
        (load,) = pieces[outcome.name].loads
        memory = outcome.memory
        assert memory.alias == shard_bytes(plan, load), "the leaf is changed in place"
        beyond = memory.argument - memory.alias + memory.temp
        planned = beyond_shards(plan, pieces[outcome.name])
        assert planned <= LIMIT
        assert beyond <= LIMIT and beyond <= 1.15 * planned, outcome.name
