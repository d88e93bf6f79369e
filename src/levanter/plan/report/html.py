"""Verdicts as one self-contained page: it needs no network, and is complete without scripts.

Each target is a *panel* with the content of the terminal report, and with a bar, a treemap and bars of time. With
several targets a table that compares them comes first, and a script shows one panel at a time.
"""

import re
from collections.abc import Sequence
from importlib import resources

from haliax_ext.errors import named_shape
from levanter.html.format import (
    between,
    count_text,
    gib,
    percent,
    percent_between,
    seconds_text,
    span_text,
    three_digits,
)
from levanter.html.markup import Content, Html, bullet_list, escaped, section, table, tag, tiles
from levanter.html.page import document, style_sheet
from levanter.plan.aot import Compiled, Refused
from levanter.plan.report import charts, timing, view
from levanter.plan.report.before_you_pay import TITLE, cost_rows
from levanter.plan.report.serving import ReportTable, serving_sheets
from levanter.plan.verdict import ProgramVerdict, Verdict

MOST_ARRAYS = 600
"""Arrays shown individually on a page, over all targets: with more it would be slow to read and to load."""
# The browser fetches nothing, even if text of a config or checkpoint were taken for markup.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)


def to_html(verdicts: Sequence[Verdict], *, more: Sequence[tuple[str, str]] = ()) -> str:
    """The page as HTML.

    Args:
        verdicts: one for each target.
        more: titles and plain texts to add at the end, such as the result of a search.
    """
    names = {verdict.plan.entry_point: None for verdict in verdicts if verdict.plan is not None}
    title = f"Preflight: {', '.join(names) or 'no run'} on {', '.join(verdict.target for verdict in verdicts)}"
    ids = _ids(verdicts)
    body: list[Content] = [
        tag("h1", title),
        tag("p", f"Times are {view.MODELLED}; bytes are the compiler's where it was run.", class_="soft"),
    ]
    if len(verdicts) > 1:
        body += [_comparison(verdicts, ids), _tabs(verdicts, ids)]
    # The bound is over all panels, since every panel is in the page even while a script hides it.
    most = max(60, min(300, MOST_ARRAYS // max(len(verdicts), 1)))
    body += [_panel(verdict, id_, most) for verdict, id_ in zip(verdicts, ids, strict=True)]
    body += [section(heading, tag("pre", text)) for heading, text in more]
    return document(
        title=title,
        style="\n" + style_sheet(_part("page.css")),
        body=tag("main", body),
        script="\n" + _part("page.js"),
        policy=_POLICY,
    )


def _part(name: str) -> str:
    return resources.files("levanter.plan.report").joinpath(name).read_text(encoding="utf-8")


def _ids(verdicts: Sequence[Verdict]) -> list[str]:
    """An anchor for each panel: the target's name in URL characters, numbered where two are equal."""
    ids: list[str] = []
    for number, verdict in enumerate(verdicts, 1):
        name = re.sub(r"[^a-z0-9]+", "-", verdict.target.lower()).strip("-") or "target"
        ids.append(f"{name}-{number}" if name in ids else name)
    return ids


def _badge(verdict: Verdict) -> Html:
    state = view.state(verdict)
    kind = {"fits": " fits", "does not fit": " refused", "compiler crash": " refused", "bad input": " refused"}
    return tag("span", state, class_="badge" + kind.get(state, ""))


def _comparison(verdicts: Sequence[Verdict], ids: Sequence[str]) -> Html:
    rows: list[list[Content]] = []
    for verdict, id_ in zip(verdicts, ids, strict=True):
        program, known = view.main_program(verdict), view.known_bytes(verdict)
        time = program.time if program is not None else None
        speed = timing.rate(verdict, program) if program is not None else None
        limit = verdict.budget.hbm_bytes if verdict.budget is not None else None
        rows.append(
            [
                tag("a", verdict.target, href=f"#{id_}"),
                f"{view.chips(verdict):,}" if view.chips(verdict) else "–",
                _known(known) + (f" of {gib(limit)}" if limit is not None else ""),
                _badge(verdict),
                seconds_text(time.expected) if time is not None else "–",
                span_text(time.low, time.high) if time is not None else "–",
                three_digits(speed.expected) if speed is not None else "–",
                _share_or_dash(timing.utilization(program, program.mfu) if program is not None else None),
                _share_or_dash(timing.exposed_share(time) if time is not None else None),
            ]
        )
    unit = view.counted(*verdicts)
    header = (
        "target", f"{unit}s", f"a {unit} holds", "verdict", "a step", "within", f"tokens/s/{unit}", "MFU", "exposed"
    )  # fmt: skip
    note = "Within: from everything overlapped to the schedule as compiled. MFU: attention over the causal half. "
    note += "Exposed: the share of a step that is communication not hidden by compute."
    return escaped([table(header, rows, numbers=(1, 2, 4, 5, 6, 7, 8)), tag("p", note, class_="soft")])


def _known(known: tuple[int, bool] | None) -> str:
    """Bytes of a chip, marked where they are only a lower bound."""
    return "–" if known is None else ("≥ " if known[1] else "") + gib(known[0])


def _share_or_dash(share: float | None) -> str:
    return "–" if share is None else percent(share)


def _tabs(verdicts: Sequence[Verdict], ids: Sequence[str]) -> Html:
    links = [tag("a", verdict.target, href=f"#{id_}") for verdict, id_ in zip(verdicts, ids, strict=True)]
    return tag("nav", links, class_="targets", aria_label="targets")


def _panel(verdict: Verdict, id_: str, most: int) -> Html:
    content: list[Content] = [
        tag("h2", view.place(verdict), " ", _badge(verdict)),
        tag("p", view.headline(verdict), class_="headline"),
        tag("p", f"mesh {verdict.plan.mesh}", class_="soft") if verdict.plan is not None else "",
        _tiles(verdict),
    ]
    # Findings explain a refusal; inputs that were not checked are listed at the end instead.
    if verdict.exit_code and (findings := view.findings(verdict)):
        content.append(section("What is wrong", bullet_list(findings)))
    if reasons := view.reasons(verdict):
        content.append(section("Why it does not fit", bullet_list(reasons)))
    content += [_serving(sheet) for sheet in serving_sheets(verdict)]
    content += [_bytes(verdict), _arrays(verdict, most)]
    for program in view.main_and_others(verdict)[0]:
        content += [_time(verdict, program), _collectives(verdict, program)]
    content += [_cost(verdict), _loading(verdict), _programs(verdict), _stages(verdict)]
    for title, entries in (
        ("Not checked here", view.unchecked(verdict)),
        ("Not in the time model", view.unknown(verdict)),
        ("Notes", view.notes(verdict)),
    ):
        if entries:
            content.append(section(title, bullet_list(entries)))
    return tag("div", content, class_="panel", id=id_)


def _cost(verdict: Verdict) -> Content:
    """What the whole job costs."""
    rows = [(row.name, row.value, row.reason) for row in cost_rows(verdict)]
    if not rows:
        return ""
    return section(TITLE.capitalize(), table(("", "figure", "from"), rows), note=view.basis_of_all(verdict))


def _serving(sheet: ReportTable) -> Content:
    """A table of a run that generates text."""
    width = max(map(len, (sheet.header, *sheet.rows)))
    numbers = tuple(n for n in range(width) if n not in sheet.text_columns)
    sentences = [tag("p", sentence) for sentence in sheet.sentences]
    header = sheet.header or ("",) * width
    return section(sheet.title[0].upper() + sheet.title[1:], table(header, sheet.rows, numbers=numbers), *sentences)


def _tiles(verdict: Verdict) -> Html:
    """The main figures: memory, time, utilization and loading."""
    figures: list[tuple[str, str, str]] = []
    occupancy, most = view.occupancy(verdict), view.most_bytes(verdict)
    if most is not None:
        limit = occupancy.limit if occupancy is not None else None
        figures.append((f"on a {view.holder(verdict)}", gib(most), f"of {gib(limit)}" if limit else ""))
    program = view.main_program(verdict)
    if program is not None and program.time is not None:
        time = program.time
        within = f"within {span_text(time.low, time.high)}, bound by {time.bound_by}"
        figures.append((f"one {program.name}", seconds_text(time.expected), within))
        figures.append(("exposed", seconds_text(time.exposed), f"{percent(timing.exposed_share(time))} of it"))
        if (speed := timing.rate(verdict, program)) is not None:
            within = f"within {between(*speed.tokens_per_second_per_chip)}"
            figures.append((f"tokens/s/{view.counted(verdict)}", three_digits(speed.expected), within))
        if (share := timing.utilization(program, program.mfu)) is not None and program.mfu is not None:
            figures.append(("MFU", percent(share), f"within {percent_between(*program.mfu)}"))
    if (job := view.job_seconds(verdict)) is not None:
        figures.append(("the whole job", span_text(*job), "without loading"))
    if verdict.load is not None:
        rate = three_digits(verdict.load.gigabytes_per_second)
        figures.append(("loading", seconds_text(verdict.load.seconds), f"at {rate} GB/s a host"))
    return tiles(figures)


def _bytes(verdict: Verdict) -> Content:
    occupancy = view.occupancy(verdict)
    if occupancy is None:
        return ""
    holder = view.holder(verdict)
    rows: list[list[Content]] = [
        [[charts.swatch(segment.name), segment.name], gib(segment.nbytes), _share(segment.nbytes, occupancy)]
        for segment in occupancy.segments
    ]
    if occupancy.free is not None:
        what, nbytes = ("too much", -occupancy.free) if occupancy.free < 0 else ("free", occupancy.free)
        rows.append([tag("b", what), tag("b", gib(nbytes)), _share(nbytes, occupancy)])
    source = {
        "compiled": "the compiler's figures",
        "refused": "as the compiler refused it",
        "arithmetic": "inputs alone, by arithmetic",
    }
    limit = f" of {gib(occupancy.limit)}" if occupancy.limit is not None else ""
    note = f"while {occupancy.program} runs: {gib(occupancy.used)}{limit} ({source[occupancy.source]})"
    whole = ""
    if verdict.budget is not None and verdict.budget.replicated_bytes:
        whole = (
            f"Of the inputs {gib(verdict.budget.replicated_bytes)} are arrays that are replicated on every {holder}."
        )
    return section(
        f"Bytes on a {holder}",
        charts.memory_bar(occupancy, holder=holder),
        table(("group", "bytes", f"of a {holder}" if occupancy.limit else "share"), rows, numbers=(1, 2)),
        tag("p", whole) if whole else "",
        note=note,
    )


def _share(nbytes: int, occupancy: view.Occupancy) -> str:
    return percent(nbytes / (occupancy.limit or max(occupancy.used, 1)))


def _arrays(verdict: Verdict, most: int) -> Content:
    if verdict.budget is None or not verdict.budget.residents:
        return ""
    shown = charts.cells(verdict.budget.residents, most=most)
    rows: list[list[Content]] = []
    for cell in shown:
        resident = cell.resident
        whole = tag("span", "replicated on all of them", class_="whole-mark") if resident.replicated else resident.spec
        rows.append(
            [
                tag("span", cell.name, class_="mono"),
                [charts.swatch(resident.group), resident.group],
                f"{resident.dtype} {named_shape(resident.axes)}" if resident.axes else resident.dtype,
                whole,
                gib(cell.nbytes),
                gib(cell.count * resident.whole_bytes),
            ]
        )
    holder = view.holder(verdict)
    header = ("array", "group", "axes", "sharding", f"on a {holder}", "in all")
    count = count_text(len(verdict.budget.residents), "array")
    hint = f"Point at an array, tap it, or move with the arrow keys. Hatched: replicated on every {holder}."
    return section(
        "Arrays",
        charts.treemap(shown, holder=holder),
        tag("div", hint, class_="detail", aria_live="polite"),
        tag("details", tag("summary", f"{count} as a table"), table(header, rows, numbers=(4, 5))),
        note=f"{count}, each as large as its bytes on a {holder}; hatched ones are replicated on every one",
    )


def _time(verdict: Verdict, program: ProgramVerdict) -> Content:
    time = program.time
    if time is None:
        return ""
    # Bars in sequence are the schedule: modules one after the other, then the
    # communication that they do not hide.
    compute = timing.large_modules(program)
    # The bar and the table use the same color for a module.
    colors = charts.module_classes([part.name for part in compute])
    pieces = [(part.name, part.seconds, colors[part.name]) for part in compute]
    if time.exposed:
        pieces.append(("exposed communication", time.exposed, "g-exposed hatched"))
    bars = [charts.TimeBar(name="in sequence", pieces=tuple(pieces), total=sum(s for _, s, _ in pieces))]
    bars += [
        charts.TimeBar(name=name, pieces=((name, seconds, "g-bound"),), total=seconds)
        for name, seconds in timing.bounds(verdict, program)
    ]
    passes = timing.passes(compute)
    rows: list[list[Content]] = [
        [
            [tag("i", class_=f"swatch {colors[part.name]}", aria_hidden="true"), part.name],
            *(seconds_text(part.during[name]) if name in part.during else "" for name in passes),
            seconds_text(part.seconds),
            percent(part.seconds / time.expected),
        ]
        for part in compute
    ]
    blanks = [""] * len(passes)
    share = percent(timing.exposed_share(time))
    mark = tag("i", class_="swatch g-exposed hatched", aria_hidden="true")
    rows.append([[mark, "exposed communication"], *blanks, seconds_text(time.exposed), share])
    summary = (
        f"{timing.time_text(time)}: from everything overlapped (bound by {time.bound_by}) to the schedule as compiled "
    )
    summary += "with the compiler's own cycles, and all communication that it does not hide."
    if time.calibration.estimate:
        summary = f"{timing.time_text(time)}."
    # All columns but the name: one for each pass, the sum, and the share.
    numbers = tuple(range(1, len(passes) + 3))
    return section(
        f"Time of one {program.name}",
        tag("p", summary),
        charts.time_bars(bars),
        table(("module", *passes, "compute", "of the step"), rows, numbers=numbers),
        *(tag("p", sentence) for sentence in (*timing.suspicions(time), *filter(None, [time.calibration.reason]))),
        tag("p", _speed(verdict, program)),
        note=timing.basis(time),
    )


def _speed(verdict: Verdict, program: ProgramVerdict) -> str:
    sentences = []
    work, speed = program.workload, timing.rate(verdict, program)
    if work is not None and speed is not None:
        tokens = count_text(work.tokens, "token")
        if work.unit != "tokens":
            tokens += f" in {work.items:,} {work.unit} ({three_digits(speed.items_per_second)} {work.unit}/s)"
        sentences.append(f"{tokens} an execution: {timing.rate_text(speed)} tokens/s/{view.counted(verdict)}.")
    if program.mfu is not None:
        full = timing.utilization_text(program, program.mfu_full)
        full = f"; {full} with full attention" if full else ""
        sentences.append(f"MFU {timing.utilization_text(program, program.mfu)} with causal attention{full}.")
    if work is not None:
        often = (
            "the number of executions is unknown"
            if work.executions is None
            else count_text(work.executions, "execution")
        )
        seconds = program.job_seconds
        sentences.append(f"The whole job: {often} ({work.reason})" + (f", {span_text(*seconds)}." if seconds else "."))
    return " ".join(sentences)


def _collectives(verdict: Verdict, program: ProgramVerdict) -> Content:
    traffic = timing.wires(verdict, program)
    if not traffic:
        return ""
    rows: list[list[Content]] = []
    for wire in traffic:
        for number, traffic in enumerate(wire.kinds):
            # Times belong to the links, which all kinds of collectives share,
            # so they appear in the first row alone.
            times = ["not known" if t is None else seconds_text(t) for t in (wire.busy, wire.exposed)]
            shown = times if number == 0 else ["", ""]
            where = [wire.over, wire.link] if number == 0 else ["", ""]
            rows.append([*where, traffic.kind, f"{traffic.count:,}", gib(traffic.nbytes), *shown])
    header = ("mesh axes", "network", "collective", "times", "bytes", "links busy", "exposed")
    note = "bytes of the whole arrays, all times together; one row of times for all that share links"
    return section(f"Collectives of one {program.name}", table(header, rows, numbers=(3, 4, 5, 6)), note=note)


def _loading(verdict: Verdict) -> Content:
    load = verdict.load
    if load is None:
        return ""
    most, least = max(load.bytes_by_host, default=0), min(load.bytes_by_host, default=0)
    leaf, transient = load.device_transient
    by_host = gib(most) if least == most else f"{gib(least)} to {gib(most)}"
    rows: list[list[Content]] = [
        ["in storage", gib(load.source_bytes), f"read {load.amplification:.3f} times over all hosts"],
        ["read by a host", by_host, count_text(len(load.bytes_by_host), "host")],
        ["at most on a device", gib(load.device_peak), "final shards and transient buffers"],
        ["transient", gib(transient), f"at most, for {leaf}" if transient else ""],
        ["at most on a host", gib(load.host_peak), view.host_memory(load)],
        ["time", seconds_text(load.seconds), f"at {three_digits(load.gigabytes_per_second)} GB/s a host"],
    ]
    if load.ceilings:
        rows.append(["from an object store", seconds_text(load.store_seconds), view.load_ceilings(load)])
    return section("Loading", table(("", "", ""), rows, numbers=(1,)), note=view.MODELLED)


def _programs(verdict: Verdict) -> Content:
    rows: list[list[Content]] = []
    for program in verdict.programs:
        outcome, budget = program.outcome, verdict.budget
        if isinstance(outcome, Compiled):
            # The same order as in the text report: what adds up to the peak comes before it, the code after it.
            summands = (
                outcome.memory.argument,
                outcome.result_bytes,
                outcome.temporary_bytes,
                program.coresident_bytes,
            )
            sizes = map(gib, (*summands, program.peak_bytes or 0, outcome.memory.generated_code))
            rows.append([program.name, "fits", *sizes, seconds_text(outcome.compile_seconds)])
        else:
            inputs = gib(budget.arguments[program.name]) if budget and program.name in budget.arguments else ""
            refused = isinstance(outcome, Refused)
            tail = [gib(outcome.refusal.needed), "", seconds_text(outcome.compile_seconds)] if refused else [""] * 3
            state = "refused" if refused else "not compiled" if program.bound is None else "by arithmetic"
            if program.bound is not None and not refused:
                tail = [gib(program.peak_bytes or 0), "", ""]
            rows.append([program.name, state, inputs, "", "", "", *tail])
    if not rows:
        return ""
    summands = ("inputs", "new results", "temporaries", "resident")
    header = ("program", "", *summands, "at its peak", "code", "compiled in")
    note = "the peak is the sum of the four columns before it"
    sentences = (tag("p", sentence) for sentence in view.offloading(verdict))
    return section("Programs", table(header, rows, numbers=tuple(range(2, 9))), *sentences, note=note)


def _stages(verdict: Verdict) -> Content:
    rows: list[list[Content]] = [[s.name, s.status, f"{s.seconds:.2f} s", s.message] for s in verdict.stages]
    return section("Stages", table(("stage", "", "took", "found"), rows, numbers=(2,))) if rows else ""
