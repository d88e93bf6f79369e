"""Llama 3.1 405B in 8-bit integers: what the TPU compiler needs to score with it, on the pods that docs/405b.md names.

Only the Program that scores is compiled, not those of loading: `plan` compiles them all, in some minutes.
"""

import importlib.util
from pathlib import Path

import pytest

from levanter.hardware import parse_accelerator
from levanter.plan.aot import Compiled, compile_programs

pytestmark = [
    pytest.mark.aot,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (the `plan` extra)"),
]
GIB = 1 << 30
CONFIGS = Path(__file__).parents[2] / "config"
# 126 layers of q and o, k and v, and an MLP of three matrices; the head. The table stays bf16.
INTEGERS = 126 * (2 * 16384**2 + 2 * 1024 * 16384 + 3 * 53248 * 16384) + 128256 * 16384
TABLE = 2 * 128256 * 16384


@pytest.mark.parametrize(
    ("entry_point", "config", "changed", "target", "within"),
    [
        ("eval_lm", "eval/llama3.1_405b_int8", (), "v4-32", (24.0, 26.0)),
        ("eval_lm", "eval/llama3.1_405b_int8", (), "v5e-32", (12.5, 14.5)),
        # 512 windows at a time, as the configuration has them.
        ("eval_careless_lm", "memorization/llama3.1_405b_int8", (), "v4-32", (26.0, 28.0)),
        ("eval_careless_lm", "memorization/llama3.1_405b_int8", (), "v5e-32", (11.9, 15.75)),
        ("eval_careless_lm", "memorization/llama3.1_405b_int8", ("--eval_batch_size=1024",), "v4-32", (28.0, 30.75)),
    ],
)
def test_it_fits(entry_point, config, changed, target, within):
    payload = {"entry_point": entry_point, "argv": ["--config_path", str(CONFIGS / f"{config}.yaml"), *changed]}
    (found,) = compile_programs("levanter.main.plan:describe", payload, target=target, programs=["score"])
    assert isinstance(found, Compiled), found
    chips = parse_accelerator(target).devices
    low, high = within
    assert low * GIB < found.memory.argument + found.memory.temp < high * GIB
    assert found.memory.argument == pytest.approx((INTEGERS + TABLE) / chips, rel=0.01)
