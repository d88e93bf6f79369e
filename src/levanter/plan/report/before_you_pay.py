"""The section *before you pay* of a report: what the whole job costs, one row a question, each with its reason.

Also the comparison of pods for a deadline or a budget.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from levanter.config.durations import format_duration
from levanter.html.format import between, columns, count_text, gib, percent_between, span_text, three_digits
from levanter.plan.decode_roofline import DecodeLoad, serving_report
from levanter.plan.job_cost import (
    GB,
    INTERRUPTED_DAYS,
    INTERRUPTED_DEVICES,
    INTERRUPTIONS,
    LINK_SHARE,
    SPOT,
    STORE_RATES,
    TOKEN_BYTES,
    CostRange,
    Exports,
    Interruptions,
    JobCost,
    Saves,
    Storage,
    bytes_by_host,
    job_cost,
    store_rate,
    token_price,
)
from levanter.plan.pod_choice import Offer, PodChoice
from levanter.plan.report import view
from levanter.plan.report.text_table import paragraph, table
from levanter.plan.verdict import Verdict
from levanter.runplan import PlanOptions

TITLE = "before you pay"


@dataclass(frozen=True, kw_only=True)
class CostRow:
    """The answer to one question.

    Attributes:
        name: of the figure.
        value: with its unit and its range.
        reason: what it is computed from.
    """

    name: str
    value: str
    reason: str


def cost_rows(verdict: Verdict) -> tuple[CostRow, ...]:
    """The rows of a run; none for one that cannot run, and for devices that are not a pod."""
    cost = job_cost(verdict)
    if cost is None:
        return ()
    # Training runs generate samples, too, which are no part of what is paid for.
    loads = () if cost.training else _decode_loads(verdict)
    rows = [*_serving(verdict, cost, loads)] if loads else []
    if cost.work is not None or not loads:
        rows += _time_and_money(verdict, cost)
    rows += _start(verdict, cost)
    if cost.saves is not None:
        rows += _checkpoints(verdict, cost.saves)
    if cost.exports is not None:
        rows += _exports(verdict, cost.exports)
    if cost.interruptions is not None:
        rows += _interruptions(verdict, cost, cost.interruptions)
    rows += _host(cost)
    if cost.training:
        rows += _input(verdict, cost)
    if cost.storage is not None:
        rows += _storage(verdict, cost.storage)
    return tuple(rows)


def cost_lines(verdict: Verdict) -> list[str]:
    """The section as text."""
    rows = cost_rows(verdict)
    if not rows:
        return []
    # Three columns; the reason takes what the others leave, and wraps under itself.
    name, value = (max(columns(getattr(row, key)) for row in rows) for key in ("name", "value"))
    lines = ["", f"{TITLE} ({view.basis_of_all(verdict)})"]
    for row in rows:
        pads = " " * (name - columns(row.name)), " " * (value - columns(row.value))
        front = f"{row.name}{pads[0]}  {row.value}{pads[1]}  "
        lines += paragraph(front + row.reason, hanging=len(front))
    return lines


def spanned(span: CostRange, unit: str = "") -> str:
    """`1.23, within 1.10–1.50` of a unit."""
    within = f", within {_between(span)}" if three_digits(span.low) != _number(span.high) else ""
    return f"{_number(span.expected)}{within}{f' {unit}' if unit else ''}"


def duration(span: CostRange) -> str:
    """`1.23 h, within 1.10–1.50 h`; without an end where interruptions come faster than restarts."""
    if not math.isfinite(span.expected):
        return "without end"
    expected = span_text(span.expected, span.expected)
    if not math.isfinite(span.high):
        return f"{expected}, at least {span_text(span.low, span.low)}, without end at worst"
    first, last = (span_text(end, end) for end in (span.low, span.high))
    # One unit for both, unless they are far apart.
    within = span_text(span.low, span.high) if span.low > 0.05 * span.high else f"{first} to {last}"
    return expected if first == last else f"{expected}, within {within}"


def _dollars(price: float) -> str:
    """A price as it was given, with cents."""
    return f"${price:,.2f}" if round(price, 2) == price else f"${price:.10g}"


def _number(value: float) -> str:
    return three_digits(value) if math.isfinite(value) else "∞"


def _between(span: CostRange) -> str:
    return between(span.low, span.high) if math.isfinite(span.high) else f"{three_digits(span.low)}–∞"


def _time_and_money(verdict: Verdict, cost: JobCost) -> Iterator[CostRow]:
    unit = view.counted(verdict)
    if cost.total is None or cost.work is None:
        missing = ", ".join(cost.unknown)
        why = f"the number of executions of {missing} is unknown" if missing else "no step time is modelled"
        yield CostRow(name="total time", value="unknown", reason=why)
        yield CostRow(name=f"{unit}-hours, dollars", value="unknown", reason="they follow from the total time")
        return
    # The reason names the terms of the sum that this run has.
    terms = [f"steps and evaluations {duration(cost.work)}"] if cost.training else [f"work {duration(cost.work)}"]
    terms += ["start"] if cost.loading or cost.compilation else []
    terms += ["exports"] if cost.exports is not None else []
    terms += ["checkpoints, interruptions"] if cost.interruptions is not None else []
    reason = "; ".join([", ".join(terms), *_left_out(verdict, cost)])
    yield CostRow(name="total time", value=duration(cost.total), reason=reason)
    hours = cost.chip_hours
    assert hours is not None
    yield CostRow(name=f"{unit}-hours", value=spanned(hours), reason=f"{count_text(cost.chips, unit)} × total time")
    yield from _prices(verdict, cost)


def _left_out(verdict: Verdict, cost: JobCost) -> Iterator[str]:
    """What the total time does not contain."""
    plan = verdict.plan
    if cost.unknown:
        yield f"without {', '.join(cost.unknown)}, executed an unknown number of times"
    if cost.compilation is None:
        yield "without compilation: nothing was compiled here"
    if cost.saves is not None and cost.saves.blocked is None:
        yield "without waiting for checkpoints: no rate of the link to the host is known"
    if plan is not None and plan.job is not None and plan.job.default_steps:
        yield f"trainer.num_train_steps is not set: {plan.job.steps:,} is the default"


def _prices(verdict: Verdict, cost: JobCost) -> Iterator[CostRow]:
    unit, pod = view.counted(verdict), verdict.accelerator
    assert pod is not None
    if not cost.prices:
        hint = f"no price is known: --price {_short(verdict)}=DOLLARS, for a {unit}-hour"
        yield CostRow(name="dollars", value="unknown", reason=hint)
    for kind, price in cost.prices.items():
        dollars = cost.dollars(kind)
        assert dollars is not None
        reason = f"{_dollars(price)} a {unit}-hour (your price)"
        # The default rate is of a run on reserved GPUs.
        if kind == SPOT and cost.interruptions is not None and cost.interruptions.assumed:
            reason += "; at least: spot offers are interrupted more often than assumed here"
        yield CostRow(name=f"dollars, {kind}" if kind else "dollars", value=f"${spanned(dollars)}", reason=reason)


def _short(verdict: Verdict) -> str:
    """The shortest name of the target's generation."""
    assert verdict.accelerator is not None
    generation = verdict.accelerator.generation
    return min((generation.name, *generation.aliases), key=len)


def _decode_loads(verdict: Verdict) -> tuple[DecodeLoad, ...]:
    report = serving_report(verdict)
    return () if report is None else tuple(report.loads)


def _serving(verdict: Verdict, cost: JobCost, loads: tuple[DecodeLoad, ...]) -> Iterator[CostRow]:
    """Runs that generate text have no end: dollars for an hour and for a million tokens."""
    unit = view.counted(verdict)
    if not cost.prices:
        hint = f"no price is known: --price {_short(verdict)}=DOLLARS, for a {unit}-hour"
        yield CostRow(name="dollars", value="unknown", reason=hint)
    for kind, price in cost.prices.items():
        label = f", {kind}" if kind else ""
        reason = f"{count_text(cost.chips, unit)} × {_dollars(price)} a {unit}-hour (your price)"
        yield CostRow(name=f"dollars an hour{label}", value=f"${three_digits(cost.chips * price)}", reason=reason)
        for load in loads:
            # Without a compiler only the least time is known, so the price is a lower bound.
            dollars = token_price(load, price)
            value = f"${spanned(dollars)}" if load.time is not None else f"at least ${three_digits(dollars.low)}"
            rows = count_text(load.rows, "row")
            reason = f"{rows} decode at once, without a pause; prompts are not included"
            yield CostRow(name=f"10⁶ tokens, {rows}{label}", value=value, reason=reason)


def _start(verdict: Verdict, cost: JobCost) -> Iterator[CostRow]:
    if cost.compilation is not None:
        counted = sum(program.outcome is not None for program in verdict.programs)
        reason = f"{count_text(counted, 'Program')}, as compiled on this machine"
        reason += " one after another; at least the longest" if counted > 1 else ""
        yield CostRow(name="first compilation", value=duration(cost.compilation), reason=reason)
    else:
        yield CostRow(name="first compilation", value="unknown", reason="nothing was compiled")
    if cost.loading is not None:
        most = max(bytes_by_host(verdict))
        reason = f"{gib(most)} a host at {_rate(verdict)}"
        yield CostRow(name="loading", value=duration(cost.loading), reason=reason)


def _rate(verdict: Verdict) -> str:
    rate = store_rate(verdict.options)
    if verdict.options.store_rate is not None:
        return f"{three_digits(rate.expected)} GB/s (your rate)"
    low, high = (three_digits(end) for end in STORE_RATES)
    return f"{three_digits(rate.expected)} GB/s, assumed (published for single hosts: {low} to {high}; --store_rate)"


def _checkpoints(verdict: Verdict, saves: Saves) -> Iterator[CostRow]:
    plan, pod = verdict.plan, verdict.accelerator
    assert plan is not None and plan.job is not None and pod is not None
    job = plan.job
    permanent = f"{job.permanent_checkpoints:,} permanent"
    count = f"{permanent} ones" if saves.count is None else f"{count_text(saves.count, 'save')}, {permanent}"
    reason = f"the state of the run, {gib(round(saves.host_bytes))} a host; {count}"
    yield CostRow(name="a checkpoint", value=gib(job.checkpoint_bytes), reason=reason)
    reason = f"{gib(round(saves.host_bytes))} a host at {_rate(verdict)}, while steps go on"
    if saves.writing.expected > saves.between and (saves.count is None or saves.count > 1):
        wait = span_text(saves.between, saves.between)
        reason += f"; longer than the {wait} between two saves: the next save waits. Save less often"
    yield CostRow(name="writing one", value=duration(saves.writing), reason=reason)
    if saves.blocked is None:
        yield CostRow(
            name="a save blocks", value="unknown", reason="no rate of the link between chip and host is known"
        )
        return
    link = pod.generation.host_link_bandwidth
    assert link is not None
    speed = f"{three_digits(link / GB)} GB/s for each {view.counted(verdict)}"
    reason = f"the copy to the host at {speed}, at worst {100 * LINK_SHARE:g} % of that"
    reason += "; then what is left of the write before"
    yield CostRow(name="a save blocks", value=duration(saves.blocked), reason=reason)
    if saves.share is not None:
        value = percent_between(saves.share.low, saves.share.high)
        yield CostRow(name="saves' share", value=value, reason="of the time of steps and saves")


def _exports(verdict: Verdict, exports: Exports) -> Iterator[CostRow]:
    reason = f"the weights, without the tokenizer; {count_text(exports.count, 'export')}, all of which stay"
    yield CostRow(name="an export", value=gib(exports.nbytes), reason=reason)
    reason = f"a checkpoint is written first, then one host writes at {_rate(verdict)}; steps wait"
    yield CostRow(name="exporting", value=duration(exports.seconds), reason=reason)


def _interruptions(verdict: Verdict, cost: JobCost, stops: Interruptions) -> Iterator[CostRow]:
    per_day = three_digits(stops.per_day)
    if stops.assumed:
        source = f"{INTERRUPTIONS} in {INTERRUPTED_DAYS} days on {INTERRUPTED_DEVICES:,} GPUs (Llama 3), scaled to "
        source += f"{count_text(cost.chips, view.counted(verdict))}; set --interruptions_per_day"
    else:
        source = "your rate"
    count = f"{_number(stops.count)} in the whole run"
    yield CostRow(name="interruptions a day", value=per_day, reason=f"{source}; {count}")
    wait = verdict.options.restart_wait.total_seconds()
    waiting = span_text(wait, wait) if wait else "0 s"
    reason = f"waiting for the pod {waiting} (--restart_wait), compilation, reading the checkpoint"
    yield CostRow(name="a restart", value=duration(stops.restart), reason=reason)
    yield CostRow(
        name="lost steps", value=duration(stops.lost), reason="half of the time between two saves, none to all of it"
    )
    expected = percent_between(stops.goodput.expected, stops.goodput.expected)
    value = f"{expected}, within {percent_between(stops.goodput.low, stops.goodput.high)}"
    reason = "the time of steps and evaluations, of the total time"
    yield CostRow(name="goodput", value=value, reason=reason)


def _host(cost: JobCost) -> Iterator[CostRow]:
    if not cost.host_bytes:
        return
    # Loading is over before the first step; activations and a save can be in memory at the same time.
    loading = cost.host_bytes.get("loading", 0.0)
    most = max(loading, sum(cost.host_bytes.values()) - loading)
    limit = "" if cost.host_limit is None else f" of {gib(cost.host_limit)}"
    causes = ", ".join(f"{cause} {gib(round(nbytes))}" for cause, nbytes in cost.host_bytes.items())
    reason = f"{causes}; without the program itself and its input"
    if cost.host_limit is not None and most > cost.host_limit:
        reason += "; this is more than a host has"
    yield CostRow(name="host memory", value=f"{gib(round(most))}{limit}", reason=reason)


def _input(verdict: Verdict, cost: JobCost) -> Iterator[CostRow]:
    speed = cost.tokens_per_second
    if speed is None:
        yield CostRow(name="input", value="unknown", reason="it follows from the step time")
        return
    # Every host reads the rows of its own devices.
    hosts = verdict.plan.target.hosts if verdict.plan is not None else 1
    yield CostRow(name="input, tokens/s", value=spanned(speed), reason="tokens of a step over its time, all hosts")
    reason = f"{TOKEN_BYTES} bytes a token before compression, over {count_text(hosts, 'host')}"
    value = spanned(speed.times(TOKEN_BYTES / hosts / 1e6), "MB/s")
    yield CostRow(name="input of a host", value=value, reason=reason)


def _storage(verdict: Verdict, storage: Storage) -> Iterator[CostRow]:
    options = verdict.options
    plan = verdict.plan
    assert plan is not None and plan.job is not None
    reason = f"checkpoints at the end; at most {gib(storage.at_most)} while one is written"
    reason += "; both with all exports" if plan.job.exports else ""
    # Stores are priced by 10⁹ bytes, memory is shown in GiB.
    if options.storage_price is None:
        reason += "; price unknown (--storage_price, dollars for 10⁹ bytes and month)"
    else:
        dollars = storage.at_end / GB * options.storage_price
        reason += f"; ${three_digits(dollars)} a month (your price)"
    yield CostRow(name="storage", value=gib(storage.at_end), reason=reason)
    reason = "weights, tokens once, and checkpoints after interruptions"
    if options.egress_price is None:
        reason += "; price unknown (--egress_price, dollars for 10⁹ bytes)"
    else:
        reason += f"; ${three_digits(storage.read / GB * options.egress_price)} (your price)"
    yield CostRow(name="read from storage", value=gib(round(storage.read)), reason=reason)


def cost_values(verdict: Verdict) -> dict[str, Any] | None:
    """The section as JSON values; None where there is none."""
    cost = job_cost(verdict)
    if cost is None:
        return None
    saves, stops, storage = cost.saves, cost.interruptions, cost.storage
    return {
        "total_seconds": _values(cost.total),
        "work_seconds": _values(cost.work),
        "left_out": list(cost.unknown),
        "loading_seconds": _values(cost.loading),
        "compile_seconds": _values(cost.compilation),
        "chip_hours": _values(cost.chip_hours),
        "dollars": {kind or "any": _values(cost.dollars(kind)) for kind in cost.prices if cost.total is not None},
        "dollars_per_hour": {kind or "any": cost.chips * price for kind, price in cost.prices.items()},
        "dollars_per_million_tokens": [
            {
                "rows": load.rows,
                **{kind or "any": _values(token_price(load, price)) for kind, price in cost.prices.items()},
            }
            for load in (() if cost.training else _decode_loads(verdict))
        ],
        "saves": None
        if saves is None
        else {
            "count": saves.count,
            "host_bytes": saves.host_bytes,
            "blocked_seconds": _values(saves.blocked),
            "writing_seconds": _values(saves.writing),
            "share": _values(saves.share),
        },
        "exports": None
        if cost.exports is None
        else {
            "count": cost.exports.count,
            "bytes": cost.exports.nbytes,
            "seconds": _values(cost.exports.seconds),
        },
        "interruptions": None
        if stops is None
        else {
            "per_day": stops.per_day,
            "assumed": stops.assumed,
            "count": stops.count,
            "lost_seconds": _values(stops.lost),
            "restart_seconds": _values(stops.restart),
            "goodput": _values(stops.goodput),
        },
        "host_bytes": cost.host_bytes,
        "host_limit_bytes": cost.host_limit,
        "input_tokens_per_second": _values(cost.tokens_per_second),
        "storage": None
        if storage is None
        else {"end_bytes": storage.at_end, "most_bytes": storage.at_most, "read_bytes": storage.read},
    }


def _values(span: CostRange | None) -> dict[str, float] | None:
    return None if span is None else asdict(span)


def choice_text(choice: PodChoice, options: PlanOptions) -> str:
    """The comparison of pods as text."""
    limits = []
    if options.deadline is not None:
        limits.append(f"a deadline of {format_duration(options.deadline)}")
    if options.budget is not None:
        limits.append(f"a budget of {_dollars(options.budget)}")
    # One row for each pod and price; pods without a time have no figures.
    rows = [
        (
            str(offer),
            f"{offer.chips:,}",
            "–" if offer.seconds is None else duration(offer.seconds),
            "–" if offer.seconds is None else _number(offer.seconds.expected / 3600 * offer.chips),
            "unknown" if offer.dollars is None else f"${_number(offer.dollars.expected)} ({_between(offer.dollars)})",
            "" if not limits else offer.meets if offer.seconds is not None else "–",
        )
        for offer in choice.offers
    ]
    title = f"pods within {' and '.join(limits)}" if limits else "the pods by time and dollars"
    lines = paragraph(f"{title} ({view.MODELLED})", indent=0)
    header = (
        "pod",
        f"{choice.unit}s",
        "total time",
        f"{choice.unit}-hours",
        "dollars",
        "within limits" if limits else "",
    )
    lines += table(rows, align=("left", "right", "left", "right", "right", "left"), header=header)
    for offer in choice.offers:
        if offer.reason:
            lines += paragraph(f"{offer.target}: {offer.reason}")
    lines += [line for sentence in _best(choice) for line in paragraph(sentence)]
    if any(offer.seconds is not None and not offer.compiled for offer in choice.offers):
        lines += paragraph("not compiled: times are estimates, and whether the run fits is not certain")
    if limits:
        lines += paragraph("within limits: yes if the high value meets all of them, perhaps if the expected one does")
    return "\n".join(lines) + "\n"


def _best(choice: PodChoice) -> Iterator[str]:
    if choice.fastest is None:
        if any(offer.meets == "unknown" and offer.seconds is not None for offer in choice.offers):
            yield "a budget needs prices: --price GENERATION=DOLLARS"
        elif any(offer.seconds is not None for offer in choice.offers):
            yield "none of these pods qualifies"
        return
    if choice.cheapest is None:
        yield "cheapest: unknown, because prices are (--price GENERATION=DOLLARS)"
    else:
        yield f"cheapest: {_offered(choice.cheapest)}" + (
            f"; no price is known: by {choice.unit}-hours" if choice.by == "chip-hours" else ""
        )
    yield f"fastest: {_offered(choice.fastest)}"


def _offered(offer: Offer) -> str:
    assert offer.seconds is not None
    dollars = "" if offer.dollars is None else f", ${spanned(offer.dollars)}"
    return f"{offer}: {duration(offer.seconds)}{dollars}"


def choice_values(choice: PodChoice) -> dict[str, Any]:
    """The comparison of pods as JSON values."""
    return {
        "offers": [
            {
                "target": offer.target,
                "kind": offer.kind or None,
                "chips": offer.chips,
                "total_seconds": _values(offer.seconds),
                "dollars": _values(offer.dollars),
                "meets": offer.meets,
                "compiled": offer.compiled,
                "reason": offer.reason or None,
            }
            for offer in choice.offers
        ],
        "cheapest": None if choice.cheapest is None else str(choice.cheapest),
        "fastest": None if choice.fastest is None else str(choice.fastest),
        "compared_by": choice.by,
    }
