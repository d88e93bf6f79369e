"""Renders a comparison with full fine-tuning: a table for people, values for `--json`."""

from collections.abc import Callable, Iterator, Mapping

from levanter.html.format import gib, percent, seconds_text, three_digits
from levanter.plan.collective_bytes import CollectiveBytes
from levanter.plan.compare import ComparedRun, Comparison
from levanter.plan.report import timing, view
from levanter.plan.report.text_table import paragraph, table

_NONE = "–"
_GB = 1e9
Row = tuple[str, ...]


def compared_text(comparison: Comparison) -> str:
    """The comparison as text."""
    lines = paragraph(
        f"compared with full fine-tuning on {comparison.target}: the same run without adapters, every weight trained",
        indent=0,
    )
    if comparison.other is None:
        return "\n".join([*lines, *paragraph(f"full fine-tuning {comparison.problem}")]) + "\n"
    header = ("", "this run", "full", "full / this")
    rows = [
        *_bytes(comparison.configured, comparison.other),
        *_received(comparison.configured, comparison.other),
        *_step(comparison.configured, comparison.other),
    ]
    lines += table(rows, align=("left", "right", "right", "right"), header=header)
    legend = (
        f"received: bytes that a {view.holder(comparison.configured.verdict)} receives from others in one step; by "
        "arithmetic, weights are gathered in the compute dtype in the forward and in the backward pass, and gradients "
        f"are summed in float32; as compiled, all collectives of the step. Times are {view.MODELLED}"
    )
    return "\n".join([*lines, *paragraph(legend)]) + "\n"


def compared_values(comparison: Comparison) -> dict[str, object]:
    """The comparison as plain values."""
    return {
        "target": comparison.target,
        "this": _values(comparison.configured),
        "full": None if comparison.other is None else _values(comparison.other),
        "problem": comparison.problem or None,
    }


def _bytes(this: ComparedRun, other: ComparedRun) -> Iterator[Row]:
    names = [*this.groups, *(name for name in other.groups if name not in this.groups)]
    for name in names:
        yield _row(name, this.groups.get(name), other.groups.get(name), gib)
    yield _row("together, without activations", sum(this.groups.values()), sum(other.groups.values()), gib)
    # Inputs alone are no peak: a side that was not compiled has none to compare.
    most = [view.most_bytes(side.verdict) if _is_whole(side) else None for side in (this, other)]
    yield ("at its peak, compiled", *(_NONE if nbytes is None else gib(nbytes) for nbytes in most), "")
    yield ("verdict", view.state(this.verdict), view.state(other.verdict), "")


def _is_whole(side: ComparedRun) -> bool:
    return side.verdict.fits is not None


def _received(this: ComparedRun, other: ComparedRun) -> Iterator[Row]:
    for network in ("ici", "dcn"):
        this_bytes, other_bytes = getattr(this.total_received, network), getattr(other.total_received, network)
        # A single slice has no DCN traffic; a row of zeros would say nothing.
        if not this_bytes and not other_bytes:
            continue
        name = view.link_name(this.verdict, network)
        yield _row(f"received over {name}", this_bytes, other_bytes, _size)
        for purpose in dict.fromkeys((*this.received, *other.received)):
            one, two = (
                getattr(side.received.get(purpose, CollectiveBytes()), network) or None for side in (this, other)
            )
            if one or two:
                yield _row(f"  {purpose}", one, two, _size)
        if this.compiled is not None:
            other_bytes = None if other.compiled is None else getattr(other.compiled, network)
            yield _row(f"  as compiled, {name}", getattr(this.compiled, network), other_bytes, _size)


def _step(this: ComparedRun, other: ComparedRun) -> Iterator[Row]:
    sides = (this, other)
    times = [None if side.step is None else side.step.time for side in sides]
    this_seconds, other_seconds = (None if time is None else time.expected for time in times)
    if this_seconds is None:
        return
    yield _row("a step", this_seconds, other_seconds, seconds_text)
    exposed = [None if time is None else timing.exposed_share(time) for time in times]
    yield ("  of it exposed communication", *(_NONE if share is None else percent(share) for share in exposed), "")
    yield _row(f"tokens/s/{view.counted(this.verdict)}", _rate(this), _rate(other), three_digits)
    used = [_utilization(side) for side in sides]
    yield ("MFU", *(_NONE if share is None else percent(share) for share in used), "")


def _rate(side: ComparedRun) -> float | None:
    speed = None if side.step is None else timing.rate(side.verdict, side.step)
    return None if speed is None else speed.expected


def _utilization(side: ComparedRun) -> float | None:
    return None if side.step is None else timing.utilization(side.step, side.step.mfu)


def _row(name: str, this: float | None, other: float | None, show: Callable[[float], str]) -> Row:
    # No ratio where a side has no figure, or zero: adapters have no gathered frozen weights in a full run.
    ratio = f"{other / this:.2f}" if this and other else ""
    return (name, _NONE if this is None else show(this), _NONE if other is None else show(other), ratio)


def _size(nbytes: float) -> str:
    return f"{nbytes / _GB:,.3g} GB" if nbytes < 1000 * _GB else f"{nbytes / _GB:,.0f} GB"


def _values(side: ComparedRun) -> dict[str, object]:
    time = None if side.step is None else side.step.time

    def network(received: CollectiveBytes | None) -> Mapping[str, float] | None:
        return None if received is None else {"ici_bytes": received.ici, "dcn_bytes": received.dcn}

    return {
        "entry_point": None if side.verdict.plan is None else side.verdict.plan.entry_point,
        "state": view.state(side.verdict),
        "headline": side.verdict.headline,
        "peak_bytes": view.most_bytes(side.verdict) if _is_whole(side) else None,
        "resident_bytes": dict(side.groups),
        "received": {purpose: network(bytes_) for purpose, bytes_ in side.received.items()},
        "received_compiled": network(side.compiled),
        "step_seconds": None if time is None else time.expected,
        "tokens_per_second_per_chip": _rate(side),
        "mfu": _utilization(side),
    }
