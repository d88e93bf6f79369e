"""The result of a search as text and as plain values."""

from collections.abc import Mapping
from typing import Any

from haliax_ext.errors import gib
from levanter.plan.search.search import SearchResult, Tried, seconds_per_token
from levanter.plan.verdict import ProgramVerdict


def render(result: SearchResult, *, target: str, keys: Mapping[str, Any] | None = None) -> str:
    """The compiled layouts, the winner as YAML to paste, and why its neighbours lost.

    Args:
        result: of `search`.
        target: the pod's name.
        keys: keys in addition to `trainer.mesh` for the fragment, by dotted name.
    """
    lines = [
        f"search on {target}: {result.considered} layouts divide, {result.fitting} fit by arithmetic, "
        f"{len(result.compiled)} compiled; speeds are of what was compiled, over all chips (modelled, not measured)"
    ]
    if result.ranked:
        lines = [
            f"search on {target}: {result.considered} layouts divide, {result.fitting} may fit by arithmetic; nothing "
            "was compiled: arithmetic ranks them, and bytes and speeds are estimates"
        ]
        lines += [f"  {tried.candidate}: {_estimated(tried)}" for tried in result.ranked]
    lines += [f"  {tried.candidate}: {_compiled(tried.verdict)}" for tried in result.compiled]
    if result.configured is not None:
        lines.append(f"  as configured: {_compiled(result.configured)}")
    if result.best is None:
        lines.append("nothing fits")
        # The nearest miss shows whether a few GiB or a whole factor of chips is lacking.
        if result.closest is not None:
            price = result.closest.estimate
            lines.append(
                f"  closest: {result.closest.candidate}: {gib(price.argument_bytes)} of arguments, "
                f"about {gib(price.activation_bytes)} on top" + (f"; {price.problem}" if price.problem else "")
            )
        return "\n".join(lines)
    if result.configured_is_best:
        lines += ["", "none of them is faster than the layout as configured; the best of them, to paste:", ""]
    else:
        lines += ["", "best by arithmetic; to paste:" if result.ranked else "best; to paste:", ""]
    lines += [f"    {line}" for line in result.fragment(dict(keys or {})).splitlines()]
    lines += ["", "why not its neighbours:"]
    lines += [f"  {n.change}: {n.why_not}" for n in result.neighbours]
    return "\n".join(lines)


def _estimated(tried: Tried) -> str:
    price = tried.estimate
    return f"about {gib(price.total_bytes)}, {1 / price.seconds_per_token:,.0f} tokens/s"


def _compiled(verdict: ProgramVerdict | None) -> str:
    if verdict is None or verdict.outcome is None:
        return "not compiled"
    bytes_ = gib(verdict.peak_bytes or 0)
    if not verdict.fits:
        return f"refused, {bytes_}"
    per_token = seconds_per_token(verdict)
    # Tokens/s over all chips: seconds a token are over the whole pod already.
    return bytes_ if per_token is None else f"{bytes_}, {1 / per_token:,.0f} tokens/s"


def search_to_json(result: SearchResult, *, target: str, keys: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The result as plain JSON values."""
    return {
        "target": target,
        "considered": result.considered,
        "fitting": result.fitting,
        "compiled": [
            {
                "layout": str(tried.candidate),
                "mesh": tried.candidate.mesh_options(result.overrides),
                "fits": tried.verdict.fits if tried.verdict else None,
                "peak_bytes": tried.verdict.peak_bytes if tried.verdict else None,
                "seconds_per_token": tried.seconds_per_token,
            }
            for tried in result.compiled
        ],
        "by_arithmetic": [
            {
                "layout": str(tried.candidate),
                "mesh": tried.candidate.mesh_options(result.overrides),
                "bytes": tried.estimate.total_bytes,
                "seconds_per_token": tried.estimate.seconds_per_token,
            }
            for tried in result.ranked
        ],
        "as_configured": None if result.configured is None else _verdict_values(result.configured),
        "as_configured_is_best": result.configured_is_best,
        "best": None if result.best is None else result.fragment(dict(keys or {})),
        "why_not": {n.change: n.why_not for n in result.neighbours},
    }


def _verdict_values(verdict: ProgramVerdict) -> dict[str, Any]:
    return {"fits": verdict.fits, "peak_bytes": verdict.peak_bytes, "seconds_per_token": seconds_per_token(verdict)}
