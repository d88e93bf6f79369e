"""Selects the Programs that preflight compiles, and counts the memory that is co-resident with each of them."""

from collections.abc import Mapping

from haliax_ext.errors import gib
from levanter.plan.aot import Compiled, Outcome
from levanter.plan.hbm_budget import Budget
from levanter.plan.init_memory import InitMemory, init_memory
from levanter.plan.load_budget import loading_coresident_bytes
from levanter.plan.preflight.state import Scope
from levanter.runplan import RunPlan


def known_to_fit(plan: RunPlan, scope: Scope) -> Mapping[str, InitMemory]:
    """Programs that are not compiled because an upper bound of their memory fits, with that bound."""
    limit = plan.target.limit_bytes
    if scope != "run" or limit is None:
        return {}
    coresident = coresident_bytes(plan)
    # The bound may exceed what a compiler finds by a few percent; a Program
    # near the limit is therefore compiled.
    return {name: bound for name, bound in init_memory(plan).items() if bound.total + coresident.get(name, 0) <= limit}


def select_programs(plan: RunPlan, scope: Scope) -> tuple[str, ...]:
    """The names of the Programs to compile, those that take the compiler longest first.

    Args:
        plan: the run.
        scope: `timed` for the Programs that have a workload, else those of loading and saving too.
    """
    timed = {workload.program for workload in plan.workloads}
    names = [program.name for program in plan.computing if not timed or program.name in timed]
    if scope != "timed":
        names += [program.name for program in (*plan.computing, *plan.loading, *plan.saving)]
    decided = known_to_fit(plan, scope)
    # The timed Programs are first: workers compile the others at the same time.
    return tuple(name for name in dict.fromkeys(names) if name not in decided)


def largest_inputs(budget: Budget) -> tuple[str, int]:
    """The Program with the largest inputs, and their bytes on a device."""
    return budget.largest, budget.arguments.get(budget.largest, 0)


def exceeds_hbm(plan: RunPlan, outcome: Outcome) -> bool:
    """Whether a Program that compiled does not fit a device.

    Only TPU compilers refuse a Program, and they do not know of memory that is allocated outside of it.
    """
    limit = plan.target.limit_bytes
    if limit is None or not isinstance(outcome, Compiled):
        return False
    return outcome.peak_bytes + coresident_bytes(plan).get(outcome.name, 0) > limit


def coresident_bytes(plan: RunPlan) -> Mapping[str, int]:
    """By Program, bytes on a device that stay allocated while it runs and are not among its inputs."""
    return (
        plan.coresident_bytes if plan.load is None else {**loading_coresident_bytes(plan.load), **plan.coresident_bytes}
    )


def format_hbm_error(plan: RunPlan, outcome: Compiled) -> str:
    """The message for a Program that compiled and does not fit a device."""
    others = coresident_bytes(plan).get(outcome.name, 0)
    message = f"{outcome.name} does not fit: {gib(outcome.peak_bytes + others)} > {gib(plan.target.limit_bytes or 0)}"
    return f"{message} ({gib(outcome.peak_bytes)} as compiled, {gib(others)} of other arrays)" if others else message
