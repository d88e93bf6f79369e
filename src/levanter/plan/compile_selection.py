"""Which Programs a plan asks the compiler about, and what else is on a device while they run."""

from collections.abc import Mapping

from haliax_ext.errors import gib
from levanter.plan.aot import Compiled, Outcome
from levanter.plan.hbm_budget import Budget
from levanter.plan.init_memory import InitMemory, drawn_in
from levanter.plan.load_budget import beside_loading
from levanter.plan.preflight.state import Scope
from levanter.runplan import RunPlan


def bounded_of(plan: RunPlan, scope: Scope) -> Mapping[str, InitMemory]:
    """The Programs that a compiler is not asked for, since arithmetic says that they fit."""
    limit = plan.target.limit_bytes
    if scope != "run" or limit is None:
        return {}
    beside = beside_of(plan)
    return {name: drawn for name, drawn in drawn_in(plan).items() if drawn.total + beside.get(name, 0) <= limit}


def chosen_of(plan: RunPlan, scope: Scope) -> tuple[str, ...]:
    """The Programs that are compiled: those that make up the job's time, or those of loading and saving too.

    What takes the compiler longest comes first, so that others are compiled beside it.
    """
    timed = {workload.program for workload in plan.workloads}
    names = [program.name for program in plan.computing if not timed or program.name in timed]
    if scope != "timed":
        names += [program.name for program in (*plan.computing, *plan.loading, *plan.saving)]
    answered = bounded_of(plan, scope)
    return tuple(name for name in dict.fromkeys(names) if name not in answered)


def largest(budget: Budget) -> tuple[str, int]:
    """The Program with the largest inputs, and their bytes on a device."""
    return budget.largest, budget.arguments.get(budget.largest, 0)


def beyond_room(plan: RunPlan, outcome: Outcome) -> bool:
    """Whether a program that was compiled still does not fit.

    Only TPU compilers refuse by themselves, and they know nothing of what lies beside a Program's inputs.
    """
    limit = plan.target.limit_bytes
    if limit is None or not isinstance(outcome, Compiled):
        return False
    return outcome.peak_bytes + beside_of(plan).get(outcome.name, 0) > limit


def beside_of(plan: RunPlan) -> Mapping[str, int]:
    """By Program, bytes on a device of what is there while it runs and is none of its inputs."""
    return plan.beside if plan.load is None else {**beside_loading(plan.load), **plan.beside}


def too_much(plan: RunPlan, outcome: Compiled) -> str:
    """What is said of a Program that a compiler took and a device has no room for."""
    beside = beside_of(plan).get(outcome.name, 0)
    said = f"{outcome.name} does not fit: {gib(outcome.peak_bytes + beside)} > {gib(plan.target.limit_bytes or 0)}"
    return said if not beside else f"{said} ({gib(outcome.peak_bytes)} as compiled, {gib(beside)} stay beside it)"
