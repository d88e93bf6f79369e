"""Figures of a verdict that all reports share: terminal, page, JSON.

*Occupancy*: the bytes on a chip while the program with the largest inputs runs: its inputs by group, padding of their
layout, temporaries, and free memory. Figures of one Program are in `timing`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from haliax_ext.errors import gib
from haliax_ext.hlo import CompiledFigures
from levanter.hardware import unit_name
from levanter.html.format import seconds_text, three_digits
from levanter.plan.aot import Compiled, Refused
from levanter.plan.hbm_budget import Resident
from levanter.plan.load_budget import LoadBudget
from levanter.plan.verdict import ProgramVerdict, Verdict
from levanter.runplan import BAD_INPUT, COMPILER_CRASH, DOES_NOT_FIT, NOT_DECIDED, OK, Workload

SCHEMA = "levanter.plan/1"
MODELLED = "modelled, not measured"
ESTIMATE = "an estimate, not measured"
PADDING, GRADIENTS, TEMPORARIES = "layout padding", "gradients", "temporaries"

State = Literal["fits", "not compiled", "does not fit", "not decided", "bad input", "compiler crash", "failed"]


def state(verdict: Verdict) -> State:
    """The verdict in one to three words."""
    if verdict.exit_code == OK:
        # `fits` is None where nothing was compiled: exit code 0 then means that no check refused the run.
        return "fits" if verdict.fits else "not compiled"
    named: dict[int, State] = {
        BAD_INPUT: "bad input",
        DOES_NOT_FIT: "does not fit",
        NOT_DECIDED: "not decided",
        COMPILER_CRASH: "compiler crash",
    }
    return named.get(verdict.exit_code, "failed")


def headline(verdict: Verdict) -> str:
    """The headline without its leading state, which reports show separately."""
    start = f"{state(verdict)}:"
    text = verdict.headline
    return text[len(start) :].strip() if text.lower().startswith(start) else text


def place(verdict: Verdict) -> str:
    """The pod in words: `v4-256 (4×4×8: 128 chips, 32 hosts)`."""
    if verdict.accelerator is not None:
        return str(verdict.accelerator)
    if verdict.plan is None:
        return verdict.target
    target = verdict.plan.target
    return f"{verdict.target} ({target.devices} × {target.kind})"


def chips(verdict: Verdict) -> int | None:
    """The number of chips of the target; of devices where chips are not known."""
    if verdict.accelerator is not None:
        return verdict.accelerator.chips
    return verdict.plan.target.devices if verdict.plan is not None else None


def link_name(verdict: Verdict, network: str) -> str:
    """What a network of collectives is called on the target: `ici` is ICI on TPUs, and NVLink or PCIe on GPUs."""
    if network not in ("ici", "dcn"):
        return network
    return network.upper() if verdict.accelerator is None else verdict.accelerator.network_names[network]


def holder(verdict: Verdict) -> str:
    """The word for a unit of memory: `chip`, `GPU`, or `device` where a chip has several devices or is not known."""
    if verdict.accelerator is not None:
        return verdict.accelerator.unit
    return "device" if verdict.plan is None else verdict.plan.target.unit


def counted(*verdicts: Verdict) -> str:
    """The word for what `chips` counts; `device` where targets differ."""
    platforms = {
        v.accelerator.generation.platform if v.accelerator else v.plan.target.platform if v.plan else ""
        for v in verdicts
    }
    return unit_name(platforms.pop() if len(platforms) == 1 else "")


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Bytes on a chip of one group."""

    name: str
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """The bytes on a chip while one Program runs.

    Attributes:
        program: its name.
        source: `compiled` or `refused` (the compiler's figures), or `arithmetic` (inputs alone).
        segments: bytes by group, in the order in which they are stacked.
        limit: memory of a chip; `None` where it is not limited.
    """

    program: str
    source: Literal["compiled", "refused", "arithmetic"]
    segments: tuple[Segment, ...]
    limit: int | None

    @property
    def used(self) -> int:
        """Bytes of all segments together."""
        return sum(segment.nbytes for segment in self.segments)

    @property
    def free(self) -> int | None:
        """Bytes left; negative where it does not fit."""
        return None if self.limit is None else self.limit - self.used

    @property
    def scale(self) -> int:
        """The bytes at the full length of a bar that shows both the sum and the limit."""
        return max(self.used, self.limit or 0, 1)


def occupancy(verdict: Verdict) -> Occupancy | None:
    """The bytes on a chip while the Program with the largest inputs runs, for which the budget has groups."""
    budget = verdict.budget
    if budget is None or not budget.arguments:
        return None
    # Only the Program with the largest inputs has its bytes by group in the budget.
    name = budget.largest or max(budget.arguments, key=lambda n: budget.arguments[n])
    inputs = budget.arguments[name]
    segments = [Segment(name=group, nbytes=nbytes) for group, nbytes in budget.groups.items() if nbytes]
    outcome = next((p.outcome for p in verdict.programs if p.name == name), None)
    if isinstance(outcome, Compiled):
        # The compiler counts arguments in tiles; what that adds to the arrays' own bytes is padding.
        padding = max(0, outcome.memory.argument - inputs)
        peak = outcome.peak_bytes
    elif isinstance(outcome, Refused):
        padding, peak = 0, outcome.refusal.needed
    else:
        padding, peak = 0, inputs
    temporaries = max(0, peak - inputs - padding)
    # Gradients are among the temporaries. With microbatches the compiler may
    # keep fewer alive than arithmetic has.
    gradients = min(budget.gradients, temporaries)
    extra = {PADDING: padding, GRADIENTS: gradients, TEMPORARIES: temporaries - gradients}
    segments += [Segment(name=group, nbytes=nbytes) for group, nbytes in extra.items() if nbytes]
    source = "arithmetic"
    if outcome is not None:
        source = "compiled" if isinstance(outcome, Compiled) else "refused"
    return Occupancy(program=name, source=source, segments=tuple(segments), limit=budget.hbm_bytes)


def most_bytes(verdict: Verdict) -> int | None:
    """The most known bytes on a chip over all Programs."""
    known = [p.peak_bytes for p in verdict.programs if p.peak_bytes is not None]
    if verdict.budget is not None:
        known += verdict.budget.arguments.values()
    return max(known, default=None)


def known_bytes(verdict: Verdict) -> tuple[int, bool] | None:
    """Bytes on a chip, and whether they are only a lower bound because no compiler states more; None for no figure."""
    most = most_bytes(verdict)
    if most is None:
        return None
    compiled = any(program.outcome is not None for program in verdict.programs)
    return (most, False) if compiled else (max(most, verdict.lower_bound or 0), True)


def known_text(verdict: Verdict) -> str:
    """Bytes on a chip in GiB: `24.64`, `≥ 24.64` for a lower bound, a dash for no figure."""
    known = known_bytes(verdict)
    # Figures of compiled targets and bounds of others stand in one column, and must not read alike.
    return "–" if known is None else ("≥ " if known[1] else "") + f"{known[0] / (1 << 30):.2f}"


def figures(program: ProgramVerdict) -> CompiledFigures | None:
    """The figures from the compiler's text of a Program; None without a text."""
    return program.outcome.figures if isinstance(program.outcome, Compiled) else None


def basis_of_all(verdict: Verdict) -> str:
    """How the times of a verdict's Programs were obtained."""
    return ESTIMATE if any(p.time is not None and p.time.calibration.estimate for p in verdict.programs) else MODELLED


def offloading(verdict: Verdict) -> tuple[str, ...]:
    """Sentences about what Programs send to host memory."""
    unit = counted(verdict)
    offloads = [program.offloaded for program in verdict.programs if program.offloaded is not None]
    return tuple(
        f"{offload}"
        + (f"; {seconds_text(offload.seconds)} a step over each {unit}'s link to it" if offload.seconds else "")
        for offload in offloads
    )


def main_and_others(verdict: Verdict) -> tuple[tuple[ProgramVerdict, ...], tuple[ProgramVerdict, ...]]:
    """The Programs to show individually, and the small Programs of loading and saving that fit."""
    if verdict.plan is None:
        return verdict.programs, ()
    moving = {program.name for program in (*verdict.plan.loading, *verdict.plan.saving)}
    limit = verdict.plan.target.limit_bytes if verdict.budget is None else verdict.budget.hbm_bytes

    # Programs of loading and saving are shown only where they are the problem.
    def is_small(program: ProgramVerdict) -> bool:
        fits = program.fits or program.bound is not None
        return program.name in moving and bool(fits) and (limit is None or (program.peak_bytes or 0) <= limit)

    others = tuple(program for program in verdict.programs if is_small(program))
    return tuple(program for program in verdict.programs if program not in others), others


def main_program(verdict: Verdict) -> ProgramVerdict | None:
    """The Program with most of the job's time: of those with a workload the one that takes longest."""
    working = [p for p in verdict.programs if p.workload is not None]
    timed = [p for p in working if p.time is not None]

    def length(p: ProgramVerdict) -> float:
        return p.job_seconds[1] if p.job_seconds else p.time.high if p.time else 0.0

    # Without times any Program with a workload, and in a plan without workloads
    # any Program, stands for the run.
    candidates: Sequence[ProgramVerdict] = timed or working or verdict.programs
    return max(candidates, key=length, default=None)


def job_seconds(verdict: Verdict) -> tuple[float, float] | None:
    """All Programs of the job, low and high; `None` where one of them has no time."""
    # One unknown time makes the whole unknown: a sum of the others would read like the job's time.
    working: list[tuple[ProgramVerdict, Workload]] = [(p, p.workload) for p in verdict.programs if p.workload]
    times = [p.job_seconds for p, _ in working]
    if not times or any(t is None for t in times):
        return None
    return sum(t[0] for t in times if t), sum(t[1] for t in times if t)


def unknown(verdict: Verdict) -> tuple[str, ...]:
    """Everything that the time model leaves out, without repetitions."""
    lines = [line for p in verdict.programs if p.time is not None for line in p.time.unknown]
    for program in verdict.programs:
        if isinstance(program.outcome, Compiled) and program.outcome.text_error:
            lines.append(f"{program.name}: the compiler's text is not available ({program.outcome.text_error})")
    return tuple(dict.fromkeys(lines))


def unchecked(verdict: Verdict) -> tuple[str, ...]:
    """The inputs that could not be checked here."""
    checks = verdict.plan.checks if verdict.plan is not None else ()
    return tuple(f"{check.name}: {check.message}" for check in checks if check.status == "unchecked")


def notes(verdict: Verdict) -> tuple[str, ...]:
    """Decisions that the config leaves to the program, and other remarks."""
    lines = list(verdict.notes)
    if verdict.plan is not None:
        lines += [f"{check.name}: {check.message}" for check in verdict.plan.checks if check.status == "note"]
        lines += verdict.plan.notes
    return tuple(dict.fromkeys(lines))


def findings(verdict: Verdict) -> tuple[str, ...]:
    """Everything that is wrong, in order and without repetitions; inputs that were only not checked are no findings."""
    refused = [stage for stage in verdict.stages if stage.status in ("refused", "crashed")]
    lines = dict.fromkeys(line for stage in refused for line in stage.findings or (stage.message,))
    checks = verdict.plan.checks if verdict.plan is not None else ()
    absent = {check.message for check in checks if check.status == "unchecked"}
    # The config stage lists unchecked inputs with its findings; they have a section of their own.
    return tuple(line for line in lines if not any(line.endswith(message) for message in absent))


def reasons(verdict: Verdict) -> tuple[str, ...]:
    """Why Programs do not fit, and what would."""
    return tuple(dict.fromkeys(line for program in verdict.programs for line in program.why_not))


def largest(residents: Sequence[Resident], count: int) -> list[Resident]:
    """The residents with the most bytes on a chip."""
    return sorted(residents, key=lambda resident: -resident.nbytes)[:count]


def host_memory(load: LoadBudget) -> str:
    """A phrase about the host memory of loading."""
    text = "buffers; the shards are on the devices"
    if load.host_unit is None:
        return text
    path, nbytes = load.host_unit
    return f"{text}; {path} is read {gib(nbytes)} at a time, above the memory budget"


def load_ceilings(load: LoadBudget) -> str:
    """The bottleneck of loading from an object store, and the next two ceilings, in GB/s of a host."""
    first, *others = load.ceilings
    listed = ", ".join(f"{ceiling} {three_digits(ceiling.gigabytes_per_second)}" for ceiling in others[:2])
    return f"bound by the {first}, {three_digits(first.gigabytes_per_second)} GB/s a host; {listed}"
