"""The answer of a search as text and as plain values."""

from collections.abc import Mapping
from typing import Any

from haliax_ext.errors import gib
from levanter.plan.search.search import SearchResult, Tried


def render(result: SearchResult, *, target: str, keys: Mapping[str, Any] | None = None) -> str:
    """What was tried, the winner as YAML to paste, and why its neighbours lost.

    Args:
        result: of `search`.
        target: the pod's name.
        keys: keys beside `trainer.mesh` for the fragment, by dotted name.
    """
    lines = [
        f"search on {target}: {result.considered} layouts divide, {result.fitting} fit by arithmetic, "
        f"{len(result.compiled)} compiled"
    ]
    lines += [f"  {_compiled(tried)}" for tried in result.compiled]
    if result.best is None:
        lines.append("nothing fits")
        if result.closest is not None:
            price = result.closest.estimate
            lines.append(
                f"  closest: {result.closest.candidate}: {gib(price.argument_bytes)} of arguments, "
                f"about {gib(price.activation_bytes)} on top" + (f"; {price.problem}" if price.problem else "")
            )
        return "\n".join(lines)
    lines += ["", "best, modelled, not measured; to paste:", ""]
    lines += [f"    {line}" for line in result.fragment(dict(keys or {})).splitlines()]
    lines += ["", "why not its neighbours:"]
    lines += [f"  {n.change}: {n.why_not}" for n in result.neighbours]
    return "\n".join(lines)


def _compiled(tried: Tried) -> str:
    verdict = tried.verdict
    assert verdict is not None
    if verdict.outcome is None:
        return f"{tried.candidate}: not compiled"
    bytes_ = gib(verdict.peak_bytes or 0)
    if not verdict.fits:
        return f"{tried.candidate}: refused, {bytes_}"
    per_token = tried.seconds_per_token
    speed = "" if per_token is None else f", {1 / per_token:,.0f} tokens/s"
    return f"{tried.candidate}: {bytes_}{speed}"


def values(result: SearchResult, *, target: str, keys: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The same as plain JSON values."""
    return {
        "target": target,
        "considered": result.considered,
        "fitting": result.fitting,
        "compiled": [
            {
                "layout": str(tried.candidate),
                "mesh": tried.candidate.mesh_options(),
                "fits": tried.verdict.fits if tried.verdict else None,
                "peak_bytes": tried.verdict.peak_bytes if tried.verdict else None,
                "seconds_per_token": tried.seconds_per_token,
            }
            for tried in result.compiled
        ],
        "best": None if result.best is None else result.fragment(dict(keys or {})),
        "why_not": {n.change: n.why_not for n in result.neighbours},
    }
