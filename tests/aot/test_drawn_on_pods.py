"""First weights are judged by arithmetic (`levanter.plan.init_memory`): the compiler needs no more, whatever their
shapes.

The compiler takes a minute for each of these Programs, which is why it is not asked for them; here it is.
"""

import importlib.util
from dataclasses import replace

import pytest
from helpers.plan_cases import CASES, Case

from levanter.plan.aot import Compiled, compile_programs
from levanter.plan.compile_cache import CompileCache
from levanter.plan.init_memory import init_memory
from levanter.plan.target_from_name import pod_target
from levanter.runplan import RunPlan, Target

pytestmark = [
    pytest.mark.aot,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (the `plan` extra)"),
]
SMALL_HEADS = (
    "--model={type: gpt2, hidden_dim: 768, num_layers: 12, num_heads: 12, mlp_scale: 4, max_seq_len: 1024, "
    "vocab_size: 50257}",
)
SAMPLE: dict[str, tuple[str, tuple[str, ...]]] = {
    # Every array over all chips, and heads of 64 in pieces of 32 that tiles pad to twice their bytes.
    "1b_v6e-64": ("llama_1b_v6e-64", ()),
    # Everything replicated: nothing is smaller on a chip than it is.
    "0.78b_whole": ("llama_0.78b_64k_as_published", ()),
    # Tensor parallelism beside it.
    "0.78b_tp4": ("llama_0.78b_64k_tp4", ()),
    "70b_v4-256": ("llama2_70b_v4-256", ()),
    # Biases, positions, heads of 64, a vocabulary that nothing divides.
    "gpt2": ("llama_100m_v6e-8", SMALL_HEADS),
}


def described(payload: dict, target: Target) -> RunPlan:
    """What the compile worker calls."""
    return case_of(payload["name"]).describe(target)


def case_of(name: str) -> Case:
    base, changes = SAMPLE[name]
    return replace(CASES[base], overrides=(*CASES[base].overrides, *changes))


@pytest.mark.parametrize("name", SAMPLE)
def test_the_compiler_needs_no_more_than_arithmetic_says(name):
    case = case_of(name)
    plan = case.describe(pod_target(case.target))
    ((program, drawn),) = init_memory(plan).items()
    (outcome,) = compile_programs(
        f"{__file__}:described",
        {"name": name},
        target=case.target,
        programs=(program,),
        kept=CompileCache.here(),
        plan=plan,
    )
    assert isinstance(outcome, Compiled)
    said = f"{name}: {outcome.peak_bytes} of {drawn.total}, {drawn.results} of them results"
    assert outcome.peak_bytes <= drawn.total, said
    # It is a bound, and no other one: the results are most of it.
    assert outcome.peak_bytes >= 0.99 * drawn.results, said
