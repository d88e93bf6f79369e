"""`RunPlan`: everything a run will do, described before any device is held or any weight is read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from haliax_ext.abstract import Leaf
from haliax_ext.load_plan import LoadPlan
from haliax_ext.meshspec import MeshSpec
from haliax_ext.plan_report import summarize
from haliax_ext.planner import ShardingPlan
from haliax_ext.program import Program
from levanter.base.exit_codes import BAD_INPUT, DOES_NOT_FIT, INTERNAL_ERROR, OK
from levanter.runplan.target import Target

W = TypeVar("W")


@dataclass(frozen=True, kw_only=True)
class Check:
    """Something that was looked at before any device or weight: what, and what was found.

    Attributes:
        name: a few words (`tokenizer`, `text`).
        status: `ok`; `note` (a fact to print); `unchecked` (absent or remote, not looked at here); `error`.
        message: what was found.
        error: the exception that a run raises, for status `error`; for `unchecked`, the one that it raises where the
            input is needed (a run, a launch), which planning only lists.
    """

    name: str
    status: Literal["ok", "note", "unchecked", "error"]
    message: str
    error: ValueError | None = None


@dataclass(frozen=True, kw_only=True)
class Workload:
    """How much one Program does and how often it runs, for modelled times.

    Attributes:
        program: the Program's name.
        tokens: tokens one execution handles, over all devices, padding included.
        unit: what is counted, for people (`tokens`, `windows`).
        items: of that unit, how many one execution handles.
        flops_full: model FLOPs of one execution over all devices, attention over every pair of positions; the
            mathematics only, never what is recomputed.
        flops_causal: the same with attention over the causal half of the pairs.
        executions: how often it runs in the whole job; `None` where that is not known here.
        reason: where `executions` comes from, or what would make it known.
    """

    program: str
    tokens: int
    unit: str
    items: int
    flops_full: float
    flops_causal: float
    executions: int | None
    reason: str


class RunRefused(ValueError):
    """The plan has errors; the message lists every one of them."""

    def __init__(self, errors: Sequence[ValueError], *, exit_code: int):
        self.errors = tuple(errors)
        self.exit_code = exit_code
        if len(self.errors) == 1:
            super().__init__(str(self.errors[0]))
        else:
            listed = "\n".join(f"[{n}] {error}" for n, error in enumerate(self.errors, 1))
            super().__init__(f"{len(self.errors)} problems:\n{listed}")


class NonFiniteResultError(ValueError):
    """What a run computed is not finite, from weights that were; says what was not first. The run ends with code 1."""

    exit_code = INTERNAL_ERROR

    def __init__(self, what: str):
        super().__init__(
            f"{what}\n  → a token had probability 0, or the model overflowed: try a wider compute dtype "
            "(trainer.mp: f32), and compare the architecture with the one that the weights were trained in"
        )


@dataclass(frozen=True, kw_only=True)
class Searchable:
    """What a search for a better layout must know of a run, and which keys it sets.

    Attributes:
        training: whether there is a backward pass, with gradients and an optimizer's state.
        parameters: the parameters.
        statistics: the optimizer's, a step's counters left out.
        frozen: the paths of those parameters that are not trained.
        sizes: the model's logical axes, `vocab` and `position` included.
        tensor_axes: those that tensor parallelism shards in the layers; axes of one entry share the devices.
        layers: how many there are.
        windows: how far they see, None for everything, with the features of their queries.
        summed: parts of all layers whose results are summed where tensor parallelism shards them.
        batch_axis: the logical name of the batch axis.
        global_batch: rows of a batch where the run fixes them; None where a layout may choose.
        compute_bytes: bytes of an element in the compute dtype.
        keys: the keys that set a layout's batch, by dotted name: rows that a device takes at once, and over all
            devices.
        remat_key: the key that chooses what is kept for the backward pass; None where there is none.
        overrides: `trainer.mesh.overrides`, which a layout keeps where it can.
    """

    training: bool
    parameters: tuple[Leaf, ...]
    statistics: tuple[Leaf, ...] = ()
    frozen: frozenset[str] = frozenset()
    sizes: Mapping[str, int]
    tensor_axes: tuple[tuple[str, ...], ...]
    layers: int
    summed: int
    windows: tuple[tuple[int | None, int], ...] = ()
    batch_axis: str
    global_batch: int | None = None
    compute_bytes: int
    keys: Callable[[int, int], Mapping[str, int]]
    remat_key: str | None = None
    overrides: Mapping[str, Mapping[str, str | list[str] | None]] = field(
        default_factory=dict[str, Mapping[str, str | list[str] | None]]
    )


@dataclass(frozen=True, kw_only=True)
class RunPlan(Generic[W]):
    """Everything a run will do.

    Attributes:
        entry_point: the name of the entry point that described it.
        target: the devices it is for.
        mesh: their mesh.
        checks: what was looked at.
        sharding: where every parameter goes.
        activations: the named activations, planned under the compute mapping.
        load: which bytes are read by whom; None where weights are made, not read.
        load_beside: likewise of a second model that the first one is compared with; None for none.
        computing: the Programs of the work itself, in order; those of loading are in `load`.
        saving: the Programs that bring results to the hosts, behind or between those.
        workloads: how much the Programs do, for those that make up the job's time.
        notes: every decision that the user did not write.
        work: what `execute` needs beside the Programs (batches, outputs), of the entry point's own type.
        resident_bytes: what stays on a device from beginning to end, by kind; None for the parameters alone.
        beside: by Program, bytes on a device of what is there while it runs and is none of its inputs; nothing for
            those that are not named. Loading's follow from the LoadPlan.
        searchable: what a search for a better layout goes by, or a line that says why there is nothing to search.
    """

    entry_point: str
    target: Target
    mesh: MeshSpec
    checks: tuple[Check, ...]
    sharding: ShardingPlan
    activations: ShardingPlan
    load: LoadPlan | None
    computing: tuple[Program, ...]
    saving: tuple[Program, ...] = ()
    workloads: tuple[Workload, ...] = ()
    notes: tuple[str, ...] = ()
    work: W = field(repr=False)
    resident_bytes: Mapping[str, int] | None = None
    beside: Mapping[str, int] = field(default_factory=dict[str, int])
    load_beside: LoadPlan | None = None
    searchable: Searchable | str = "this run has no timed workload, so there is nothing to search"

    @property
    def loading(self) -> tuple[Program, ...]:
        """The Programs that bring weights to where they belong."""
        plans = [plan for plan in (self.load, self.load_beside) if plan is not None]
        found = {program.name: program for plan in plans for program in plan.programs}
        return tuple(found.values())

    @property
    def programs(self) -> tuple[Program, ...]:
        """Every function that runs, in order: of loading, of the work, of saving."""
        return (*self.loading, *self.computing, *self.saving)

    def program(self, name: str) -> Program:
        """The Program called `name`."""
        return next(p for p in self.programs if p.name == name)

    @property
    def errors(self) -> tuple[ValueError, ...]:
        """What is wrong with the plan wherever it runs."""
        found = [check.error for check in self.checks if check.status == "error" and check.error is not None]
        return (*found, *self.sharding.errors, *self.activations.errors)

    @property
    def missing(self) -> tuple[ValueError, ...]:
        """Inputs that were unavailable, each as the error that a run would raise."""
        return tuple(check.error for check in self.checks if check.status == "unchecked" and check.error is not None)

    @property
    def exit_code(self) -> int:
        """0, or 2 for bad input, or 3 where a large replication is the trouble (3 wins)."""
        if any(f.kind == "replicated" and f.error is not None for f in self.sharding.findings):
            return DOES_NOT_FIT
        return BAD_INPUT if self.errors else OK

    def check(self) -> "RunPlan[W]":
        """Returns the plan, or raises `RunRefused` with everything that keeps it from running here."""
        found = (*self.errors, *self.missing)
        if found:
            raise RunRefused(found, exit_code=self.exit_code or BAD_INPUT)
        return self

    def report(self) -> str:
        """The plan as text: checks, mesh, parameters, loading, Programs."""
        lines = [f"{check.status:>9}  {check.name}: {check.message}" for check in self.checks]
        lines += ["", summarize(self.sharding)]
        if self.load is not None:
            lines += ["", self.load.summary]
        if self.load_beside is not None:
            lines += ["", f"{self.load_beside.name.removeprefix('load.')}: {self.load_beside.summary}"]
        lines += ["", "runs: " + " → ".join(program.name for program in self.computing)]
        for when, programs in (("before", self.loading), ("for saving", self.saving)):
            if programs:
                lines.append(f"  {when}: {', '.join(program.name for program in programs)}")
        return "\n".join(lines)
