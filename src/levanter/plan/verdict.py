"""The result of preflight for one run on one target: stages, bytes, compiled Programs, times, and a verdict.

`preflight` makes a `Verdict`; `report` and `search` read it. It holds values only: the plan (without devices), the
budget of bytes on a chip, the memory and time of loading, and for each Program the compiler's result and its modelled
time.
"""

from dataclasses import dataclass, field
from typing import Literal

from levanter.hardware import Accelerator
from levanter.plan.aot import Compiled, Outcome, Refused
from levanter.plan.hbm_budget import Budget
from levanter.plan.load_budget import LoadBudget
from levanter.plan.offload import Offloaded
from levanter.plan.step_time_model import StepTime
from levanter.runplan import PlanOptions, RunPlan, Workload

StageStatus = Literal["ok", "refused", "unchecked", "skipped", "crashed"]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of preflight.

    Attributes:
        name: `config`, `sharding`, `loading`, `compile` or `cost`.
        status: its outcome.
        seconds: its duration.
        message: the outcome in one sentence.
        findings: everything that is wrong, one entry each.
    """

    name: str
    status: StageStatus
    seconds: float
    message: str
    findings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ProgramVerdict:
    """The compiler's result and the modelled time of one Program.

    Attributes:
        name: of the Program.
        outcome: the compiler's result; None where the Program was not compiled.
        bound: an upper bound of its bytes on a device, for a Program that is not compiled because arithmetic decides.
        coresident_bytes: bytes on a device that stay allocated while it runs and are not among its inputs.
        why_not: for a Program that does not fit, its largest arrays and a layout that would fit, in axis names.
        time: of one execution; `None` where the compiler states no cycles.
        workload: tokens and FLOPs of one execution; None for Programs that run once and whose time is negligible.
        mfu: model FLOPs utilization (attention over the causal half) at the high and the low end of the time.
        mfu_full: the same with attention over every pair of positions counted; `None` where that would be more than
            the chips can do.
        offloaded: activations that it sends to host memory; `None` where it sends none.
    """

    name: str
    outcome: Outcome | None
    bound: int | None = None
    coresident_bytes: int = 0
    why_not: tuple[str, ...] = ()
    time: StepTime | None = None
    workload: Workload | None = None
    mfu: tuple[float, float] | None = None
    mfu_full: tuple[float, float] | None = None
    offloaded: Offloaded | None = None

    @property
    def fits(self) -> bool | None:
        """Whether the compiler accepted the Program; None where it was not compiled."""
        return None if self.outcome is None else isinstance(self.outcome, Compiled)

    @property
    def peak_bytes(self) -> int | None:
        """Bytes on a device while it runs: those that the compiler counts against HBM, and the co-resident bytes."""
        if isinstance(self.outcome, Refused):
            return self.outcome.refusal.needed + self.coresident_bytes
        if isinstance(self.outcome, Compiled):
            return self.outcome.peak_bytes + self.coresident_bytes
        return None if self.bound is None else self.bound + self.coresident_bytes

    @property
    def job_seconds(self) -> tuple[float, float] | None:
        """All executions of the job, low and high; `None` where time or number is not known."""
        if self.time is None or self.workload is None or self.workload.executions is None:
            return None
        return self.time.low * self.workload.executions, self.time.high * self.workload.executions


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Everything about one run on one target.

    Attributes:
        plan: what the entry point described; `None` where it could not be described at all.
        target: its name as requested.
        accelerator: the pod; `None` for `local`.
        budget: bytes on a chip by group, from arithmetic.
        load: memory and time of loading; `None` where nothing is loaded, or the plan has errors.
        programs: in the order they run.
        stages: in the order they were done.
        exit_code: of the process.
        headline: the verdict in one line.
        notes: remarks that are not the plan's own.
        lower_bound: without a compiler, the bytes on a chip that the most demanding Program takes at least; None
            where they were not counted.
        options: the block `plan:`: prices, rates and limits that only a person knows.
    """

    plan: RunPlan | None
    target: str
    accelerator: Accelerator | None
    budget: Budget | None
    load: LoadBudget | None
    programs: tuple[ProgramVerdict, ...]
    stages: tuple[Stage, ...]
    exit_code: int
    headline: str
    notes: tuple[str, ...] = field(default=())
    lower_bound: int | None = None
    options: PlanOptions = PlanOptions()

    @property
    def fits(self) -> bool | None:
        """Whether every compiled Program fits; `None` where none was compiled."""
        compiled = [p.fits for p in self.programs if p.fits is not None]
        return all(compiled) if compiled else None
