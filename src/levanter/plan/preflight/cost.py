"""The cost stage of preflight: times of the run's Programs, and explanations for those that do not fit."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from haliax_ext.hlo import OutOfMemory
from levanter.hardware import Accelerator
from levanter.hardware.compiler import LAYOUTS, as_values, tuned_options
from levanter.html.format import span_text
from levanter.plan.aot import Compiled, Outcome, Refused
from levanter.plan.attention_blocks import busiest_block_share
from levanter.plan.calibration import (
    GENERATING_SCALE,
    decode_calibration,
    scale_with_options,
    untested_options_calibration,
)
from levanter.plan.comms import Network
from levanter.plan.compile_selection import coresident_bytes, exceeds_hbm, known_to_fit
from levanter.plan.hbm_budget import Budget
from levanter.plan.layout_memory import LayoutSubject
from levanter.plan.offload import offloaded_activations
from levanter.plan.oom_report import decode_cost, explain_oom, suggest_by_arithmetic
from levanter.plan.preflight.advice import Advisor
from levanter.plan.preflight.state import Inquiry
from levanter.plan.roofline import estimated_time
from levanter.plan.step_time_model import StepTime, mfu, step_time
from levanter.plan.verdict import ProgramVerdict
from levanter.runplan import RunPlan, Workload


def cost_stage(
    inquiry: Inquiry,
    plan: RunPlan,
    pod: Accelerator | None,
    budget: Budget,
    outcomes: Mapping[str, Outcome],
) -> tuple[ProgramVerdict, ...]:
    """A verdict for each selected Program, with its time where figures allow one; records the stage."""
    inquiry.begin()
    workloads = {workload.program: workload for workload in plan.workloads}
    coresident = coresident_bytes(plan)
    bounded = known_to_fit(plan, inquiry.question.scope) if outcomes else {}
    verdicts: list[ProgramVerdict] = []
    for program in plan.programs:
        outcome = outcomes.get(program.name)
        # Programs of loading and saving appear only where they were compiled or are bounded by arithmetic.
        if outcome is None and program not in plan.computing and program.name not in bounded:
            continue
        workload, others = workloads.get(program.name), coresident.get(program.name, 0)
        init_bound = bounded.get(program.name)
        bound = None if init_bound is None else init_bound.total
        offloaded = None if pod is None or plan.errors else offloaded_activations(plan, program.name, pod=pod)
        verdict = ProgramVerdict(
            name=program.name,
            outcome=outcome,
            bound=bound,
            coresident_bytes=others,
            workload=workload,
            offloaded=offloaded,
        )
        suggest = _advice(inquiry, pod, program.name, explained=any(verdict.why_not for verdict in verdicts))
        if isinstance(outcome, Refused):
            verdict = replace(verdict, why_not=explain_oom(outcome, plan, budget, suggest=suggest))
        elif outcome is None:
            verdict = replace(verdict, why_not=explain_oom(None, plan, budget, program=program.name, suggest=suggest))
            if pod is not None and pod.generation.platform == "gpu" and not plan.errors:
                verdict = _estimated(verdict, plan, pod)
        else:
            # CPU and GPU compilers refuse nothing: they state a total, and no list of allocations.
            if exceeds_hbm(plan, outcome):
                limit, most = plan.target.limit_bytes or 0, outcome.peak_bytes + others
                needed = OutOfMemory(needed=most, available=limit, allocations=(), message="")
                lines = explain_oom(needed, plan, budget, program=program.name, suggest=suggest)
                verdict = replace(verdict, why_not=lines)
            # Programs without a workload run once, and their time is negligible.
            if pod is not None and (workload is not None or not workloads):
                verdict = _timed(verdict, outcome, pod, plan)
        verdicts.append(verdict)
    timed = [f"{v.name} {span_text(v.time.low, v.time.high)}" for v in verdicts if v.time is not None]
    if timed:
        inquiry.end("cost", f"{', '.join(timed)} ({time_basis(verdicts)})")
    else:
        why = _why_no_time(outcomes)
        inquiry.end("cost", why, status="skipped")
    return tuple(verdicts)


def _advice(
    inquiry: Inquiry, pod: Accelerator | None, program: str, *, explained: bool
) -> Callable[[LayoutSubject], Sequence[str]]:
    """How suggestions for a Program are made: compiled for the first one that does not fit, else by arithmetic."""
    if pod is None or explained:
        return suggest_by_arithmetic
    return Advisor(inquiry=inquiry, pod=pod, program=program)


def time_basis(programs: Sequence[ProgramVerdict]) -> str:
    """How the times of Programs were obtained, in three words."""
    calibrations = [program.time.calibration for program in programs if program.time is not None]
    if any(calibration.estimate for calibration in calibrations):
        return "an estimate, not measured"
    return (
        "modelled, not calibrated"
        if any(calibration.reason for calibration in calibrations)
        else "modelled, not measured"
    )


def _why_no_time(outcomes: Mapping[str, Outcome]) -> str:
    if not outcomes:
        return "nothing was compiled"
    if not any(isinstance(outcome, Compiled) for outcome in outcomes.values()):
        return "no program compiled, so there is nothing to time"
    return "no cycles are known for this target"


def _parameters(plan: RunPlan) -> float | None:
    """The number of parameters of the model; None for runs without a searchable layout."""
    if isinstance(plan.searchable, str):
        return None
    return float(sum(math.prod(leaf.shape) for leaf in plan.searchable.parameters))


def _timed(verdict: ProgramVerdict, outcome: Compiled, pod: Accelerator, plan: RunPlan) -> ProgramVerdict:
    """The verdict with the time of one execution and the utilization that follows from it."""
    if outcome.figures is None:
        return verdict
    workload: Workload | None = verdict.workload
    network = Network.of(outcome.mesh, pod, outcome.coordinates)
    flops = 0.0 if workload is None else workload.flops_causal
    experts = max((dict(leaf.leaf.axes).get("expert", 0) for leaf in plan.sharding.leaves), default=0)
    time_ = step_time(
        outcome.figures,
        network,
        model_flops=flops,
        parameters=_parameters(plan),
        experts=experts or None,
        attended=busiest_block_share(plan),
    )
    if time_ is not None:
        time_ = with_program_calibration(time_, plan, verdict.name, pod.generation.name)
    if time_ is not None and verdict.offloaded is not None and verdict.offloaded.seconds is not None:
        # The compiled text has no transfer times to host memory; they follow from the plan.
        time_ = replace(time_, transfers=verdict.offloaded.seconds)
    return replace(verdict, time=time_) if time_ is None or workload is None else _used(verdict, time_, workload, pod)


def with_program_calibration(time: StepTime, plan: RunPlan, program: str, generation: str) -> StepTime:
    """The time of a Program with the scale and range for its kind of work and its compiler options.

    Args:
        time: with the scale and range of a train step.
        plan: the run.
        program: the Program's name.
        generation: of the chips, by name.
    """
    if decode_cost(plan) is not None and generation in GENERATING_SCALE:
        rests_on = decode_calibration(time.calibration, generation)
        return replace(time, calibration=rests_on, cycle_scale=GENERATING_SCALE[generation])
    if not _other_options(plan, program):
        return time
    scale = scale_with_options(time.cycle_scale, generation, plan.program(program).compiler_options)
    return replace(time, calibration=untested_options_calibration(time.calibration, generation), cycle_scale=scale)


def _other_options(plan: RunPlan, name: str) -> bool:
    """Whether a Program is compiled with options that no train step of a published run has here."""
    where = (plan.target.platform, plan.target.kind)
    # The scale of a generation was fitted to train steps with the options that each layout gets by default.
    fitted = [as_values(tuned_options(*where, work="train", layout=layout)) for layout in LAYOUTS]
    return dict(plan.program(name).compiler_options) not in fitted


def _estimated(verdict: ProgramVerdict, plan: RunPlan, pod: Accelerator) -> ProgramVerdict:
    """The verdict with an estimated time, for targets whose compiler states no cycles."""
    if verdict.workload is None or (time_ := estimated_time(plan, verdict.workload, pod)) is None:
        return verdict
    return _used(verdict, time_, verdict.workload, pod)


def _used(verdict: ProgramVerdict, time_: StepTime, workload: Workload, pod: Accelerator) -> ProgramVerdict:
    """The verdict with a time and the model FLOPs utilization at both ends of it."""

    def use(flops: float) -> tuple[float, float]:
        return (mfu(flops, accelerator=pod, seconds=time_.high), mfu(flops, accelerator=pod, seconds=time_.low))

    full = use(workload.flops_full)
    # Kernels skip the pairs that a causal mask hides. Where those are most of the work, counting them gives an MFU
    # above 1, which is meaningless.
    return replace(verdict, time=time_, mfu=use(workload.flops_causal), mfu_full=full if full[1] <= 1 else None)
