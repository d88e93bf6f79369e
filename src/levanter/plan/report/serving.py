"""The serving section of a report: tables that the terminal and the page share, and JSON values.

A `ReportTable` is a title, a header, rows of cells and sentences below; the terminal and the page each format it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from levanter.html.format import count_text, gib, percent, seconds_text, span_text, three_digits
from levanter.inference.capacity import Roofline
from levanter.plan.decode_roofline import DecodeLoad, PrefillCall, ServingReport, serving_report
from levanter.plan.report import view
from levanter.plan.report.text_table import Align, paragraph, table
from levanter.plan.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class ReportTable:
    """A table with its title.

    Attributes:
        title: what it is about.
        header: of its columns; empty for none.
        rows: their cells, as many as the header has.
        sentences: text below the table.
        text_columns: left-aligned columns; all others are right-aligned.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    sentences: tuple[str, ...] = ()
    text_columns: tuple[int, ...] = (0,)


def serving_sheets(verdict: Verdict) -> tuple[ReportTable, ...]:
    """The tables of a run that generates text; none for others."""
    report = serving_report(verdict)
    if report is None:
        return ()
    sheets = [_bytes(verdict, report)]
    if report.contexts:
        sheets.append(_contexts(verdict, report))
    sheets.append(_prompts(report))
    if report.loads:
        sheets.append(_loads(report, unit=view.counted(verdict)))
    sheets.append(_start(report))
    return tuple(sheets)


def _bytes(verdict: Verdict, report: ServingReport) -> ReportTable:
    memory, served, holder = report.memory, report.served, view.holder(verdict)
    rows = [(name, gib(nbytes)) for name, nbytes in memory.groups.items()]
    rows.append(("temporaries", gib(memory.temporaries)))
    if memory.free is not None:
        # A negative remainder is shown as an excess.
        rows.append(("free", gib(memory.free)) if memory.free >= 0 else ("too much", gib(-memory.free)))
    how = "as compiled, the largest of all Programs" if memory.compiled else "assumed, because nothing is compiled"
    positions, nbytes = memory.page
    sentences = [
        f"temporaries of Programs: {how}",
        f"page / slot bytes: {gib(nbytes)} of a {holder} for a page of {positions:,} positions, "
        f"{gib(served.bytes_per_row(served.context))} for a slot of {served.context:,}",
    ]
    if memory.repeated:
        sentences.append(
            f"repeated {served.repeated}× over group: {gib(memory.repeated)} of the cache are on other {holder}s too, "
            "since query heads are sharded further than heads of keys and values"
        )
    if report.repeated_window:
        sentences.append(
            f"layers with a window keep all positions: {gib(report.repeated_window)} of a {holder} hold positions "
            "outside the window"
        )
    limit = "" if memory.limit is None else f" of {gib(memory.limit)}"
    title = f"{count_text(served.rows, 'row')} on each {holder}{limit}"
    if served.shards > 1:
        # Each shard of the batch holds its rows; the bytes are those of one device of a shard.
        title = f"{served.rows:,} rows in {served.shards} shards, on each {holder}{limit}"
    return ReportTable(title=f"bytes of {title}", header=(), rows=tuple(rows), sentences=tuple(sentences))


def _contexts(verdict: Verdict, report: ServingReport) -> ReportTable:
    lengths = next(iter(report.contexts.values()))
    rows = tuple((dtype, *(f"{count:,}" for count in fits.values())) for dtype, fits in report.contexts.items())
    temporaries = gib(report.memory.temporaries)
    sentence = f"rows as long as that, over all {view.holder(verdict)}s, with {temporaries} left for temporaries"
    return ReportTable(
        title="rows that fit, by their positions and the dtype of keys and values",
        header=("", *lengths),
        rows=rows,
        sentences=(sentence,),
    )


def _prompts(report: ServingReport) -> ReportTable:
    rows = [_call(call, f"{call.rows} × {call.tokens:,}") for call in report.buckets]
    rows += [_call(call, " + ".join(f"{n} × {name}" for name, n in call.calls.items())) for call in report.prompts]
    return ReportTable(
        title=f"time to the first token, prompts by the call and alone ({view.MODELLED})",
        header=("", "prompts × tokens", "time", "within", "roofline", "share", "bottleneck"),
        rows=tuple(rows),
        text_columns=(0, 1, 6),
    )


def _call(call: PrefillCall, what: str) -> tuple[str, ...]:
    # A bucket has the name of its Program; a single prompt is named by its length.
    name = call.name if call.name in call.calls else f"a prompt of {call.name}"
    return (name, what, *_timed(call.time, call.floor))


def _timed(time: tuple[float, float, float] | None, floor: Roofline | None) -> tuple[str, str, str, str, str]:
    known = "–" if time is None else seconds_text(time[1])
    within = "–" if time is None else span_text(time[0], time[2])
    if floor is None:
        return known, within, "–", "–", "–"
    share = "–" if time is None else percent(floor.seconds / time[1])
    return known, within, seconds_text(floor.seconds), share, floor.binds


def _loads(report: ServingReport, *, unit: str) -> ReportTable:
    served = report.served
    header = ("rows", "a token", "within", f"tokens/s/{unit}", "roofline", "share", "bottleneck")
    sentences = [
        f"rows of {served.context:,} positions; roofline: weights and cache at full HBM bandwidth, matmuls at peak"
    ]
    if any(load.time is None for load in report.loads):
        sentences.append(f"not compiled: tokens/s/{unit} at the roofline, which no program exceeds")
    if len(served.decode) == 1 and len(report.loads) > 1:
        # Without buckets of rows the only Program always computes `max_rows` rows.
        sentences.append(f"fewer rows take as long as {served.rows}: one Program serves all of them")
    if report.compute_bound is not None:
        bound = "reading the cache always grows with the rows"
        sentences.append(
            f"products take longer than reading the weights from {report.compute_bound:,} rows on; {bound}"
        )
    return ReportTable(
        title=f"decoding, by running rows ({view.MODELLED})",
        header=header,
        rows=tuple(_load(load) for load in report.loads),
        sentences=tuple(sentences),
        text_columns=(6,),
    )


def _load(load: DecodeLoad) -> tuple[str, ...]:
    time, within, floor, share, binds = _timed(load.time, load.floor)
    # Without a compiled time the rate is that of the roofline, an upper bound.
    at_most = "" if load.time is not None else "≤ "
    return (f"{load.rows:,}", time, within, at_most + three_digits(load.rate), floor, share, binds)


def _start(report: ServingReport) -> ReportTable:
    start = report.start
    rows: list[tuple[str, str]] = []
    if start.source_bytes is not None and start.seconds is not None:
        rows.append(("weights to read", f"{gib(start.source_bytes)} in {seconds_text(start.seconds)}"))
    rows.append(("Programs to compile", f"{start.programs}"))
    rows += [(f"  {name}", f"{seconds_text(seconds)} here") for name, seconds in start.compiled.items()]
    if start.compiled:
        rows.append(("  together", f"{seconds_text(sum(start.compiled.values()))} of compiling here"))
    return ReportTable(title="start", header=(), rows=tuple(rows), text_columns=(0, 1))


def serving_values(verdict: Verdict) -> dict[str, Any] | None:
    """The serving section as plain JSON values; None for runs that generate no text."""
    report = serving_report(verdict)
    if report is None:
        return None
    served, memory, start = report.served, report.memory, report.start
    return {
        "rows": served.rows,
        "rows_automatic": served.automatic,
        "max_seq_len": served.context,
        "cache_dtype": served.dtype,
        "bytes": {
            "parts": memory.groups,
            "made_by_programs_bytes": memory.temporaries,
            "made_by_programs_compiled": memory.compiled,
            "free_bytes": memory.free,
            "page_positions": memory.page[0],
            "page_bytes": memory.page[1],
            "row_bytes": served.bytes_per_row(served.context),
            "repeated": served.repeated,
            "repeated_bytes": memory.repeated,
            "outside_windows_bytes": report.repeated_window,
        },
        "rows_by_context": report.contexts,
        "prefill": [_call_values(call) for call in report.buckets],
        "time_to_first_token": [_call_values(call) for call in report.prompts],
        "decode": [
            {
                "rows": load.rows,
                "program": load.program,
                "token_seconds": _ends(load.time),
                "tokens_per_second_per_chip": load.rate,
                "floor": _floor(load.floor),
                "floor_share": load.share,
            }
            for load in report.loads
        ],
        "compute_bound_rows": report.compute_bound,
        "start": {
            "source_bytes": start.source_bytes,
            "read_seconds": start.seconds,
            "programs": start.programs,
            "compile_seconds": start.compiled,
        },
    }


def _call_values(call: PrefillCall) -> dict[str, Any]:
    return {
        "name": call.name,
        "rows": call.rows,
        "tokens": call.tokens,
        "calls": call.calls,
        "seconds": _ends(call.time),
        "floor": None if call.floor is None else _floor(call.floor),
    }


def _ends(time: tuple[float, float, float] | None) -> dict[str, float] | None:
    return None if time is None else dict(zip(("low", "expected", "high"), time, strict=True))


def _floor(floor: Roofline) -> dict[str, Any]:
    return {
        **{f"{name}_seconds": x for name, x in asdict(floor).items()},
        "seconds": floor.seconds,
        "binds": floor.binds,
    }


def as_text(sheets: Sequence[ReportTable]) -> list[str]:
    """The tables as lines."""
    lines: list[str] = []
    for sheet in sheets:
        # The header may be empty or longer than a row (a price that is known for some rows only).
        width = max(map(len, (sheet.header, *sheet.rows)))
        align: list[Align] = ["left" if n in sheet.text_columns else "right" for n in range(width)]
        lines += ["", *paragraph(sheet.title, indent=0)]
        lines += table(sheet.rows, align=align, header=sheet.header)
        for sentence in sheet.sentences:
            lines += paragraph(sentence)
    return lines
