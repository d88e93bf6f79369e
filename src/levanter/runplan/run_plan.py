"""`RunPlan`: everything that a run will do, described before it holds a device or reads a weight."""

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
    """The result of a check that needs no device and no weight.

    Attributes:
        name: what was checked, in a few words (`tokenizer`, `text`).
        status: `ok`; `note` (a fact to print); `unchecked` (the input is absent or remote); `error`.
        message: the result.
        error: the exception that a run raises. For status `unchecked` a run or a launch raises it, because it needs the
            input, and a plan only lists it.
    """

    name: str
    status: Literal["ok", "note", "unchecked", "error"]
    message: str
    error: ValueError | None = None


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The work of one execution of a Program and the number of executions, for modelled times.

    Attributes:
        program: the Program's name.
        tokens: tokens of one execution, over all devices, padding included.
        unit: the unit of `items` in reports (`tokens`, `windows`).
        items: items of one execution, in that unit.
        flops_full: model FLOPs of one execution over all devices, with attention over every pair of positions and
            without recomputation.
        flops_causal: the same with attention over the causal half of the pairs.
        executions: number of executions in the whole job; None if unknown.
        reason: where `executions` comes from, or which input it needs.
    """

    program: str
    tokens: int
    unit: str
    items: int
    flops_full: float
    flops_causal: float
    executions: int | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """Facts of a training run that its cost depends on and that its Programs do not state.

    Attributes:
        steps: of the complete run.
        default_steps: whether `steps` is the default because the configuration does not set it.
        checkpoint_bytes: bytes of one checkpoint, on all hosts together.
        restored_host_bytes: bytes of a checkpoint that one host reads when the run resumes.
        reread_host_bytes: bytes of weights that no checkpoint contains, which a host reads on every start.
        permanent_checkpoints: checkpoints that stay, the last one included.
        permanent_every: steps between two of them; None if there is only the last one.
        save_seconds: time between two temporary checkpoints; None for none.
        temporary_checkpoints: how many temporary ones are stored at a time.
        exports: exports of the model or of its adapters, the last one included.
        export_bytes: bytes of the weights in the files of one export.
    """

    steps: int
    default_steps: bool
    checkpoint_bytes: int
    restored_host_bytes: int
    reread_host_bytes: int
    permanent_checkpoints: int
    permanent_every: int | None
    save_seconds: float | None
    temporary_checkpoints: int
    exports: int
    export_bytes: int


class RunRefused(ValueError):
    """The plan has errors; the message lists all of them."""

    def __init__(self, errors: Sequence[ValueError], *, exit_code: int):
        self.errors = tuple(errors)
        self.exit_code = exit_code
        # One problem needs no number; a list of several does.
        if len(self.errors) == 1:
            super().__init__(str(self.errors[0]))
        else:
            # Numbered like `ConfigError` and the planner's errors, so that each can be referred to.
            listed = "\n".join(f"[{n}] {error}" for n, error in enumerate(self.errors, 1))
            super().__init__(f"{len(self.errors)} problems:\n{listed}")


class NonFiniteResultError(ValueError):
    """A run computed NaN or infinity from finite weights; names the first such value. The run ends with code 1."""

    # Configuration and input were valid, so this is not the code of bad input.
    exit_code = INTERNAL_ERROR

    def __init__(self, what: str):
        super().__init__(
            f"{what}\n  → a token had probability 0, or the model overflowed: try a wider compute dtype "
            "(trainer.mp: f32), and compare the architecture with the one that the weights were trained in"
        )


@dataclass(frozen=True, kw_only=True)
class Searchable:
    """The facts of a run that the search for a better layout needs, and the config keys that it sets.

    Attributes:
        training: whether there is a backward pass, with gradients and optimizer state.
        parameters: the parameters.
        statistics: the optimizer state without step counters.
        frozen: the paths of parameters that are not trained.
        sizes: the model's logical axes, `vocab` and `position` included.
        tensor_axes: the axes that tensor parallelism shards in the layers; axes of one entry share the devices.
        layers: the number of layers.
        windows: the windows of attention (None: all keys before a query), and the query features with each.
        summed: the number of sublayers whose outputs tensor parallelism sums over devices.
        batch_axis: the logical name of the batch axis.
        global_batch: rows of a batch where the run fixes them; None where a layout may choose.
        compute_bytes: bytes of an element in the compute dtype.
        keys: (rows of one device at a time, rows over all devices) → the config keys that set them.
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
    """Everything that a run will do.

    Attributes:
        entry_point: the name of the entry point that described it.
        target: the devices that it is for.
        mesh: their mesh.
        checks: the results of all checks.
        sharding: the sharding of every parameter.
        activations: the named activations, planned under the compute mapping.
        load: the byte ranges that each host reads; None where weights are initialized, not read.
        second_load: the same for a second model (a DPO reference, the model to compare with); None for none.
        computing: the Programs of the work, in order; those of loading are in `load`.
        saving: the Programs that gather results to the hosts, after or between those.
        workloads: the work of the Programs that make up the job's time.
        job: of a training run, what its cost depends on besides its Programs; None for other runs.
        notes: every decision that the user did not write.
        work: the other inputs of `execute` (batches, outputs), in a type of the entry point.
        resident_bytes: bytes on a device that stay allocated for the whole run, by kind; None for the parameters alone.
        coresident_bytes: Program → bytes on a device that stay allocated while it runs and are not among its inputs;
            0 for Programs that are not named. Those of loading follow from the LoadPlan.
        searchable: the input of the search for a better layout, or a line that says why there is nothing to search.
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
    job: TrainingJob | None = None
    notes: tuple[str, ...] = ()
    # Not in the repr: it may hold every batch of a run.
    work: W = field(repr=False)
    resident_bytes: Mapping[str, int] | None = None
    coresident_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    second_load: LoadPlan | None = None
    searchable: Searchable | str = "this run has no timed workload, so there is nothing to search"

    @property
    def loading(self) -> tuple[Program, ...]:
        # The second model's Programs come after the first one's, in the order in which they are loaded.
        """The Programs that reshard weights after reading."""
        plans = [plan for plan in (self.load, self.second_load) if plan is not None]
        # Both models may be resharded by one Program: a name is one Program.
        by_name = {program.name: program for plan in plans for program in plan.programs}
        return tuple(by_name.values())

    @property
    def programs(self) -> tuple[Program, ...]:
        """Every Program in the order of the run: loading, the work, saving."""
        return (*self.loading, *self.computing, *self.saving)

    def program(self, name: str) -> Program:
        """Returns the Program called `name`."""
        return next(p for p in self.programs if p.name == name)

    @property
    def errors(self) -> tuple[ValueError, ...]:
        """Errors that every run of this plan meets, with or without devices."""
        # A check without an exception is a finding for the report only.
        failed = [check.error for check in self.checks if check.status == "error" and check.error is not None]
        return (*failed, *self.sharding.errors, *self.activations.errors)

    @property
    def missing(self) -> tuple[ValueError, ...]:
        """For each input that is unavailable, the error that a run would raise."""
        return tuple(check.error for check in self.checks if check.status == "unchecked" and check.error is not None)

    @property
    def exit_code(self) -> int:
        """0, or 2 for bad input, or 3 if a large array is replicated (3 wins)."""
        # Replication is an error of size: it has the code of a run that does not fit, even next to bad input.
        if any(f.kind == "replicated" and f.error is not None for f in self.sharding.findings):
            return DOES_NOT_FIT
        return BAD_INPUT if self.errors else OK

    def check(self) -> "RunPlan[W]":
        """Returns the plan, or raises `RunRefused` with every reason why it cannot run here."""
        errors = (*self.errors, *self.missing)
        if errors:
            # Missing inputs are errors of a run, not of a plan, so the plan's own code is 0 for them.
            raise RunRefused(errors, exit_code=self.exit_code or BAD_INPUT)
        return self

    def report(self) -> str:
        """The plan as text: checks, mesh, parameters, loading, Programs."""
        lines = [f"{check.status:>9}  {check.name}: {check.message}" for check in self.checks]
        lines += ["", summarize(self.sharding)]
        if self.load is not None:
            # Loading and saving may have hundreds of Programs; those of the work come first, on a line of their own.
            lines += ["", self.load.summary]
        # The second plan's name is `load.<model>`: the prefix is no information in a report.
        if self.second_load is not None:
            lines += ["", f"{self.second_load.name.removeprefix('load.')}: {self.second_load.summary}"]
        lines += ["", "programs: " + " → ".join(program.name for program in self.computing)]
        for when, programs in (("before", self.loading), ("for saving", self.saving)):
            if programs:
                lines.append(f"  {when}: {', '.join(program.name for program in programs)}")
        return "\n".join(lines)
