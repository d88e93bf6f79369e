"""`preflight`: one run on one target, asked five questions in order; the answers are a `Verdict`.

    config ─► sharding ─► loading ─► compile ─► cost

*config*: are the configuration and the checkpoint's metadata sound, and what is unavailable here? *sharding*: where
does every array go, and do the Programs' inputs alone fit? *loading*: what do the weights take on the way in?
*compile*: what does the target's own compiler say of the run's own Programs? *cost*: how long do they take?

A stage that says no does not end the inquiry: what can still be computed is, and every finding is in the verdict. The
compiler is not asked where arithmetic already answers (inputs beyond the memory of a chip).

Words. *Question*: which run, which target, how far to go. *Finding*: one thing that is wrong, in a sentence.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from haliax_ext.errors import gib
from haliax_ext.hlo import OutOfMemory
from levanter.hardware import Accelerator, compiler_options, parse_accelerator
from levanter.plan.aot import CompileCrash, Compiled, LibtpuMissing, Outcome, Refused, WorkerBadInput, compile_programs
from levanter.plan.blame import raised_in_library
from levanter.plan.budget import Budget, budget_of
from levanter.plan.by_arithmetic import estimated_time
from levanter.plan.calibration import with_other_options
from levanter.plan.comms import Network
from levanter.plan.cost import StepTime, mfu, step_time
from levanter.plan.drawn import Drawn, drawn_in
from levanter.plan.kept import KeptAnswers
from levanter.plan.known import Known, known_of
from levanter.plan.load_budget import LoadBudget, beside_loading, load_budget
from levanter.plan.load_ceilings import load_ceilings
from levanter.plan.offload import offloaded
from levanter.plan.report.words import seconds_text, span_text
from levanter.plan.room import shortage
from levanter.plan.rows import too_many_rows
from levanter.plan.targets import target_of_pod
from levanter.plan.verdict import ProgramVerdict, Stage, StageStatus, Verdict
from levanter.plan.why_not import why_not
from levanter.run import BAD_INPUT, COMPILER_CRASH, DOES_NOT_FIT, NOT_DECIDED, OK, RunPlan, Target, Workload

Progress = Callable[[str], None]
Scope = Literal["timed", "run", "all"]
LOCAL = "local"
_FEW = 3
"""Programs without a time are named up to so many, and counted where they are more."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked.

    Attributes:
        target: an accelerator's name, or `local`.
        describe: the run on a target. Raises a `ValueError` where it cannot be described at all.
        provider: the same for the compile worker, `package.module:function` of (payload, target).
        payload: its first argument, plain JSON values.
        local: the devices here; needed for the target `local` only.
        compile: whether the compiler is asked.
        scope: which Programs the verdict is over: those that make up the job's time (`timed`), everything that runs,
            what draws values by arithmetic (`run`), or everything compiled (`all`).
        require_inputs: whether a missing input is refused.
        keep_text: a folder in which the compiler's text stays.
        kept: where answers of compilers are kept and looked for; None for asking anew.
    """

    target: str
    describe: Callable[[Target], RunPlan]
    provider: str
    payload: Mapping[str, Any]
    local: Callable[[], Target] | None = None
    compile: bool = True
    scope: Scope = "timed"
    require_inputs: bool = False
    keep_text: Path | None = None
    kept: KeptAnswers | None = None


@dataclass
class _Inquiry:
    """What has been found so far."""

    question: Question
    progress: Progress
    stages: list[Stage] = field(default_factory=list)
    codes: set[int] = field(default_factory=set)
    began: float = field(default_factory=time.monotonic)
    known: tuple[str, Known] | None = None
    """Where no compiler is asked: the Program that needs most, and what is known of its bytes."""

    def begin(self, doing: str | None = None) -> None:
        """Starts a stage; says what it does where that takes long."""
        self.began = time.monotonic()
        if doing is not None:
            self.progress(doing)

    def end(
        self,
        name: str,
        message: str,
        *,
        findings: Iterable[str] = (),
        code: int = OK,
        status: StageStatus | None = None,
    ) -> None:
        """Notes a stage; its status follows from the exit code unless it is said."""
        if status is None:
            status = "ok" if code == OK else "crashed" if code == COMPILER_CRASH else "refused"
        self.codes.add(code)
        seconds = time.monotonic() - self.began
        self.stages.append(Stage(name=name, status=status, seconds=seconds, message=message, findings=tuple(findings)))
        self.progress(f"{name}: {message} ({seconds:.1f} s)")

    @property
    def exit_code(self) -> int:
        """3 wins over a crash, that over bad input, and that over nothing decided."""
        return next((code for code in (DOES_NOT_FIT, COMPILER_CRASH, BAD_INPUT, NOT_DECIDED) if code in self.codes), OK)


def preflight(question: Question, *, progress: Progress = lambda _: None) -> Verdict:
    """Answers one question.

    Args:
        question: which run on which target.
        progress: told what is being done, and what came of it.

    Raises:
        AcceleratorError: an unknown target.
    """
    pod = None if question.target == LOCAL else parse_accelerator(question.target)
    inquiry = _Inquiry(question=question, progress=progress)
    plan = _config(inquiry, pod)
    if plan is None:
        headline = f"cannot be planned: {_first_line(inquiry.stages[-1].findings)}"
        return _verdict(inquiry, None, pod, None, None, (), headline)
    if (short := shortage(plan)) is not None:
        plan = short[0]
    budget = _sharding(inquiry, plan, pod)
    load = _loading(inquiry, plan, pod)
    outcomes = _compile(inquiry, plan, pod, budget)
    if any(_beyond(plan, o) for o in outcomes.values()):
        budget = replace(budget, hbm_bytes=plan.target.limit_bytes)
    programs = _cost(inquiry, plan, pod, budget, outcomes)
    headline = _headline(inquiry, budget, load, programs)
    return _verdict(inquiry, plan, pod, budget, load, programs, headline)


def _verdict(
    inquiry: _Inquiry,
    plan: RunPlan | None,
    pod: Accelerator | None,
    budget: Budget | None,
    load: LoadBudget | None,
    programs: tuple[ProgramVerdict, ...],
    headline: str,
) -> Verdict:
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
        notes=() if plan is None else plan.notes,
    )


def _config(inquiry: _Inquiry, pod: Accelerator | None) -> RunPlan | None:
    question = inquiry.question
    inquiry.begin("describing the run")
    try:
        if pod is not None:
            target = target_of_pod(pod)
        else:
            assert question.local is not None, "the target `local` needs a way to count the local devices"
            target = question.local()
        plan = question.describe(target)
    except ValueError as error:
        if raised_in_library(error):
            raise
        inquiry.end("config", "the run cannot be described", findings=[str(error)], code=BAD_INPUT)
        return None
    except CompileCrash as error:
        inquiry.end("config", "no devices were found here", findings=[str(error)], code=COMPILER_CRASH)
        return None
    wrong = [f"{c.name}: {c.message}" for c in plan.checks if c.status == "error"]
    absent = [f"{c.name}: not checked here: {c.message}" for c in plan.checks if c.status == "unchecked"]
    missing = len(plan.missing) if question.require_inputs else 0
    if wrong or missing:
        parts = [f"{len(wrong)} wrong"] if wrong else []
        parts += [f"{missing} not available (--require_inputs)"] if missing else []
        inquiry.end("config", ", ".join(parts), findings=[*wrong, *absent], code=BAD_INPUT)
    elif absent:
        inquiry.end("config", f"sound; {len(absent)} not checked here", findings=absent, status="unchecked")
    else:
        inquiry.end("config", "sound, every input is available")
    return plan


def _sharding(inquiry: _Inquiry, plan: RunPlan, pod: Accelerator | None) -> Budget:
    inquiry.begin()
    budget = budget_of(plan)
    replicated = any(f.kind == "replicated" and f.error is not None for f in plan.sharding.findings)
    errors = [str(error) for error in (*plan.sharding.errors, *plan.activations.errors)]
    name, most = _largest(budget)
    limit = budget.hbm_bytes
    message = f"inputs of {name} take {_of(most, limit)}" if name else "no program, because an input is not available"
    message += f"; mesh {plan.mesh}"
    if limit is not None and most > limit:
        code = DOES_NOT_FIT
        message = f"inputs of {name} alone do not fit: {gib(most)} > {gib(limit)}; mesh {plan.mesh}"
        errors += too_many_rows(plan, pod)
    else:
        code = DOES_NOT_FIT if replicated else BAD_INPUT if errors else OK
    if not errors and pod is not None and plan.workloads:
        sent = offloaded(plan, plan.workloads[0].program, pod=pod)
        if sent is not None and not sent.fits:
            errors, code = [f"host memory: {sent}: more than it has"], DOES_NOT_FIT
    inquiry.end("sharding", message, findings=errors, code=code)
    return budget


def _loading(inquiry: _Inquiry, plan: RunPlan, pod: Accelerator | None) -> LoadBudget | None:
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
        assumed = " (as if it had the names and dtype expected)" if _expected(plan) else ""
        read = f"{gib(budget.source_bytes)}{assumed} read {budget.amplification:.2f}×, {rate}"
        inquiry.end("loading", f"{read}; at most {gib(peak)} on a device, {gib(budget.host_peak)} on a host")
    return budget


def _expected(plan: RunPlan) -> bool:
    """Whether the weights are planned without being there."""
    return any(check.name == "weights" and check.status == "unchecked" for check in plan.checks)


def _compile(inquiry: _Inquiry, plan: RunPlan, pod: Accelerator | None, budget: Budget) -> Mapping[str, Outcome]:
    question = inquiry.question
    chosen = _chosen(plan, question.scope)
    target = LOCAL if pod is None else pod.name
    inquiry.begin()
    if not chosen and plan.missing:
        message = "undecided: what runs on the devices is known once every input is available"
        inquiry.end("compile", message, code=NOT_DECIDED, status="unchecked")
        return {}
    if not chosen:
        inquiry.end("compile", "the run computes nothing on the devices", status="skipped")
        return {}
    name, most = _largest(budget)
    if budget.hbm_bytes is not None and most > budget.hbm_bytes:
        inquiry.end("compile", f"not needed: the inputs of {name} alone do not fit", status="skipped")
        return {}
    if not question.compile:
        _without_compiler(inquiry, plan, chosen, "not requested (--no-compile)", pod=pod, status="skipped")
        return {}
    if pod is not None and not pod.can_compile:
        why = f"no compiler for {pod.generation.name} runs without one"
        _without_compiler(inquiry, plan, chosen, why, pod=pod, status="unchecked")
        return {}

    inquiry.begin(f"starting the compiler of {target} for {', '.join(chosen)}")

    def heard(event: Mapping[str, Any]) -> None:
        if event["event"] == "compiling":
            inquiry.progress(f"compiling {event['program']} for {target}")

    try:
        outcomes = compile_programs(
            question.provider,
            question.payload,
            target=LOCAL if pod is None else pod,
            programs=chosen,
            keep_text=question.keep_text,
            on_event=heard,
            kept=question.kept,
            plan=plan,
        )
    except (LibtpuMissing, WorkerBadInput) as error:
        inquiry.end("compile", _first_line([str(error)]), findings=[str(error)], code=BAD_INPUT)
        return {}
    except CompileCrash as error:
        if plan.errors:
            # What the earlier stages refuse need not go through the compiler.
            said = error.last_lines[-1] if error.last_lines else str(error)
            inquiry.end("compile", f"not possible given the problems above:  {said}", status="skipped")
            return {}
        message = str(error).splitlines()[0].removesuffix(":")
        inquiry.end("compile", message, findings=error.last_lines, code=COMPILER_CRASH)
        return {}
    refused = [o for o in outcomes if isinstance(o, Refused)]
    beyond = [o for o in outcomes if _beyond(plan, o)]
    findings = [f"{o.name} does not fit: {o.refusal}" for o in refused]
    findings += [_too_much(plan, o) for o in beyond if isinstance(o, Compiled)]
    findings += too_many_rows(plan, pod) if findings else []
    fitting = [o.name for o in outcomes if o not in refused and o not in beyond]
    compiled = [f"{_named(plan, fitting)} compiled"] if fitting else []
    message = "; ".join([*findings, *compiled, *_arithmetic(plan, question.scope), *_ages(outcomes)])
    inquiry.end("compile", message, findings=findings, code=DOES_NOT_FIT if findings else OK)
    return {outcome.name: outcome for outcome in outcomes}


def _arithmetic(plan: RunPlan, scope: Scope) -> list[str]:
    """What is said of Programs that arithmetic answers for."""
    most = {name: gib(drawn.total) for name, drawn in _bounded(plan, scope).items()}
    return [f"{name} by arithmetic, at most {size} (--all_programs compiles it)" for name, size in most.items()]


def _too_much(plan: RunPlan, outcome: Compiled) -> str:
    """What is said of a Program that a compiler took and a device has no room for."""
    beside = _beside(plan).get(outcome.name, 0)
    said = f"{outcome.name} does not fit: {gib(outcome.peak_bytes + beside)} > {gib(plan.target.limit_bytes or 0)}"
    return said if not beside else f"{said} ({gib(outcome.peak_bytes)} as compiled, {gib(beside)} stay beside it)"


def _named(plan: RunPlan, names: Sequence[str]) -> str:
    """Programs by name, those that the job's time is made of first; of many others the number."""
    timed = {workload.program for workload in plan.workloads}
    first = [name for name in names if name in timed]
    others = [name for name in names if name not in timed]
    if first and len(others) > _FEW:
        return f"{', '.join(first)} and {len(others)} others"
    return ", ".join([*first, *others])


def _ages(outcomes: Sequence[Outcome]) -> list[str]:
    """How old those answers are that were kept."""
    kept = {o.name: time.time() - o.kept_since for o in outcomes if o.kept_since is not None}
    if not kept:
        return []
    oldest = seconds_text(max(kept.values()))
    which = "all" if len(kept) == len(outcomes) else ", ".join(kept)
    return [f"{which} from kept answers, {oldest} old{' at most' if len(kept) > 1 else ''} (--no_cache compiles anew)"]


def _without_compiler(
    inquiry: _Inquiry,
    plan: RunPlan,
    chosen: Sequence[str],
    why: str,
    *,
    pod: Accelerator | None,
    status: StageStatus,
) -> None:
    """Judges by what is known of the Programs' bytes; says so where that decides nothing."""
    limit = plan.target.hbm_bytes
    if plan.errors:
        inquiry.end("compile", why, status=status)
        return
    if limit is None:
        message = f"{why}; nothing is decided: what a device of {plan.target.name} has is not known"
        inquiry.end("compile", message, code=NOT_DECIDED, status="unchecked")
        return
    inquiry.known = name, known = _neediest(plan, chosen, limit)
    lacking = f"not in it: {known.lacking}"
    if known.total > limit:
        finding = f"{name} needs at least {gib(known.total)} > {gib(limit)}: {known}; {lacking}"
        found = [finding, *too_many_rows(plan, pod)]
        inquiry.end("compile", f"{why}, nor needed", findings=found, code=DOES_NOT_FIT)
        return
    inquiry.end(
        "compile", f"{why}; {name} needs at least {_of(known.total, limit)} ({known}); {lacking}", status=status
    )


def _neediest(plan: RunPlan, names: Sequence[str], limit: int) -> tuple[str, Known]:
    """The Program with most known bytes on a chip."""
    found = {name: known_of(plan, name, hbm_bytes=limit) for name in names}
    name = max(found, key=lambda each: found[each].total)
    return name, found[name]


def _cost(
    inquiry: _Inquiry,
    plan: RunPlan,
    pod: Accelerator | None,
    budget: Budget,
    outcomes: Mapping[str, Outcome],
) -> tuple[ProgramVerdict, ...]:
    inquiry.begin()
    workloads = {workload.program: workload for workload in plan.workloads}
    beside = _beside(plan)
    bounded = _bounded(plan, inquiry.question.scope) if outcomes else {}
    verdicts = []
    for program in plan.programs:
        outcome = outcomes.get(program.name)
        if outcome is None and program not in plan.computing and program.name not in bounded:
            continue
        workload, held = workloads.get(program.name), beside.get(program.name, 0)
        drawn = bounded.get(program.name)
        bound = None if drawn is None else drawn.total
        sent = None if pod is None or plan.errors else offloaded(plan, program.name, pod=pod)
        verdict = ProgramVerdict(
            name=program.name, outcome=outcome, bound=bound, beside=held, workload=workload, offloaded=sent
        )
        if isinstance(outcome, Refused):
            verdict = replace(verdict, why_not=why_not(outcome, plan, budget))
        elif outcome is None:
            verdict = replace(verdict, why_not=why_not(None, plan, budget, program=program.name))
            if pod is not None and not pod.can_compile and not plan.errors:
                verdict = _estimated(verdict, plan, pod)
        else:
            # A compiler that refuses nothing itself (CPU, GPU) says how much it needs, and not of what.
            if _beyond(plan, outcome):
                limit, most = plan.target.limit_bytes or 0, outcome.peak_bytes + held
                needed = OutOfMemory(needed=most, available=limit, allocations=(), message="")
                verdict = replace(verdict, why_not=why_not(needed, plan, budget, program=program.name))
            # What runs once takes no time to speak of.
            if pod is not None and (workload is not None or not workloads):
                verdict = _timed(verdict, outcome, pod, plan)
        verdicts.append(verdict)
    timed = [f"{v.name} {span_text(v.time.low, v.time.high)}" for v in verdicts if v.time is not None]
    if timed:
        inquiry.end("cost", f"{', '.join(timed)} ({_basis(verdicts)})")
    else:
        why = _why_no_time(outcomes)
        inquiry.end("cost", why, status="skipped")
    return tuple(verdicts)


def _basis(programs: Sequence[ProgramVerdict]) -> str:
    """What the times of Programs rest on, in three words."""
    found = [program.time.calibration for program in programs if program.time is not None]
    if any(each.estimate for each in found):
        return "an estimate, not measured"
    return "modelled, not calibrated" if any(each.said for each in found) else "modelled, not measured"


def _why_no_time(outcomes: Mapping[str, Outcome]) -> str:
    if not outcomes:
        return "nothing was compiled"
    if not any(isinstance(outcome, Compiled) for outcome in outcomes.values()):
        return "no program compiled, so there is nothing to time"
    return "no cycles are known for this target"


def _parameters(plan: RunPlan) -> float | None:
    """How many parameters the model has; None where there is none to lay out."""
    if isinstance(plan.searchable, str):
        return None
    return float(sum(math.prod(leaf.shape) for leaf in plan.searchable.parameters))


def _timed(verdict: ProgramVerdict, outcome: Compiled, pod: Accelerator, plan: RunPlan) -> ProgramVerdict:
    """The verdict with the time of one execution and what it says of the chips' use."""
    if outcome.figures is None:
        return verdict
    workload: Workload | None = verdict.workload
    network = Network.of(outcome.mesh, pod, outcome.coordinates)
    flops = 0.0 if workload is None else workload.flops_causal
    experts = max((dict(each.leaf.axes).get("expert", 0) for each in plan.sharding.leaves), default=0)
    time_ = step_time(
        outcome.figures, network, model_flops=flops, parameters=_parameters(plan), experts=experts or None
    )
    if time_ is not None and _other_options(plan, verdict.name):
        time_ = replace(time_, calibration=with_other_options(time_.calibration, pod.generation.name))
    if time_ is not None and verdict.offloaded is not None and verdict.offloaded.seconds is not None:
        time_ = replace(time_, transfers=verdict.offloaded.seconds)
    return replace(verdict, time=time_) if time_ is None or workload is None else _used(verdict, time_, workload, pod)


def _other_options(plan: RunPlan, name: str) -> bool:
    """Whether a Program is compiled with other options than its devices' default ones."""
    return dict(plan.program(name).compiler_options) != compiler_options(plan.target.platform, plan.target.kind)


def _estimated(verdict: ProgramVerdict, plan: RunPlan, pod: Accelerator) -> ProgramVerdict:
    """The verdict with an estimate of the time where no compiler can be asked."""
    if verdict.workload is None or (time_ := estimated_time(plan, verdict.workload, pod)) is None:
        return verdict
    return _used(verdict, time_, verdict.workload, pod)


def _used(verdict: ProgramVerdict, time_: StepTime, workload: Workload, pod: Accelerator) -> ProgramVerdict:
    """The verdict with a time and the share of the chips' peak that it comes to."""

    def use(flops: float) -> tuple[float, float]:
        return (mfu(flops, accelerator=pod, seconds=time_.high), mfu(flops, accelerator=pod, seconds=time_.low))

    full = use(workload.flops_full)
    # Kernels skip the pairs that a causal mask hides; where that is most of the work, counting them says nothing.
    return replace(verdict, time=time_, mfu=use(workload.flops_causal), mfu_full=full if full[1] <= 1 else None)


def _bounded(plan: RunPlan, scope: Scope) -> Mapping[str, Drawn]:
    """The Programs that a compiler is not asked for, since arithmetic says that they fit."""
    limit = plan.target.limit_bytes
    if scope != "run" or limit is None:
        return {}
    beside = _beside(plan)
    return {name: drawn for name, drawn in drawn_in(plan).items() if drawn.total + beside.get(name, 0) <= limit}


def _chosen(plan: RunPlan, scope: Scope) -> tuple[str, ...]:
    """The Programs that are compiled: those that make up the job's time, or those of loading and saving too.

    What takes the compiler longest comes first, so that others are compiled beside it.
    """
    timed = {workload.program for workload in plan.workloads}
    names = [program.name for program in plan.computing if not timed or program.name in timed]
    if scope != "timed":
        names += [program.name for program in (*plan.computing, *plan.loading, *plan.saving)]
    answered = _bounded(plan, scope)
    return tuple(name for name in dict.fromkeys(names) if name not in answered)


def _largest(budget: Budget) -> tuple[str, int]:
    """The Program with the largest inputs, and their bytes on a device."""
    return budget.largest, budget.arguments.get(budget.largest, 0)


def _beyond(plan: RunPlan, outcome: Outcome) -> bool:
    """Whether a program that was compiled still does not fit.

    Only TPU compilers refuse by themselves, and they know nothing of what lies beside a Program's inputs.
    """
    limit = plan.target.limit_bytes
    if limit is None or not isinstance(outcome, Compiled):
        return False
    return outcome.peak_bytes + _beside(plan).get(outcome.name, 0) > limit


def _beside(plan: RunPlan) -> Mapping[str, int]:
    """By Program, bytes on a device of what is there while it runs and is none of its inputs."""
    return plan.beside if plan.load is None else {**beside_loading(plan.load), **plan.beside}


def _headline(
    inquiry: _Inquiry,
    budget: Budget,
    load: LoadBudget | None,
    programs: Sequence[ProgramVerdict],
) -> str:
    limit = budget.hbm_bytes
    name, most = _largest(budget)
    refused = [p for p in programs if isinstance(p.outcome, Refused)]
    if limit is not None and most > limit:
        return f"does not fit: {gib(most)} > {gib(limit)} (inputs of {name} alone)"
    if refused:
        assert isinstance(refused[0].outcome, Refused)
        return f"does not fit: {refused[0].outcome.refusal} ({refused[0].name})"
    beyond = [p for p in programs if isinstance(p.outcome, Compiled) and limit and (p.peak_bytes or 0) > limit]
    if beyond and limit is not None:
        return f"does not fit: {gib(beyond[0].peak_bytes or 0)} > {gib(limit)} ({beyond[0].name})"
    if load is not None and limit is not None and load.device_peak > limit:
        return f"does not fit while loading: {gib(load.device_peak)} > {gib(limit)}"
    compiled = [p for p in programs if p.fits is not None]
    times = [f"{p.name} {span_text(p.time.low, p.time.high)}" for p in programs if p.time is not None]
    modelled = f"; {', '.join(times)} ({_basis(programs)})" if times else ""
    if compiled:
        size = _of(max(p.peak_bytes or 0 for p in compiled), limit)
    elif inquiry.known is not None and limit is not None:
        program, known = inquiry.known
        if known.total > limit:
            return f"does not fit: at least {gib(known.total)} > {gib(limit)} ({program}; not compiled)"
        size = f"at least {_of(known.total, limit)}"
    else:
        size = f"{_of(most, limit)} for inputs alone"
    if inquiry.exit_code == NOT_DECIDED:
        return f"not decided: {size}{modelled}"
    if inquiry.exit_code == OK:
        return f"{'fits' if compiled else 'not compiled'}: {size}{modelled}"
    problem = next(stage for stage in inquiry.stages if stage.status in ("refused", "crashed"))
    what = _first_line(problem.findings or [problem.message])
    return f"refused ({problem.name}): {what}; {size}{modelled}"


def _of(nbytes: int, limit: int | None) -> str:
    if limit is None:
        return f"{gib(nbytes)} a device"
    if nbytes < 0.01 * limit:
        return f"{gib(nbytes)} of {gib(limit)} a chip"
    return f"{nbytes / (1 << 30):.2f} of {limit / (1 << 30):.2f} GiB a chip"


def _first_line(texts: Sequence[str]) -> str:
    return texts[0].splitlines()[0] if texts else ""
