"""Verdicts as plain text for a terminal or a file: no colors, at most 110 columns.

One target: the verdict, its stages, the bytes on a chip, loading, each Program, its collectives and its time, and what
is not known. Several targets: a table that compares them, then the reasons for each refusal; the details are in the
report of one target, and on the page.
"""

from collections.abc import Sequence

from haliax_ext.errors import named_shape
from levanter.html.format import (
    count_text,
    gib,
    percent,
    seconds_text,
    span_text,
    three_digits,
    visible,
)
from levanter.plan.aot import Compiled, Refused
from levanter.plan.load_budget import LoadBudget
from levanter.plan.report import timing, view
from levanter.plan.report.before_you_pay import cost_lines
from levanter.plan.report.serving import as_text, serving_sheets
from levanter.plan.report.text_table import WIDTH, Align, bar, paragraph, table
from levanter.plan.step_time_model import StepTime
from levanter.plan.verdict import ProgramVerdict, Verdict

LARGEST = 6
_BAR = 44


def render(verdicts: Sequence[Verdict]) -> str:
    """The verdicts as text, in the given order."""
    lines = _one(verdicts[0]) if len(verdicts) == 1 else _several(verdicts)
    return visible("\n".join(lines)) + "\n"


def _several(verdicts: Sequence[Verdict]) -> list[str]:
    lines = [*comparison(verdicts)]
    for verdict in verdicts:
        if verdict.exit_code:
            lines += ["", *_heading(verdict), *_wrong(verdict)]
    # Targets share a config, so what is unchecked for one is unchecked for all: each line once.
    lines_ = [line for verdict in verdicts for line in view.unchecked(verdict)]
    lines += _listed("not checked here", tuple(dict.fromkeys(lines_)))
    return [*lines, "", "  for details, plan one target at a time, or write the page with --html FILE"]


def comparison(verdicts: Sequence[Verdict]) -> list[str]:
    """One row for each target."""
    unit = view.counted(*verdicts)
    header = (
        "target", f"{unit}s", f"GiB a {unit}", "of", "verdict", "a step", "within", f"tokens/s/{unit}", "MFU", "exposed"
    )  # fmt: skip
    numbers: list[Align] = ["right"] * 5
    align: tuple[Align, ...] = ("left", "right", "right", "right", "left", *numbers)
    rows = []
    for verdict in verdicts:
        program = view.main_program(verdict)
        time = program.time if program is not None else None
        speed = timing.rate(verdict, program) if program is not None else None
        limit = verdict.budget.hbm_bytes if verdict.budget is not None else None
        rows.append(
            (
                verdict.target,
                f"{view.chips(verdict):,}" if view.chips(verdict) else "–",
                view.known_text(verdict),
                f"{limit / (1 << 30):.2f}" if limit is not None else "–",
                view.state(verdict),
                _step(time) if time is not None else "–",
                span_text(time.low, time.high) if time is not None else "–",
                three_digits(speed.expected) if speed is not None else "–",
                _share_or_dash(timing.utilization(program, program.mfu) if program is not None else None),
                _share_or_dash(timing.exposed_share(time) if time is not None else None),
            )
        )
    # A target whose run cannot be described has no plan; any other one names the command.
    what = next((f"{v.plan.entry_point}: " for v in verdicts if v.plan is not None), "")
    lines = [
        *paragraph(f"{what}{count_text(len(verdicts), 'target')} (times are {view.MODELLED})", indent=0),
        "",
    ]
    lines += table(rows, align=align, header=header)
    legend = "within: from everything overlapped to only what the schedule hides; MFU: attention over the causal "
    legend += "half; exposed: the share of a step that is communication not hidden by compute"
    if any(known[1] for verdict in verdicts if (known := view.known_bytes(verdict)) is not None):
        legend += "; ≥: a lower bound by arithmetic, not compiled"
    return [*lines, "", *paragraph(legend)]


def _step(time: StepTime) -> str:
    return seconds_text(time.expected) + (" (estimate)" if time.calibration.estimate else "")


def _share_or_dash(share: float | None) -> str:
    return "–" if share is None else percent(share)


def _one(verdict: Verdict) -> list[str]:
    lines = [*_heading(verdict), "", *_stages(verdict)]
    if verdict.exit_code:
        lines += _wrong(verdict)
    lines += as_text(serving_sheets(verdict))
    lines += [*_bytes(verdict), *_largest(verdict), *_loading(verdict.load), *_programs(verdict)]
    for program in view.main_and_others(verdict)[0]:
        lines += [*_time(verdict, program), *_collectives(verdict, program)]
    lines += [*_job(verdict), *cost_lines(verdict)]
    lines += _listed("not in the time model", view.unknown(verdict))
    lines += _listed("not checked here", view.unchecked(verdict))
    return lines + _listed("notes", view.notes(verdict))


def _heading(verdict: Verdict) -> list[str]:
    name = f"{verdict.plan.entry_point} on " if verdict.plan is not None else ""
    mesh = f", mesh {verdict.plan.mesh}" if verdict.plan is not None else ""
    lines = paragraph(f"{name}{view.place(verdict)}{mesh}", indent=0)
    return lines + paragraph(f"{view.state(verdict).upper()}  {view.headline(verdict)}", indent=0)


def _stages(verdict: Verdict) -> list[str]:
    """One entry for each stage; long messages continue on further lines."""
    if not verdict.stages:
        return []
    names = max(len(stage.name) for stage in verdict.stages)
    lines = ["stages"]
    for stage in verdict.stages:
        front = f"{stage.name:<{names}}  {stage.status:<9}  {stage.seconds:>6.2f} s  "
        lines += paragraph(front + stage.message, hanging=len(front))
    return lines


def _wrong(verdict: Verdict) -> list[str]:
    lines = _listed("what is wrong", view.findings(verdict))
    return lines + _listed("why it does not fit", view.reasons(verdict))


def _listed(title: str, entries: Sequence[str]) -> list[str]:
    if not entries:
        return []
    lines = _title(title)
    for entry in entries:
        lines += paragraph(entry, mark="• ")
    return lines


def _title(text: str) -> list[str]:
    return ["", *paragraph(text, indent=0)]


def _bytes(verdict: Verdict) -> list[str]:
    """The bytes on a chip by group, stacked against its memory."""
    occupancy = view.occupancy(verdict)
    if occupancy is None:
        return []
    holder = view.holder(verdict)
    limit = f" of {gib(occupancy.limit)}" if occupancy.limit is not None else ""
    source = {"compiled": "as compiled", "refused": "as the compiler refused it", "arithmetic": "inputs alone"}
    lines = _title(
        f"bytes on a {holder} while {occupancy.program} runs: {gib(occupancy.used)}{limit} ({source[occupancy.source]})"
    )
    mark = None if occupancy.limit is None else occupancy.limit / occupancy.scale
    rows, begin = [], 0
    for segment in occupancy.segments:
        piece = bar(begin / occupancy.scale, segment.nbytes / occupancy.scale, width=_BAR, mark=mark)
        rows.append((segment.name, gib(segment.nbytes), _share(segment.nbytes, occupancy), f"▕{piece}▏"))
        # Each row's piece begins where the one before it ended, so the column reads as one stacked bar.
        begin += segment.nbytes
    if occupancy.free is not None:
        over = occupancy.free < 0
        # What exceeds the limit is drawn after the mark; free memory is an empty piece.
        beyond = -occupancy.free if over else 0
        piece = bar((occupancy.limit or 0) / occupancy.scale, beyond / occupancy.scale, width=_BAR, mark=mark)
        what = ("too much", gib(-occupancy.free)) if over else ("free", gib(occupancy.free))
        rows.append((*what, _share(abs(occupancy.free), occupancy), f"▕{piece}▏"))
    lines += table(rows, align=("left", "right", "right", "left"))
    budget = verdict.budget
    if budget is not None and budget.replicated_bytes:
        lines += paragraph(
            f"of the inputs {gib(budget.replicated_bytes)} are arrays that are replicated on every {holder}"
        )
    return lines


def _share(nbytes: int, occupancy: view.Occupancy) -> str:
    return percent(nbytes / occupancy.limit) if occupancy.limit else percent(nbytes / max(occupancy.used, 1))


def _largest(verdict: Verdict) -> list[str]:
    if verdict.budget is None or not verdict.budget.residents:
        return []
    residents = view.largest(verdict.budget.residents, LARGEST)
    # Bytes are right-aligned, and the second line of an array is indented past them.
    size = max(len(gib(resident.nbytes)) for resident in residents)
    lines = _title(f"largest of {count_text(len(verdict.budget.residents), 'array')} on a {view.holder(verdict)}")
    for resident in residents:
        whole = "replicated on all of them" if resident.replicated else f"of {gib(resident.whole_bytes)}"
        what = f"{gib(resident.nbytes):>{size}}  {resident.path} {resident.dtype}, {whole}"
        lines += paragraph(what, hanging=size + 2)
        spec = "" if resident.replicated else f" {resident.spec}"
        lines += paragraph(named_shape(resident.axes) + spec, indent=size + 4)
    return lines


def _loading(load: LoadBudget | None) -> list[str]:
    if load is None:
        return []
    most = max(load.bytes_by_host, default=0)
    least = min(load.bytes_by_host, default=0)
    by_host = gib(most) if most == least else f"{gib(least)} to {gib(most)}"
    leaf, transient = load.device_transient
    rows = [
        ("in storage", gib(load.source_bytes), f"read {load.amplification:.3f} times over all hosts"),
        ("read by a host", by_host, f"{count_text(len(load.bytes_by_host), 'host')}"),
        ("at most on a device", gib(load.device_peak), "final shards and transient buffers"),
        ("transient", gib(transient), f"at most, for {leaf}" if transient else ""),
        ("at most on a host", gib(load.host_peak), view.host_memory(load)),
        ("time", seconds_text(load.seconds), f"at {three_digits(load.gigabytes_per_second)} GB/s a host"),
    ]
    if load.ceilings:
        rows.append(("from an object store", seconds_text(load.store_seconds), view.load_ceilings(load)))
    return [*_title(f"loading ({view.MODELLED})"), *table(rows, align=("left", "right", "left"))]


def _programs(verdict: Verdict) -> list[str]:
    """The compiler's figures of each Program."""
    if not verdict.programs:
        return []
    rows = []
    shown, others = view.main_and_others(verdict)
    limit = verdict.budget.hbm_bytes if verdict.budget is not None else None
    coresident = any(program.coresident_bytes for program in shown if program.outcome is not None)
    for program in shown:
        outcome = program.outcome
        if isinstance(outcome, Compiled):
            # Results that are written over donated inputs take no new bytes. The three columns and the resident bytes
            # add up to the peak; a TPU compiler leaves out the code, which therefore comes after the sum.
            summands = (outcome.memory.argument, outcome.result_bytes, outcome.temporary_bytes)
            sizes = (
                *summands,
                *((program.coresident_bytes,) if coresident else ()),
                program.peak_bytes or 0,
                outcome.memory.generated_code,
            )
            # CPU and GPU compilers accept a Program that exceeds the memory, and no
            # TPU compiler counts co-resident arrays.
            state = "does not fit" if limit is not None and (program.peak_bytes or 0) > limit else "fits"
            rows.append((program.name, state, *map(gib, sizes), seconds_text(outcome.compile_seconds)))
        else:
            inputs = verdict.budget.arguments.get(program.name) if verdict.budget is not None else None
            refused = isinstance(outcome, Refused)
            tail = (gib(outcome.refusal.needed), "", seconds_text(outcome.compile_seconds)) if refused else ("",) * 3
            state = "refused" if refused else "not compiled" if program.bound is None else "by arithmetic"
            if program.bound is not None and not refused:
                tail = (gib(program.peak_bytes or 0), "", "")
            # New results, temporaries and, if there is such a column, resident bytes are known to a compiler only.
            blanks = [""] * (3 if coresident else 2)
            rows.append((program.name, state, gib(inputs) if inputs is not None else "", *blanks, *tail))
    front = ("program", "", "inputs", "new results", "temporaries")
    header = (*front, *(("resident",) if coresident else ()), "at its peak", "code", "compiled in")
    numbers: list[Align] = ["right"] * (len(header) - 2)
    lines = [*_title("programs"), *table(rows, align=("left", "left", *numbers), header=header)]
    if others:
        most = max(others, key=lambda program: program.peak_bytes or 0)
        many = count_text(len(others), "more Program")
        summary = f"{many} for loading and saving: at most {gib(most.peak_bytes or 0)} ({most.name})"
        lines += paragraph(summary)
    for sentence in view.offloading(verdict):
        lines += paragraph(sentence)
    return lines


def _time(verdict: Verdict, program: ProgramVerdict) -> list[str]:
    """The time of one execution, by module and pass."""
    time = program.time
    if time is None:
        return []
    lines = _title(f"time of one {program.name}: {timing.time_text(time)} ({timing.basis(time)})")
    compute = timing.large_modules(program)
    # At least the sum of the pieces, so that rounding does not make them longer than the bar.
    scale = max(time.expected, sum(part.seconds for part in compute) + time.exposed, 1e-12)
    passes = timing.passes(compute)
    names = max(len(name) for name in ["exposed communication", *(part.name for part in compute)])
    # The bar gets what the margins, its two end marks and the columns of seconds (one a pass, one for all) leave.
    width = max(16, min(_BAR, WIDTH - names - 11 * (len(passes) + 1) - 7))
    rows, begin = [], 0.0
    for part in compute:
        cells = [seconds_text(part.during[name]) if name in part.during else "" for name in passes]
        rows.append((part.name, *cells, seconds_text(part.seconds), _bar(begin, part.seconds, scale, width)))
        begin += part.seconds
    if time.exposed:
        blanks = [""] * len(passes)
        mark = _bar(begin, time.exposed, scale, width)
        rows.append(("exposed communication", *blanks, seconds_text(time.exposed), mark))
    header = ("", *passes, "together", "") if passes else ()
    numbers: list[Align] = ["right"] * (len(passes) + 1)
    lines += table(rows, align=("left", *numbers, "left"), header=header)
    summary = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in timing.bounds(verdict, program))
    lines += paragraph(f"if all of it overlapped: {summary}; the low end is bound by {time.bound_by}")
    for sentence in (*timing.suspicions(time), *filter(None, [time.calibration.reason])):
        lines += paragraph(sentence)
    speed, work = timing.rate(verdict, program), program.workload
    if speed is not None and work is not None:
        summary = f"{count_text(work.tokens, 'token')} an execution"
        if work.unit != "tokens":
            summary += f" in {work.items:,} {work.unit}, {three_digits(speed.items_per_second)} {work.unit}/s"
        lines += paragraph(f"{summary}: {timing.rate_text(speed)} tokens/s/{view.counted(verdict)}")
    if program.mfu is not None:
        full = timing.utilization_text(program, program.mfu_full)
        full = f"; {full} with full attention" if full else ""
        lines += paragraph(f"MFU {timing.utilization_text(program, program.mfu)} with causal attention{full}")
    return lines


def _bar(begin: float, length: float, scale: float, width: int) -> str:
    return f"▕{bar(begin / scale, length / scale, width=width)}▏"


def _collectives(verdict: Verdict, program: ProgramVerdict) -> list[str]:
    traffic_by_links = timing.wires(verdict, program)
    if not traffic_by_links:
        return []
    rows = []
    for wire in traffic_by_links:
        for number, traffic in enumerate(wire.kinds):
            # Times belong to the links, which all kinds of collectives over these axes share.
            first = number == 0
            rows.append(
                (
                    wire.over if first else "",
                    wire.link if first else "",
                    traffic.kind,
                    f"{traffic.count:,}",
                    gib(traffic.nbytes),
                    _seconds_or(wire.busy) if first else "",
                    _seconds_or(wire.exposed) if first else "",
                )
            )
    header = ("mesh axes", "network", "collective", "times", "bytes", "links busy", "exposed")
    align: tuple[Align, ...] = ("left", "left", "left", "right", "right", "right", "right")
    title = f"collectives of one {program.name} (bytes of the whole array, all times; {view.MODELLED})"
    return [*_title(title), *table(rows, align=align, header=header)]


def _seconds_or(value: float | None) -> str:
    return "not known" if value is None else seconds_text(value)


def _job(verdict: Verdict) -> list[str]:
    working = [program for program in verdict.programs if program.workload is not None]
    if not working:
        return []
    lines = _title(f"the whole job ({view.basis_of_all(verdict)})")
    for program in working:
        work, seconds = program.workload, program.job_seconds
        assert work is not None
        often = (
            "the number of executions is unknown"
            if work.executions is None
            else count_text(work.executions, "execution")
        )
        long = f": {span_text(*seconds)}" if seconds is not None else ""
        lines += paragraph(f"{program.name}: {often} ({visible(work.reason)}){long}")
    total = view.job_seconds(verdict)
    if total is not None and len(working) > 1:
        lines += paragraph(f"together {span_text(*total)}")
    return lines
