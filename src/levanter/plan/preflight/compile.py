"""The compile stage of preflight: compiles the run's Programs with the compiler of the target."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from haliax_ext.errors import gib
from levanter.hardware import Accelerator
from levanter.html.format import count_text, seconds_text
from levanter.plan.aot import (
    CompileCrash,
    Compiled,
    CompilerMissing,
    Outcome,
    Refused,
    WorkerBadInput,
    compile_programs,
)
from levanter.plan.compile_selection import exceeds_hbm, format_hbm_error, known_to_fit, largest_inputs, select_programs
from levanter.plan.hbm_budget import Budget
from levanter.plan.hbm_lower_bound import HbmLowerBound, program_lower_bound
from levanter.plan.oom_report import advise_on_slots
from levanter.plan.preflight.state import LOCAL, Inquiry, Scope, first_line, format_of_limit
from levanter.plan.verdict import StageStatus
from levanter.runplan import BAD_INPUT, COMPILER_CRASH, DOES_NOT_FIT, NOT_DECIDED, OK, RunPlan

_FEW = 3
"""Programs without a time are listed by name up to this number, and counted beyond it."""


def compile_stage(inquiry: Inquiry, plan: RunPlan, pod: Accelerator | None, budget: Budget) -> Mapping[str, Outcome]:
    """Compiles the selected Programs and records the stage; returns the results by name.

    Empty if nothing was compiled.
    """
    question = inquiry.question
    chosen = select_programs(plan, question.scope)
    target = LOCAL if pod is None else pod.name
    inquiry.begin()
    if not chosen and plan.missing:
        message = "undecided: what runs on the devices is known once every input is available"
        inquiry.end("compile", message, code=NOT_DECIDED, status="unchecked")
        return {}
    if not chosen:
        inquiry.end("compile", "the run computes nothing on the devices", status="skipped")
        return {}
    name, most = largest_inputs(budget)
    # Arithmetic refuses the run already; `cost_stage` explains it without the minutes of a compile.
    if budget.hbm_bytes is not None and most > budget.hbm_bytes:
        inquiry.end("compile", f"not needed: the inputs of {name} alone do not fit", status="skipped")
        return {}
    if not question.compile:
        _without_compiler(inquiry, plan, chosen, "not requested (--no-compile)", pod=pod, status="skipped")
        return {}

    # Where a Program needs more than a chip has by its lower bound, the run is refused: nothing else is compiled.
    if refused := _certainly_refused(plan, chosen):
        inquiry.progress(f"{refused} does not fit by its lower bound: only it is compiled")
        chosen = (refused,)
    inquiry.begin(f"starting the compiler of {target} for {', '.join(chosen)}")

    def report_progress(event: Mapping[str, Any]) -> None:
        if event["event"] == "compiling":
            inquiry.progress(f"compiling {event['program']} for {target}")

    try:
        outcomes = compile_programs(
            question.provider,
            question.payload,
            target=LOCAL if pod is None else pod,
            programs=chosen,
            keep_text=question.keep_text,
            on_event=report_progress,
            kept=question.kept,
            plan=plan,
            # The first one takes longest; where it does not fit, no other Program changes the verdict.
            decisive=None if question.scope == "all" else chosen[0],
        )
    except (CompilerMissing, WorkerBadInput) as error:
        inquiry.end("compile", first_line([str(error)]), findings=[str(error)], code=BAD_INPUT)
        return {}
    except CompileCrash as error:
        if plan.errors:
            # A plan with errors may crash the compiler; the errors are the finding, not the crash.
            last = error.last_lines[-1] if error.last_lines else str(error)
            inquiry.end("compile", f"not possible given the problems above:  {last}", status="skipped")
            return {}
        message = str(error).splitlines()[0].removesuffix(":")
        inquiry.end("compile", message, findings=error.last_lines, code=COMPILER_CRASH)
        return {}
    refused = [o for o in outcomes if isinstance(o, Refused)]
    beyond = [o for o in outcomes if exceeds_hbm(plan, o)]
    findings = [f"{o.name} does not fit: {o.refusal}" for o in refused]
    findings += [format_hbm_error(plan, o) for o in beyond if isinstance(o, Compiled)]
    findings += advise_on_slots(plan, pod, outcomes) if findings else []
    # On CPUs and GPUs the compiler accepts Programs that do not fit; `beyond` has these.
    fitting = [o.name for o in outcomes if o not in refused and o not in beyond]
    compiled = [f"{_named(plan, fitting)} compiled"] if fitting else []
    skipped = len(chosen) - len(outcomes)
    rest = [f"{count_text(skipped, 'more Program')} not compiled (--all_programs compiles all)"] if skipped else []
    message = "; ".join([*findings, *compiled, *rest, *_arithmetic(plan, question.scope), *_ages(outcomes)])
    inquiry.end("compile", message, findings=findings, code=DOES_NOT_FIT if findings else OK)
    return {outcome.name: outcome for outcome in outcomes}


def _arithmetic(plan: RunPlan, scope: Scope) -> list[str]:
    """Phrases about the Programs that are not compiled because an upper bound fits."""
    most = {name: gib(bound.total) for name, bound in known_to_fit(plan, scope).items()}
    return [f"{name} by arithmetic, at most {size} (--all_programs compiles it)" for name, size in most.items()]


def _named(plan: RunPlan, names: Sequence[str]) -> str:
    """Names of Programs, those with a workload first; of many others only the number."""
    timed = {workload.program for workload in plan.workloads}
    first = [name for name in names if name in timed]
    others = [name for name in names if name not in timed]
    if first and len(others) > _FEW:
        return f"{', '.join(first)} and {len(others)} others"
    return ", ".join([*first, *others])


def _ages(outcomes: Sequence[Outcome]) -> list[str]:
    """A phrase with the age of cached results; empty if there are none."""
    ages = {o.name: time.time() - o.kept_since for o in outcomes if o.kept_since is not None}
    if not ages:
        return []
    oldest = seconds_text(max(ages.values()))
    which = "all" if len(ages) == len(outcomes) else ", ".join(ages)
    return [f"{which} from the cache, {oldest} old{' at most' if len(ages) > 1 else ''} (--no_cache compiles again)"]


def _without_compiler(
    inquiry: Inquiry,
    plan: RunPlan,
    chosen: Sequence[str],
    why: str,
    *,
    pod: Accelerator | None,
    status: StageStatus,
) -> None:
    """Ends the stage by the lower bound of the Programs' bytes, which can refuse a run but not accept it."""
    limit = plan.target.hbm_bytes
    if plan.errors:
        inquiry.end("compile", why, status=status)
        return
    if limit is None:
        message = f"{why}; undecided: the memory of a device of {plan.target.name} is not known"
        inquiry.end("compile", message, code=NOT_DECIDED, status="unchecked")
        return
    inquiry.known = name, known = _neediest(plan, chosen, limit)
    lacking = f"not counted: {known.lacking}"
    if known.total > limit:
        finding = f"{name} needs at least {gib(known.total)} > {gib(limit)}: {known}; {lacking}"
        findings = [finding, *advise_on_slots(plan, pod)]
        inquiry.end("compile", f"{why}, nor needed", findings=findings, code=DOES_NOT_FIT)
        return
    size = format_of_limit(known.total, limit, unit=plan.target.unit)
    inquiry.end("compile", f"{why}; {name} needs at least {size} ({known}); {lacking}", status=status)


def _certainly_refused(plan: RunPlan, names: Sequence[str]) -> str | None:
    """The Program that needs most bytes, where its lower bound exceeds a chip; None where none does."""
    limit = plan.target.hbm_bytes
    if limit is None or plan.errors or len(names) < 2:
        return None
    name, known = _neediest(plan, names, limit)
    # One Program suffices: minutes for initialization and saving would not change the verdict.
    return name if known.total > limit else None


def _neediest(plan: RunPlan, names: Sequence[str], limit: int) -> tuple[str, HbmLowerBound]:
    """The Program with most known bytes on a chip."""
    bounds = {name: program_lower_bound(plan, name, hbm_bytes=limit) for name in names}
    name = max(bounds, key=lambda program: bounds[program].total)
    return name, bounds[name]
