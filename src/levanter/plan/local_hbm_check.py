"""Checks before a local run that its arrays fit in device memory, and explains an out-of-memory error after it.

TPUs and GPUs have their own memory; CPU devices share that of the machine or its container. The check before a run is
arithmetic: the inputs of the largest Program and its gradients. Temporaries are known after compilation
(`distributed.memory_check`). The explanation is that of `explain_oom`, as for a pod.
"""

import re
from dataclasses import replace

from haliax_ext import hlo
from haliax_ext.errors import gib
from levanter.plan.hbm_budget import Budget, hbm_budget
from levanter.runplan import DoesNotFitError, RunPlan

_ALLOCATION = re.compile(r"(?:allocat\w+|Allocat\w+)[^\d\n]{0,40}?([\d.,]+)\s*([KMGTP]i?B|bytes?)\b")
_UNITS = {unit: 1024**power for power, unit in enumerate(("b", "k", "m", "g", "t", "p"))}


def find_hbm_shortage(plan: RunPlan) -> tuple[RunPlan, Budget] | None:
    """The plan limited to the memory of this machine, and its budget, where arithmetic shows that it does not fit.

    None where inputs and gradients fit, or where no limit is known.
    """
    limit = plan.target.limit_bytes
    if limit is None:
        return None
    limited = replace(plan, target=replace(plan.target, hbm_bytes=limit))
    budget = hbm_budget(limited)
    return (limited, budget) if _needed(budget) > limit else None


def require_hbm(plan: RunPlan) -> None:
    """Checks that a run can fit on the devices of this machine.

    Raises:
        DoesNotFitError: it cannot; the message names the largest arrays and a layout that would fit.
    """
    shortage = find_hbm_shortage(plan)
    if shortage is not None:
        limited, budget = shortage
        raise _error(limited, budget, _needed(budget), budget.largest)


def out_of_memory_error(plan: RunPlan, error: BaseException) -> DoesNotFitError | None:
    """The error that explains why a run ran out of memory; None if `error` has another cause."""
    if isinstance(error, DoesNotFitError):
        return error
    message = str(error)
    if not (isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in message or "Out of memory" in message):
        return None
    # The explanation plans other layouts, with the trainer and the engine. A run that fits does not import them.
    from levanter.plan.oom_report import explain_oom

    limit = plan.target.limit_bytes
    first = next(iter(message.splitlines()), "") or type(error).__name__
    lines = [f"it does not fit in memory: {first}"]
    if limit is not None:
        limited = replace(plan, target=replace(plan.target, hbm_bytes=limit))
        budget = hbm_budget(limited)
        lines.append(f"a device has {gib(limit)}; {_inputs(budget)}")
        if (requested := _requested_bytes(message)) and budget.largest:
            # The allocator reports the request that failed, not the sum; by
            # arithmetic it may even fit, yet it did not.
            needed = max(_needed(budget) + requested, limit + 1)
            refusal = hlo.OutOfMemory(needed=needed, available=limit, allocations=(), message=first)
            lines += explain_oom(refusal, limited, budget, program=budget.largest)
    lines.append("fewer rows at once, shorter rows or more devices need less; `levanter plan` computes it before a run")
    return DoesNotFitError("\n".join(lines))


def _needed(budget: Budget) -> int:
    """Bytes of the largest Program's inputs and of its gradients, which are alive together."""
    return budget.arguments.get(budget.largest, 0) + budget.gradients


def _inputs(budget: Budget) -> str:
    if not budget.largest:
        return "no Program has inputs"
    return f"the inputs of {budget.largest} take {gib(budget.arguments[budget.largest])} of it"


def _error(plan: RunPlan, budget: Budget, needed: int, name: str) -> DoesNotFitError:
    from levanter.plan.oom_report import advise_on_slots, explain_oom

    limit = plan.target.limit_bytes
    assert limit is not None
    beyond = hlo.OutOfMemory(needed=needed, available=limit, allocations=(), message="")
    # Inputs that do not fit need no refusal by a compiler to explain; inputs with gradients get one made up here.
    lines = explain_oom(None if budget.arguments[name] > limit else beyond, plan, budget, program=name)
    shown = budget.arguments[name] if budget.arguments[name] > limit else needed
    whose = "what a device has"
    if plan.target.host_bytes is not None:
        whose = f"a device's share of this machine's memory ({gib(plan.target.host_bytes)}; a container may have less)"
    lines = [f"it does not fit: {gib(shown)} > {gib(limit)}, {whose}", *advise_on_slots(plan), *lines]
    return DoesNotFitError("\n".join(lines))


def _requested_bytes(message: str) -> int:
    match = _ALLOCATION.search(message)
    if match is None:
        return 0
    try:
        # XLA and its allocators write sizes as `1.50GiB`, `12.3M` or `1,234
        # bytes`; an unknown unit counts as no size.
        return int(float(match[1].replace(",", "").rstrip(".")) * _UNITS[match[2][0].lower()])
    except (ValueError, KeyError):
        return 0
