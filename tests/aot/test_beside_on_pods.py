"""A run fits if everything that it does fits beside what stays on the chips meanwhile, by the real TPU compiler.

Evaluating wants the parameters; the optimizer's two moments lie there all the same. A Llama of 0.54 B parameters on one
chip of v5e evaluates 352 rows in less than a chip by itself, and in more than one beside its moments.
"""

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
from helpers.plan_cases import CASES, Case

from levanter.plan.aot import Compiled
from levanter.plan.compile_cache import CompileCache
from levanter.plan.preflight.pipeline import Question, preflight
from levanter.runplan import RunPlan, Target

pytestmark = [
    pytest.mark.aot,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (the `plan` extra)"),
]
SOURCE = "{type: url, train_urls: ['s3://b/t.jsonl'], validation_urls: ['s3://b/v.jsonl']}"
SMALL = (
    "--model.hidden_dim=2048", "--model.intermediate_dim=5632", "--model.num_layers=8", "--model.num_heads=16",
    "--model.num_kv_heads=16", "--trainer.train_batch_size=8", f"--data.components={{web: {{source: {SOURCE}}}}}",
)  # fmt: skip


def case_of(rows: int) -> Case:
    words = (*SMALL, f"--trainer.per_device_eval_parallelism={rows}")
    return replace(CASES["llama2_7b_v4-32"], target="v5litepod-1", overrides=words)


def described(payload: dict[str, Any], target: Target) -> RunPlan:
    """What the compile worker calls."""
    return case_of(payload["rows"]).describe(target)


@pytest.mark.parametrize(("rows", "exit_code"), [(32, 0), (352, 3)])
def test_what_stays_beside_an_evaluation_counts(rows, exit_code):
    question = Question(
        target="v5litepod-1",
        describe=case_of(rows).describe,
        provider=f"{__file__}:described",
        payload={"rows": rows},
        scope="run",
        kept=CompileCache.here(),
    )
    verdict = preflight(question)
    assert verdict.exit_code == exit_code, verdict.headline
    (found,) = [program for program in verdict.programs if program.name == "evaluate"]
    assert verdict.plan is not None and isinstance(found.outcome, Compiled)
    limit = verdict.plan.target.limit_bytes
    assert limit is not None and found.peak_bytes is not None
    # By itself it fits either way: the compiler refuses neither.
    assert found.outcome.peak_bytes <= limit
    assert (found.peak_bytes > limit) == (exit_code == 3)
    assert exit_code == 0 or "evaluate" in verdict.headline
