"""Every way out that is printed as one that would fit, compiled with the real TPU compiler: it fits.

The sample is the refused runs of `helpers.plan_cases`, those that the compiler refuses and those whose inputs alone are
too much, and three more that nobody tuned to. Some take the compiler minutes, so CI has none of them.
"""

import importlib.util
import logging
import re
from dataclasses import replace
from typing import Any

import pytest
import yaml
from helpers.plan_cases import CASES, Case

from levanter.plan.compile_cache import CompileCache
from levanter.plan.preflight.pipeline import preflight
from levanter.plan.preflight.state import Question
from levanter.plan.verdict import Verdict
from levanter.runplan import RunPlan, Target

logger = logging.getLogger(__name__)

pytestmark = [
    pytest.mark.aot,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (the `plan` extra)"),
]
SAMPLE: dict[str, tuple[str, tuple[str, ...], bool]] = {
    "405b_as_published": ("405b_as_published", (), False),
    "llama2_70b_v4-256_whole": ("llama2_70b_v4-256_whole", (), True),
    "llama3_8b_v6e-128_embed4": ("llama3_8b_v6e-128_embed4", (), True),
    "llama_0.78b_64k_as_published": ("llama_0.78b_64k_as_published", (), True),
    "as_published_not_compiled": ("llama_0.78b_64k_as_published", (), False),
    "8b_whole": ("llama3_8b_v6e-128", ("--trainer.mesh.param_mapping={embed: null}",), False),
    "7b_kept": ("llama2_7b_v4-32", ("--model.gradient_checkpointing=false",), True),
    "7b_many_rows": ("llama2_7b_v4-32", ("--trainer.train_batch_size=4096",), False),
}
"""Name → case, what is changed of it, and whether the compiler refuses it (else arithmetic does)."""


def words_of(line: str) -> tuple[str, ...] | None:
    """A way out as words of a command line; None where the line promises nothing."""
    found = re.match(r"would fit: (.*?)  # ", line)
    return None if found is None else tuple(f"--{key}={value}" for key, value in _flat("", yaml.safe_load(found[1])))


def _flat(at: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [pair for key, each in value.items() for pair in _flat(f"{at}.{key}" if at else key, each)]
    return [(at, value if value is not None else "null")]


def verdict_of(case: Case, *, compiled: bool) -> Verdict:
    question = Question(
        target=case.target,
        describe=case.describe,
        provider=f"{__file__}:described",
        payload={"config": case.config, "entry_point": case.entry_point, "overrides": list(case.overrides)},
        compile=compiled,
        kept=CompileCache.here() if compiled else None,
    )
    return preflight(question)


def described(payload: dict[str, Any], target: Target) -> RunPlan:
    """What the compile worker calls."""
    case = Case(
        name="",
        entry_point=payload["entry_point"],
        config=payload["config"],
        target=target.name,
        overrides=tuple(payload["overrides"]),
    )
    return case.describe(target)


@pytest.mark.parametrize("name", SAMPLE)
def test_what_would_fit_fits(name):
    base, changes, asks = SAMPLE[name]
    case = replace(CASES[base], overrides=(*CASES[base].overrides, *changes))
    refused = verdict_of(case, compiled=asks)
    assert refused.exit_code == 3, refused.headline
    lines = [program.why_not[-1] for program in refused.programs if program.why_not]
    ways_out = [words for line in lines if (words := words_of(line)) is not None]
    assert len(ways_out) == len(lines) > 0, lines
    for words in ways_out:
        verdict = verdict_of(replace(case, overrides=(*case.overrides, *words)), compiled=True)
        logger.info("%s: %s: %s", name, " ".join(words), verdict.headline)
        assert verdict.exit_code == 0, f"{words}: {verdict.headline}"
