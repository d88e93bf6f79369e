"""Whether a run fits on the available devices, reported before it allocates anything, and afterwards where it ran out.

TPUs and GPUs have memory of their own; devices of a CPU share the machine's, or its container's. Before a run the
arithmetic is asked, which costs nothing: inputs of its largest Program, with the gradients that it makes. What it makes
on the way beside them is known once it is compiled (`processes.room`). The words are those of `why_not`, as for a pod.
"""

import re
from dataclasses import replace

from haliax_ext.errors import gib
from haliax_ext.hlo import OutOfMemory
from levanter.plan.hbm_budget import Budget, budget_of
from levanter.plan.oom_report import why_not
from levanter.plan.row_advice import too_many_rows
from levanter.runplan import DoesNotFitError, RunPlan

_ASKED_FOR = re.compile(r"(?:allocat\w+|Allocat\w+)[^\d\n]{0,40}?([\d.,]+)\s*([KMGTP]i?B|bytes?)\b")
_UNITS = {unit: 1024**power for power, unit in enumerate(("b", "k", "m", "g", "t", "p"))}


def shortage(plan: RunPlan) -> tuple[RunPlan, Budget] | None:
    """The plan and its budget, held to the memory that is there, where the arithmetic alone says that it is too little.

    None where it fits as far as that goes, or where no limit is known.
    """
    limit = plan.target.limit_bytes
    if limit is None:
        return None
    held = replace(plan, target=replace(plan.target, hbm_bytes=limit))
    budget = budget_of(held)
    return (held, budget) if _needed(budget) > limit else None


def require_room(plan: RunPlan) -> None:
    """Looks whether a run can fit here.

    Raises:
        DoesNotFitError: it cannot, with what takes the room and what would fit.
    """
    short = shortage(plan)
    if short is not None:
        held, budget = short
        raise _error(held, budget, _needed(budget), budget.largest)


def ran_out(plan: RunPlan, error: BaseException) -> DoesNotFitError | None:
    """What is said of a run that ran out of memory; None for another error."""
    if isinstance(error, DoesNotFitError):
        return error
    said = str(error)
    if not (isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in said or "Out of memory" in said):
        return None
    limit = plan.target.limit_bytes
    first = next(iter(said.splitlines()), "") or type(error).__name__
    lines = [f"it does not fit in memory: {first}"]
    if limit is not None:
        held = replace(plan, target=replace(plan.target, hbm_bytes=limit))
        budget = budget_of(held)
        lines.append(f"a device has {gib(limit)}; {_inputs(budget)}")
        if (asked := _asked_for(said)) and budget.largest:
            needed = max(_needed(budget) + asked, limit + 1)
            found = OutOfMemory(needed=needed, available=limit, allocations=(), message=first)
            lines += why_not(found, held, budget, program=budget.largest)
    lines.append("fewer rows at once, a shorter row, or more devices need less; `levanter plan` says how much before")
    return DoesNotFitError("\n".join(lines))


def _needed(budget: Budget) -> int:
    """Bytes of the largest Program's inputs, and of its gradients, which stand beside them."""
    return budget.arguments.get(budget.largest, 0) + budget.gradients


def _inputs(budget: Budget) -> str:
    if not budget.largest:
        return "no Program has inputs"
    return f"the inputs of {budget.largest} take {gib(budget.arguments[budget.largest])} of it"


def _error(held: RunPlan, budget: Budget, needed: int, name: str) -> DoesNotFitError:
    limit = held.target.limit_bytes
    assert limit is not None
    beyond = OutOfMemory(needed=needed, available=limit, allocations=(), message="")
    # Arithmetic alone needs no compiler's words.
    lines = why_not(None if budget.arguments[name] > limit else beyond, held, budget, program=name)
    shown = budget.arguments[name] if budget.arguments[name] > limit else needed
    whose = "what a device has"
    if held.target.host_bytes is not None:
        whose = f"a device's share of this machine's memory ({gib(held.target.host_bytes)}; a container may have less)"
    lines = [f"it does not fit: {gib(shown)} > {gib(limit)}, {whose}", *too_many_rows(held), *lines]
    return DoesNotFitError("\n".join(lines))


def _asked_for(said: str) -> int:
    found = _ASKED_FOR.search(said)
    if found is None:
        return 0
    try:
        return int(float(found[1].replace(",", "").rstrip(".")) * _UNITS[found[2][0].lower()])
    except (ValueError, KeyError):
        return 0
