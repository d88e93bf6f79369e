"""`preflight`: checks one run on one target in five stages, and returns a `Verdict`.

    config ─► sharding ─► loading ─► compile ─► cost

*config*: whether the configuration and the checkpoint's metadata are valid, and which inputs are unavailable here.
*sharding*: the sharding of every array, and whether the Programs' inputs alone fit. *loading*: memory and time of
loading the weights. *compile*: the result of the target's compiler for the run's Programs. *cost*: their times.

A stage with findings does not end preflight: later stages compute what they still can, and the verdict has every
finding. Nothing is compiled where arithmetic already decides (inputs that exceed the memory of a chip).
"""

from collections.abc import Sequence
from dataclasses import replace

from haliax_ext.errors import gib
from levanter.hardware import Accelerator, parse_accelerator
from levanter.html.format import span_text
from levanter.plan.aot import CompileCrash, Compiled, Refused
from levanter.plan.compile_selection import exceeds_hbm, largest_inputs
from levanter.plan.dcn_gathers import dcn_gather_note
from levanter.plan.gpu_attention import attention_note
from levanter.plan.gpu_memory import gpu_memory_note
from levanter.plan.hbm_budget import Budget, hbm_budget
from levanter.plan.load_budget import LoadBudget, load_budget, load_ceilings
from levanter.plan.local_hbm_check import find_hbm_shortage
from levanter.plan.offload import offloaded_activations
from levanter.plan.oom_report import advise_on_slots
from levanter.plan.preflight.compile import compile_stage
from levanter.plan.preflight.cost import cost_stage, time_basis
from levanter.plan.preflight.state import (
    LOCAL,
    Inquiry,
    Progress,
    Question,
    first_line,
    format_of_limit,
    raised_in_library,
)
from levanter.plan.target_from_name import pod_target
from levanter.plan.verdict import ProgramVerdict, Verdict
from levanter.runplan import BAD_INPUT, COMPILER_CRASH, DOES_NOT_FIT, NOT_DECIDED, OK, RunPlan


def preflight(question: Question, *, progress: Progress = lambda _: None) -> Verdict:
    """Runs the stages of preflight for one question.

    Args:
        question: the run, the target and the extent of the check.
        progress: receives messages about the current stage and its outcome.

    Raises:
        AcceleratorError: an unknown target.
    """
    pod = None if question.target == LOCAL else parse_accelerator(question.target)
    inquiry = Inquiry(question=question, progress=progress)
    plan = _config(inquiry, pod)
    if plan is None:
        # Without a description there are no Programs, so no later stage can run.
        headline = f"cannot be planned: {first_line(inquiry.stages[-1].findings)}"
        return _verdict(inquiry, None, pod, None, None, (), headline)
    if (short := find_hbm_shortage(plan)) is not None:
        # On the devices of this machine the limit comes from the host; the later stages compare with that.
        plan = short[0]
    budget = _sharding(inquiry, plan, pod)
    load = _loading(inquiry, plan, pod)
    outcomes = compile_stage(inquiry, plan, pod, budget)
    if any(exceeds_hbm(plan, o) for o in outcomes.values()):
        # A compiled Program exceeds a limit that the runtime does not report: the
        # report must show the one it was held to.
        budget = replace(budget, hbm_bytes=plan.target.limit_bytes)
    programs = cost_stage(inquiry, plan, pod, budget, outcomes)
    headline = _headline(inquiry, plan, budget, load, programs)
    return _verdict(inquiry, plan, pod, budget, load, programs, headline)


def _verdict(
    inquiry: Inquiry,
    plan: RunPlan | None,
    pod: Accelerator | None,
    budget: Budget | None,
    load: LoadBudget | None,
    programs: tuple[ProgramVerdict, ...],
    headline: str,
) -> Verdict:
    # Only with every Program compiled the largest is what the run needs.
    compiled = [program.peak_bytes for program in programs if program.fits is not None]
    needed = max((nbytes for nbytes in compiled if nbytes is not None), default=None)
    notes = () if plan is None else (*plan.notes, dcn_gather_note(plan), attention_note(plan, pod))
    return Verdict(
        plan=plan,
        target=inquiry.question.target if pod is None else pod.name,
        accelerator=pod,
        budget=budget,
        load=load,
        programs=programs,
        stages=tuple(inquiry.stages),
        exit_code=inquiry.exit_code,
        headline=headline,
        lower_bound=None if inquiry.known is None else inquiry.known[1].total,
        options=inquiry.question.options,
        notes=tuple(filter(None, (*notes, None if plan is None else gpu_memory_note(pod, needed=needed)))),
    )


def _config(inquiry: Inquiry, pod: Accelerator | None) -> RunPlan | None:
    question = inquiry.question
    inquiry.begin("describing the run")
    try:
        if pod is not None:
            target = pod_target(pod)
        else:
            assert question.local is not None, "the target `local` needs a way to count the local devices"
            target = question.local()
        plan = question.describe(target)
    except ValueError as error:
        # A `ValueError` from inside JAX is a bug of ours, and its traceback matters more than its message.
        if raised_in_library(error):
            raise
        inquiry.end("config", "the run cannot be described", findings=[str(error)], code=BAD_INPUT)
        return None
    except CompileCrash as error:
        inquiry.end("config", "no devices were found here", findings=[str(error)], code=COMPILER_CRASH)
        return None
    errors = [f"{c.name}: {c.message}" for c in plan.checks if c.status == "error"]
    absent = [f"{c.name}: not checked here: {c.message}" for c in plan.checks if c.status == "unchecked"]
    missing = len(plan.missing) if question.require_inputs else 0
    if errors or missing:
        problems = [f"{len(errors)} wrong"] if errors else []
        problems += [f"{missing} not available (--require_inputs)"] if missing else []
        inquiry.end("config", ", ".join(problems), findings=[*errors, *absent], code=BAD_INPUT)
    elif absent:
        inquiry.end("config", f"sound; {len(absent)} not checked here", findings=absent, status="unchecked")
    else:
        inquiry.end("config", "sound, every input is available")
    return plan


def _sharding(inquiry: Inquiry, plan: RunPlan, pod: Accelerator | None) -> Budget:
    inquiry.begin()
    budget = hbm_budget(plan)
    # A large replicated array is a matter of memory (exit code 3), any other
    # error of the sharding bad input (2).
    replicated = any(f.kind == "replicated" and f.error is not None for f in plan.sharding.findings)
    errors = [str(error) for error in (*plan.sharding.errors, *plan.activations.errors)]
    name, most = largest_inputs(budget)
    limit = budget.hbm_bytes
    message = (
        f"inputs of {name} take {format_of_limit(most, limit, unit=plan.target.unit)}"
        if name
        else "no program, because an input is not available"
    )
    message += f"; mesh {plan.mesh}"
    if limit is not None and most > limit:
        code = DOES_NOT_FIT
        message = f"inputs of {name} alone do not fit: {gib(most)} > {gib(limit)}; mesh {plan.mesh}"
        errors += advise_on_slots(plan, pod)
    else:
        code = DOES_NOT_FIT if replicated else BAD_INPUT if errors else OK
    if not errors and pod is not None and plan.workloads:
        offloaded = offloaded_activations(plan, plan.workloads[0].program, pod=pod)
        if offloaded is not None and not offloaded.fits:
            errors, code = [f"host memory: {offloaded}: more than it has"], DOES_NOT_FIT
    inquiry.end("sharding", message, findings=errors, code=code)
    return budget


def _loading(inquiry: Inquiry, plan: RunPlan, pod: Accelerator | None) -> LoadBudget | None:
    inquiry.begin()
    if plan.load is None:
        errors = any(f.error is not None for f in plan.sharding.findings)
        why = "not planned: the sharding has errors" if errors else "nothing is read: weights are initialized"
        inquiry.end("loading", why, status="skipped")
        return None
    budget = load_budget(plan.load, ceilings=() if pod is None else load_ceilings(pod))
    limit, peak = plan.target.hbm_bytes, budget.device_peak
    rate = f"{span_text(budget.seconds, budget.seconds)} at {budget.gigabytes_per_second:g} GB/s a host"
    if limit is not None and peak > limit:
        leaf, extra = budget.device_transient
        inquiry.end(
            "loading",
            f"does not fit while loading: {gib(peak)} > {gib(limit)}",
            findings=[f"{leaf}: {gib(extra)} more than its own shard"] if leaf else [],
            code=DOES_NOT_FIT,
        )
    else:
        # Reading time depends on the stored dtype, which is not known without the checkpoint.
        assumed = " (as if it had the names and dtype expected)" if _expected(plan) else ""
        read = f"{gib(budget.source_bytes)}{assumed} read {budget.amplification:.2f}×, {rate}"
        inquiry.end("loading", f"{read}; at most {gib(peak)} on a device, {gib(budget.host_peak)} on a host")
    return budget


def _expected(plan: RunPlan) -> bool:
    """Whether loading is planned from the expected names and dtype, without a checkpoint."""
    return any(check.name == "weights" and check.status == "unchecked" for check in plan.checks)


def _headline(
    inquiry: Inquiry,
    plan: RunPlan,
    budget: Budget,
    load: LoadBudget | None,
    programs: Sequence[ProgramVerdict],
) -> str:
    limit, unit = budget.hbm_bytes, plan.target.unit
    name, most = largest_inputs(budget)
    refused = [p for p in programs if isinstance(p.outcome, Refused)]
    if limit is not None and most > limit:
        return f"does not fit: {gib(most)} > {gib(limit)} (inputs of {name} alone)"
    if refused:
        assert isinstance(refused[0].outcome, Refused)
        return f"does not fit: {refused[0].outcome.refusal} ({refused[0].name})"
    # The order is that of certainty: inputs by arithmetic, then the compiler's
    # refusal, then compiled sizes, then loading.
    beyond = [p for p in programs if isinstance(p.outcome, Compiled) and limit and (p.peak_bytes or 0) > limit]
    if beyond and limit is not None:
        return f"does not fit: {gib(beyond[0].peak_bytes or 0)} > {gib(limit)} ({beyond[0].name})"
    if load is not None and limit is not None and load.device_peak > limit:
        return f"does not fit while loading: {gib(load.device_peak)} > {gib(limit)}"
    compiled = [p for p in programs if p.fits is not None]
    times = [f"{p.name} {span_text(p.time.low, p.time.high)}" for p in programs if p.time is not None]
    modelled = f"; {', '.join(times)} ({time_basis(programs)})" if times else ""
    if compiled:
        size = format_of_limit(max(p.peak_bytes or 0 for p in compiled), limit, unit=unit)
    elif inquiry.known is not None and limit is not None:
        program, known = inquiry.known
        if known.total > limit:
            return f"does not fit: at least {gib(known.total)} > {gib(limit)} ({program}; not compiled)"
        size = f"at least {format_of_limit(known.total, limit, unit=unit)}"
    else:
        size = f"{format_of_limit(most, limit, unit=unit)} for inputs alone"
    if inquiry.exit_code == NOT_DECIDED:
        return f"not decided: {size}{modelled}"
    if inquiry.exit_code == OK:
        return f"{'fits' if compiled else 'not compiled'}: {size}{modelled}"
    problem = next(stage for stage in inquiry.stages if stage.status in ("refused", "crashed"))
    what = first_line(problem.findings or [problem.message])
    return f"refused ({problem.name}): {what}; {size}{modelled}"
