"""Compares a run that trains adapters with the same run that trains all weights: `plan … --compare full`.

Both runs are described by the same entry point. The comparison has the figures of both plans and of both compiled
Programs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from levanter.plan.aot import Compiled
from levanter.plan.collective_bytes import CollectiveBytes, compiled_collective_bytes, step_collective_bytes
from levanter.plan.verdict import ProgramVerdict, Verdict


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One of the two runs.

    Attributes:
        verdict: the result of preflight.
        groups: bytes on a device that stay allocated during a step, and of gradients, by kind.
        received: bytes that a device receives in a step by arithmetic, by purpose.
        step: the Program of the step; None where nothing was planned.
        compiled: bytes that a device receives in a step as compiled; None if it was not compiled.
    """

    verdict: Verdict
    groups: Mapping[str, int]
    received: Mapping[str, CollectiveBytes]
    step: ProgramVerdict | None
    compiled: CollectiveBytes | None

    @property
    def total_received(self) -> CollectiveBytes:
        """The sum over all purposes, by arithmetic."""
        return sum(self.received.values(), CollectiveBytes())


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs on one target.

    Attributes:
        target: its name.
        configured: the run as configured.
        other: the same run with all weights trained; None where it cannot be described.
        problem: why it cannot be described; empty otherwise.
    """

    target: str
    configured: ComparedRun
    other: ComparedRun | None = None
    problem: str = field(default="")


def compare(configured: Verdict, other: Verdict) -> Comparison | None:
    """Compares two verdicts on one target; None where the configured run could not be described."""
    first, second = _side(configured), _side(other)
    if first is None:
        return None
    problem = "" if second is not None else other.headline
    return Comparison(target=configured.target, configured=first, other=second, problem=problem)


def _side(verdict: Verdict) -> ComparedRun | None:
    plan = verdict.plan
    if plan is None:
        return None
    timed = [work.program for work in plan.workloads]
    # Of the Programs with a workload the first in running order: of a training run, its train step.
    step = next((program for program in verdict.programs if program.name in timed), None)
    compiled = None
    if step is not None and isinstance(step.outcome, Compiled) and step.outcome.figures is not None:
        compiled = compiled_collective_bytes(plan.mesh, step.outcome.figures.collectives)
    return ComparedRun(
        verdict=verdict,
        groups=plan.resident_bytes or {},
        received=step_collective_bytes(plan),
        step=step,
        compiled=compiled,
    )
