"""What `test_exchange_on_pods` compiles: Programs that exchange a checkpoint's weights, of a shipped run."""

from dataclasses import replace
from typing import Any

from helpers.plan_cases import CASES

from levanter.runplan import RunPlan, Target


def exchanges(payload: dict[str, Any], target: Target) -> RunPlan:
    """The plan of a case, with those of its loading Programs that are asked for."""
    plan = CASES[payload["case"]].describe(target)
    assert plan.load is not None
    return replace(plan, computing=tuple(p for p in plan.load.programs if p.name in payload["programs"]), load=None)
