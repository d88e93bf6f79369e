"""What a verdict says of a run that generates text, as tables that the terminal and the page share, and as values.

A *sheet* is a title, a header, rows of cells, and sentences beneath; the terminal and the page set it each in its way.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from levanter.html.format import count_text, gib, percent, seconds_text, span_text, three_digits
from levanter.inference.capacity import Roofline
from levanter.plan.decode_roofline import Call, Load, ServingReport, serving_report
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
        said: sentences beneath.
        left: columns that are words; all others are set right.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    said: tuple[str, ...] = ()
    left: tuple[int, ...] = (0,)


def serving_sheets(verdict: Verdict) -> tuple[ReportTable, ...]:
    """The tables of a run that generates text; none for others."""
    found = serving_report(verdict)
    if found is None:
        return ()
    sheets = [_bytes(verdict, found)]
    if found.contexts:
        sheets.append(_contexts(verdict, found))
    sheets.append(_prompts(found))
    if found.loads:
        sheets.append(_loads(found))
    sheets.append(_start(found))
    return tuple(sheets)


def _bytes(verdict: Verdict, found: ServingReport) -> ReportTable:
    held, served, one = found.held, found.served, view.holder(verdict)
    rows = [(name, gib(nbytes)) for name, nbytes in held.parts.items()]
    rows.append(("made by Programs", gib(held.room)))
    if held.free is not None:
        rows.append(("free", gib(held.free)) if held.free >= 0 else ("too much", gib(-held.free)))
    how = "as compiled, the Program that makes most" if held.compiled else "taken as so much where nothing is compiled"
    slots, nbytes = held.page
    said = [
        f"made by Programs beside their inputs: {how}",
        f"a page of {slots:,} positions takes {gib(nbytes)} of a {one}, a row of {served.context:,} "
        f"{gib(served.bytes_of_row(served.context))}",
    ]
    if held.repeated:
        said.append(
            f"repeated {served.repeated}× over group: {gib(held.repeated)} of the cache are on other {one}s too, since "
            f"query heads are sharded further than heads of keys and values"
        )
    if found.repeated_window:
        said.append(
            f"layers with a window keep all positions: {gib(found.repeated_window)} of a {one} are of positions that "
            "nothing sees any more"
        )
    limit = "" if held.limit is None else f" of {gib(held.limit)}"
    title = f"{count_text(served.rows, 'row')} on each {one}{limit}"
    if served.shards > 1:
        title = f"{served.rows:,} rows in {served.shards} shards, on each {one}{limit}"
    return ReportTable(title=f"bytes of {title}", header=(), rows=tuple(rows), said=tuple(said))


def _contexts(verdict: Verdict, found: ServingReport) -> ReportTable:
    lengths = next(iter(found.contexts.values()))
    rows = tuple((dtype, *(f"{count:,}" for count in fits.values())) for dtype, fits in found.contexts.items())
    room = gib(found.held.room)
    said = f"rows as long as that, over all {view.holder(verdict)}s, with {room} left for what Programs make"
    return ReportTable(
        title="rows that fit, by their positions and the dtype of keys and values",
        header=("", *lengths),
        rows=rows,
        said=(said,),
    )


def _prompts(found: ServingReport) -> ReportTable:
    rows = [_call(call, f"{call.rows} × {call.tokens:,}") for call in found.buckets]
    rows += [_call(call, " + ".join(f"{n} × {name}" for name, n in call.calls.items())) for call in found.prompts]
    return ReportTable(
        title=f"time to the first token, prompts by the call and alone ({view.MODELLED})",
        header=("", "prompts × tokens", "time", "within", "floor", "share", "binds"),
        rows=tuple(rows),
        left=(0, 1, 6),
    )


def _call(call: Call, what: str) -> tuple[str, ...]:
    name = call.name if call.name in call.calls else f"a prompt of {call.name}"
    return (name, what, *_timed(call.time, call.floor))


def _timed(time: tuple[float, float, float] | None, floor: Roofline | None) -> tuple[str, str, str, str, str]:
    known = "–" if time is None else seconds_text(time[1])
    within = "–" if time is None else span_text(time[0], time[2])
    if floor is None:
        return known, within, "–", "–", "–"
    share = "–" if time is None else percent(floor.seconds / time[1])
    return known, within, seconds_text(floor.seconds), share, floor.binds


def _loads(found: ServingReport) -> ReportTable:
    served = found.served
    priced = any(load.dollars is not None for load in found.loads)
    header = ("rows", "a token", "within", "tokens/s/chip", "floor", "share", "binds")
    said = [f"rows of {served.context:,} positions; floor: weights and cache at HBM's full rate, products at peak"]
    if any(load.time is None for load in found.loads):
        said.append("not compiled: tokens/s/chip at the floor, which no program exceeds")
    if len(served.decode) == 1 and len(found.loads) > 1:
        said.append(f"fewer rows take as long as {served.rows}: one Program is for all")
    if found.compute_bound is not None:
        bound = "reading the cache has no such number, it grows with the rows"
        said.append(f"products take longer than reading the weights from {found.compute_bound:,} rows on; {bound}")
    return ReportTable(
        title=f"decoding, by running rows ({view.MODELLED})",
        header=(*header, "$ a million tokens") if priced else header,
        rows=tuple(_load(load, priced=priced) for load in found.loads),
        said=tuple(said),
        left=(6,),
    )


def _load(load: Load, *, priced: bool) -> tuple[str, ...]:
    time, within, floor, share, binds = _timed(load.time, load.floor)
    at_most = "" if load.time is not None else "≤ "
    cells = (f"{load.rows:,}", time, within, at_most + three_digits(load.rate), floor, share, binds)
    return (*cells, three_digits(load.dollars)) if priced and load.dollars is not None else cells


def _start(found: ServingReport) -> ReportTable:
    start = found.start
    rows: list[tuple[str, str]] = []
    if start.source_bytes is not None and start.seconds is not None:
        rows.append(("weights to read", f"{gib(start.source_bytes)} in {seconds_text(start.seconds)}"))
    rows.append(("Programs to compile", f"{start.programs}"))
    rows += [(f"  {name}", f"{seconds_text(seconds)} here") for name, seconds in start.compiled.items()]
    if start.compiled:
        rows.append(("  together", f"{seconds_text(sum(start.compiled.values()))} of compiling here"))
    return ReportTable(title="start", header=(), rows=tuple(rows), left=(0, 1))


def serving_values(verdict: Verdict) -> dict[str, Any] | None:
    """The same as plain values; None for runs that generate no text."""
    found = serving_report(verdict)
    if found is None:
        return None
    served, held, start = found.served, found.held, found.start
    return {
        "rows": served.rows,
        "rows_automatic": served.automatic,
        "max_seq_len": served.context,
        "cache_dtype": served.dtype,
        "bytes": {
            "parts": held.parts,
            "made_by_programs_bytes": held.room,
            "made_by_programs_compiled": held.compiled,
            "free_bytes": held.free,
            "page_positions": held.page[0],
            "page_bytes": held.page[1],
            "row_bytes": served.bytes_of_row(served.context),
            "repeated": served.repeated,
            "repeated_bytes": held.repeated,
            "outside_windows_bytes": found.repeated_window,
        },
        "rows_by_context": found.contexts,
        "prefill": [_call_values(call) for call in found.buckets],
        "time_to_first_token": [_call_values(call) for call in found.prompts],
        "decode": [
            {
                "rows": load.rows,
                "program": load.program,
                "token_seconds": _ends(load.time),
                "tokens_per_second_per_chip": load.rate,
                "floor": _floor(load.floor),
                "floor_share": load.share,
                "dollars_per_million_tokens": load.dollars,
            }
            for load in found.loads
        ],
        "compute_bound_rows": found.compute_bound,
        "start": {
            "source_bytes": start.source_bytes,
            "read_seconds": start.seconds,
            "programs": start.programs,
            "compile_seconds": start.compiled,
        },
    }


def _call_values(call: Call) -> dict[str, Any]:
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
        width = max(map(len, (sheet.header, *sheet.rows)))
        align: list[Align] = ["left" if n in sheet.left else "right" for n in range(width)]
        lines += ["", *paragraph(sheet.title, indent=0)]
        lines += table(sheet.rows, align=align, header=sheet.header)
        for sentence in sheet.said:
            lines += paragraph(sentence)
    return lines
