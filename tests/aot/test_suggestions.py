"""Every suggestion that `plan` calls one that would fit, compiled again with the real TPU compiler: it fits.

The sample is the refused runs of `helpers.plan_cases`, those that the compiler refuses and those whose inputs alone are
too much, three more that nobody tuned to, and the refused runs of `helpers.drawn_steps`. Some take the compiler
minutes, so CI has none of them. `tests/golden/suggestions.json` keeps the suggestions and their bytes.
"""

import importlib.util
import json
import logging
import re
from dataclasses import replace
from typing import Any

import pytest
import yaml
from helpers.drawn_steps import REFUSED
from helpers.golden import GOLDEN, made_with, updating
from helpers.plan_cases import CASES, Case

from levanter.hardware import parse_accelerator
from levanter.plan.compile_cache import CompileCache
from levanter.plan.compilers import has_compiler
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
SAMPLE: dict[str, tuple[str, tuple[str, ...]]] = {
    "405b_as_published": ("405b_as_published", ()),
    "llama2_70b_v4-256_whole": ("llama2_70b_v4-256_whole", ()),
    "llama3_8b_v6e-128_embed4": ("llama3_8b_v6e-128_embed4", ()),
    "llama_0.78b_64k_as_published": ("llama_0.78b_64k_as_published", ()),
    "8b_whole": ("llama3_8b_v6e-128", ("--trainer.mesh.param_mapping={embed: null}",)),
    "7b_kept": ("llama2_7b_v4-32", ("--model.gradient_checkpointing=false",)),
    "7b_many_rows": ("llama2_7b_v4-32", ("--trainer.train_batch_size=4096",)),
}
"""Name → case, and what is changed of it."""
FOUND_NOTHING = (
    "llama3_70b_2xv6e-32",
    "llama3_1b_v5e-1",
    "mixtral_8x7b_h100x64",
    "llama3_8b_v5e-16_32_rows",
    "llama3_8b_v5e-64_64_rows",
)
"""Runs for which nothing was suggested once, though something fits."""

KEPT = GOLDEN / "suggestions.json"


def words_of(line: str) -> tuple[str, ...] | None:
    """A way out as words of a command line; None where the line promises nothing."""
    found = re.match(r"would fit: (?!as configured on)(.*?)  # ", line)
    if found is None:
        return None
    return tuple(f"--{key}={value}" for key, value in _flat("", yaml.safe_load(f"{{{found[1]}}}")))


def _flat(at: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [pair for key, each in value.items() for pair in _flat(f"{at}.{key}" if at else key, each)]
    return [(at, value if value is not None else "null")]


def verdict_of(case: Case) -> Verdict:
    def question(words: tuple[str, ...]) -> Question:
        varied = replace(case, overrides=(*case.overrides, *words))
        return Question(
            target=case.target,
            describe=varied.describe,
            provider=f"{__file__}:described",
            payload={"config": case.config, "entry_point": case.entry_point, "overrides": list(varied.overrides)},
            kept=CompileCache.here(),
            varied=question,
        )

    return preflight(question(()))


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


def cases() -> dict[str, Case]:
    of_sample = {
        name: replace(CASES[base], overrides=(*CASES[base].overrides, *changes))
        for name, (base, changes) in SAMPLE.items()
    }
    return of_sample | {name: step.case for name, step in REFUSED.items()}


@pytest.mark.parametrize("name", cases())
def test_what_would_fit_fits(name):
    case = cases()[name]
    if not has_compiler(parse_accelerator(case.target)):
        pytest.skip(f"there is no compiler of {case.target} here")
    refused = verdict_of(case)
    assert refused.exit_code == 3, refused.headline
    lines = [line for program in refused.programs for line in program.why_not]
    suggested = [words for line in lines if (words := words_of(line)) is not None]
    assert len(suggested) <= 1 and (suggested or name not in (*SAMPLE, *FOUND_NOTHING)), lines
    for words in suggested:
        verdict = verdict_of(replace(case, overrides=(*case.overrides, *words)))
        logger.info("%s: %s: %s", name, " ".join(words), verdict.headline)
        assert verdict.exit_code == 0, f"{words}: {verdict.headline}"
        check_kept(name, words, verdict)


def check_kept(name: str, words: tuple[str, ...], verdict: Verdict) -> None:
    """Compares a suggestion and its bytes with those that are kept of the same compiler, or writes them."""
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    peak = max(program.peak_bytes or 0 for program in verdict.programs)
    if updating():
        kept["made_with"] = made_with()
        kept.setdefault("suggestions", {})[name] = {"words": list(words), "peak_bytes": peak}
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
        return
    if kept["made_with"] != made_with():
        pytest.skip(f"kept of {kept['made_with']}, here is {made_with()}")
    if name not in kept["suggestions"]:
        pytest.skip(f"no bytes of {name} are kept yet; it fits, in {peak} bytes")
    # A cached answer may have the peak without gaps, which is up to 1 % less.
    assert kept["suggestions"][name] == {"words": list(words), "peak_bytes": pytest.approx(peak, rel=0.01)}
