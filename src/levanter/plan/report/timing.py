"""Figures of one Program for the reports: its time by module, its traffic by link, its rate.

*LinkTraffic*: the collectives over one set of mesh axes, which share their links. *ModuleTime*: the compute time of one
module.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from haliax_ext.hlo import Scope
from haliax_ext.hlo.op_metadata import UNNAMED
from levanter.html.format import between, percent, percent_between, seconds_text, span_text, three_digits
from levanter.plan.report import view
from levanter.plan.step_time_model import StepTime
from levanter.plan.verdict import ProgramVerdict, Verdict

# Modules that only contain others: their children are the modules of the report.
_TRUNK = frozenset(("transformer", "layers", "stacked", "model", "blocks"))


@dataclass(frozen=True, kw_only=True)
class ModuleTime:
    """Compute of one module.

    Attributes:
        name: `self_attn`, `mlp`, ….
        seconds: modelled, on each chip.
        during: the same by pass: `forward`, `remat`, `backward`.
    """

    name: str
    seconds: float
    during: dict[str, float]


def module_times(program: ProgramVerdict) -> tuple[ModuleTime, ...]:
    """The compute time of a Program by module, largest first; with exposed communication it adds up to the schedule."""
    figures, time = view.figures(program), program.time
    if time is not None and time.calibration.estimate:
        return (ModuleTime(name="compute and memory", seconds=time.kernels_expected, during={}),)
    if figures is None or time is None:
        return ()
    # Seconds of one estimated cycle; the compiler states cycles by operation,
    # and the calibration scales all alike.
    per_cycle = time.cycle_scale * time.cycles / max(figures.total_cycles, 1)
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for scope, cycles in figures.cycles.items():
        sums[module_name(scope)][scope.during] += cycles
    rows = [
        ModuleTime(
            name=name,
            seconds=per_cycle * passes.total(),
            during={during: per_cycle * cycles for during, cycles in passes.items()},
        )
        for name, passes in sums.items()
        if passes.total()
    ]
    if time.kernels_expected:
        # Hand-written kernels have no cycles of the compiler, so they are a row of their own.
        rows.append(ModuleTime(name="kernels", seconds=time.kernels_expected, during={}))
    if time.copies:
        rows.append(ModuleTime(name="copies of arrays", seconds=time.copies, during={}))
    return tuple(sorted(rows, key=lambda part: -part.seconds))


def basis(time: StepTime) -> str:
    """How a time was obtained, in three words."""
    return view.ESTIMATE if time.calibration.estimate else view.MODELLED


def time_text(time: StepTime) -> str:
    """The expected time and its range: `5.93 s, within 4.03–6.14 s`."""
    within = f", within {span_text(time.low, time.high)}" if time.low < time.high else ""
    return seconds_text(time.expected) + within


def passes(shown: Sequence[ModuleTime]) -> list[str]:
    """The passes into which modules are divided, in order; none where there is only one."""
    names = [name for name in ("forward", "remat", "backward") if any(name in part.during for part in shown)]
    return names if len(names) > 1 else []


def bounds(verdict: Verdict, program: ProgramVerdict) -> tuple[tuple[str, float], ...]:
    """The lower bounds of a Program's time, by resource; the low end of its time is the largest of them."""
    time = program.time
    if time is None:
        return ()
    rows = [("compute", time.bounds["compute"]), ("HBM traffic", time.memory)]
    if time.calibration.estimate:
        rows += [(f"links for {link.over}", link.busy) for link in time.links]
    else:
        rows += [(f"links {wire.over} ({wire.link})", wire.busy) for wire in wires(verdict, program) if wire.busy]
    rows += [("activations sent to host memory", time.transfers)]
    rows.append(("model FLOPs at peak", time.peak))
    # Bounds below a thousandth of the time are noise in a table.
    return tuple((name, seconds) for name, seconds in rows if seconds > time.expected / 1000)


def suspicions(time: StepTime) -> tuple[str, ...]:
    """Sentences about bounds that contradict the compiled schedule."""
    schedule = time.compute + time.exposed
    return tuple(
        f"suspect: bound by {name}, {seconds_text(seconds)}, which is {seconds / schedule:.1f} times the schedule as "
        f"compiled ({seconds_text(schedule)}): one of the two is counted wrongly, do not plan with this time"
        for name, seconds in time.suspect.items()
    )


def large_modules(program: ProgramVerdict) -> tuple[ModuleTime, ...]:
    """`module_times` with the modules below a thousandth of the time merged into one at the end."""
    modules, time = module_times(program), program.time
    small = [part for part in modules if time is not None and part.seconds < time.expected / 1000]
    # Merging a single module would hide its name and save no row.
    if len(small) < 2:
        return modules
    during: Counter[str] = Counter()
    for part in small:
        during.update(part.during)
    rest = ModuleTime(
        name=f"{len(small)} smaller modules", seconds=sum(part.seconds for part in small), during=dict(during)
    )
    return (*(part for part in modules if part not in small), rest)


def module_name(scope: Scope) -> str:
    """The module under the trunk that a scope belongs to: `layers.self_attn.q_proj` is `self_attn`."""
    if scope.module == UNNAMED:
        return "without a name"
    names = [name for name in scope.module.split(".") if name not in _TRUNK]
    return names[0] if names else "layers, outside any module"


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The collectives of one kind over one set of mesh axes."""

    kind: str
    count: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class LinkTraffic:
    """The collectives over one set of mesh axes.

    Attributes:
        over: the mesh axes, as text.
        network: `ICI` inside a slice, `DCN` between slices, whatever the target, or `unknown`.
        link: the name of that network on the target: `NVLink` and `network` on GPUs.
        kinds: the collectives by kind, most bytes first.
        busy: seconds in use; `None` where the time is not known.
        exposed: seconds that the schedule does not hide.
    """

    over: str
    network: str
    link: str
    kinds: tuple[Traffic, ...]
    busy: float | None
    exposed: float | None


def wires(verdict: Verdict, program: ProgramVerdict) -> tuple[LinkTraffic, ...]:
    """The collectives of one execution by mesh axes, the busiest first."""
    figures = view.figures(program)
    if figures is None:
        return ()
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    nbytes: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for collective in figures.collectives:
        key = (collective.over, collective.network)
        counts[key][collective.kind] += collective.times
        nbytes[key][collective.kind] += collective.total_bytes
    uses = {(link.over, link.network): link for link in program.time.links} if program.time is not None else {}
    rows = []
    for key, by_kind in nbytes.items():
        over, network = key
        use = uses.get(key)
        rows.append(
            LinkTraffic(
                over=over,
                network="unknown" if network == "unknown" else network.upper(),
                link=view.link_name(verdict, network),
                kinds=tuple(Traffic(kind=kind, count=counts[key][kind], nbytes=n) for kind, n in by_kind.most_common()),
                busy=None if use is None else use.busy,
                exposed=None if use is None else use.exposed,
            )
        )
    return tuple(sorted(rows, key=lambda wire: (-(wire.busy or 0.0), -sum(t.nbytes for t in wire.kinds))))


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The throughput of one Program.

    Attributes:
        tokens_per_second_per_chip: at the high and the low end of its time.
        expected: the same at the expected time.
        items_per_second: items of the workload's unit, over all chips, at the expected time.
    """

    tokens_per_second_per_chip: tuple[float, float]
    expected: float
    items_per_second: float


def rate(verdict: Verdict, program: ProgramVerdict) -> Rate | None:
    """The throughput that follows from a Program's modelled time and workload."""
    work, time, number = program.workload, program.time, view.chips(verdict)
    if work is None or time is None or not number or time.low <= 0:
        return None
    return Rate(
        tokens_per_second_per_chip=(work.tokens / time.high / number, work.tokens / time.low / number),
        expected=work.tokens / time.expected / number,
        items_per_second=work.items / time.expected,
    )


def utilization(program: ProgramVerdict, ends: tuple[float, float] | None) -> float | None:
    """MFU at the expected time, from its values at the high and the low end of the time."""
    time = program.time
    # MFU is inversely proportional to the time, so one end gives every other value.
    return None if time is None or ends is None else ends[0] * time.high / time.expected


def rate_text(speed: Rate) -> str:
    """`173, within 167–254`."""
    return f"{three_digits(speed.expected)}, within {between(*speed.tokens_per_second_per_chip)}"


def utilization_text(program: ProgramVerdict, ends: tuple[float, float] | None) -> str:
    """`51.2 %, within 49.5–75.4 %`; empty where it is not known."""
    expected = utilization(program, ends)
    return "" if expected is None or ends is None else f"{percent(expected)}, within {percent_between(*ends)}"


def exposed_share(time: StepTime) -> float:
    """The share of a step that is exposed communication."""
    return time.exposed / time.expected if time.expected > 0 else 0.0
