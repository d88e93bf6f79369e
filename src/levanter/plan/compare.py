"""A run that trains adapters beside the same run with the model's own weights trained: `plan … --compare full`.

Both are planned alike, by the same entry point's own description; what is set side by side is what their plans and
their compiled Programs say.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from levanter.plan.aot import Compiled
from levanter.plan.collective_bytes import CollectiveBytes, compiled_received, received_in_step
from levanter.plan.verdict import ProgramVerdict, Verdict


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One of the two runs.

    Attributes:
        verdict: what preflight found out.
        groups: bytes on a device of what a step holds from beginning to end, and of gradients, by kind.
        received: bytes that a device receives in a step by arithmetic, by what they are for.
        step: the Program of its time; None where nothing was planned.
        compiled: bytes that a device receives in a step as compiled; None where it was not.
    """

    verdict: Verdict
    groups: Mapping[str, int]
    received: Mapping[str, CollectiveBytes]
    step: ProgramVerdict | None
    compiled: CollectiveBytes | None

    @property
    def total_received(self) -> CollectiveBytes:
        """Of everything, by arithmetic."""
        return sum(self.received.values(), CollectiveBytes())


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs on one target.

    Attributes:
        target: its name.
        own: the run as configured.
        other: the same run with the model's own weights trained; None where it cannot be described.
        problem: why not.
    """

    target: str
    own: ComparedRun
    other: ComparedRun | None = None
    problem: str = field(default="")


def compare(own: Verdict, other: Verdict) -> Comparison | None:
    """What two verdicts on one target come to; None where the run itself could not be described."""
    first, second = _side(own), _side(other)
    if first is None:
        return None
    problem = "" if second is not None else other.headline
    return Comparison(target=own.target, own=first, other=second, problem=problem)


def _side(verdict: Verdict) -> ComparedRun | None:
    plan = verdict.plan
    if plan is None:
        return None
    timed = [work.program for work in plan.workloads]
    step = next((program for program in verdict.programs if program.name in timed), None)
    compiled = None
    if step is not None and isinstance(step.outcome, Compiled) and step.outcome.figures is not None:
        compiled = compiled_received(plan.mesh, step.outcome.figures.collectives)
    return ComparedRun(
        verdict=verdict,
        groups=plan.resident_bytes or {},
        received=received_in_step(plan),
        step=step,
        compiled=compiled,
    )
