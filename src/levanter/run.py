"""A run is a value before it is an action: `RunPlan` is what an entry point describes before it acts.

An `EntryPoint` is a value: `config → describe(config, target) → RunPlan → execute(run_plan, mesh)`. A `Target` is what
is known of the devices without holding one: the available devices described, or a pod named by the user. The plan holds
the checks that need no device, where every parameter goes, which bytes are read by whom, and the Programs in the
order they run; `execute` may run nothing that is not in it, and preflight compiles exactly these Programs. `commands/`
has the entry points, `commands.shell` makes a process of one.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np
from jax.sharding import Mesh

from haliax_ext.abstract import Leaf
from haliax_ext.load_plan import LoadPlan
from haliax_ext.meshspec import MeshSpec
from haliax_ext.plan_report import summarize
from haliax_ext.planner import ShardingPlan
from haliax_ext.program import Program
from levanter.config import Written
from levanter.config.plan_options import PlanOptions as PlanOptions
from levanter.io import Output as Output
from levanter.io.exit_codes import BAD_INPUT as BAD_INPUT
from levanter.io.exit_codes import COMPILER_CRASH as COMPILER_CRASH
from levanter.io.exit_codes import DOES_NOT_FIT as DOES_NOT_FIT
from levanter.io.exit_codes import INTERNAL_ERROR as INTERNAL_ERROR
from levanter.io.exit_codes import INTERRUPTED as INTERRUPTED
from levanter.io.exit_codes import NOT_DECIDED as NOT_DECIDED
from levanter.io.exit_codes import OK as OK
from levanter.io.exit_codes import PEER_LOST as PEER_LOST
from levanter.io.exit_codes import PREEMPTED as PREEMPTED
from levanter.io.exit_codes import DoesNotFitError as DoesNotFitError

C = TypeVar("C")
W = TypeVar("W")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Target:
    """The devices a run is for, counted but not held.

    Attributes:
        name: how the user calls it (`local`, `v4-256`).
        platform: `cpu`, `gpu` or `tpu`: decides kernels.
        kind: the vendor's name of one device.
        devices: how many.
        granules: how many slices (or processes) they form.
        hosts: how many processes hold them, equally.
        hbm_bytes: usable memory of one device; None where it is not limited by the device (CPU).
        host_bytes: memory of a host where its devices have none of their own and share it; None elsewhere.
        hosts_on: mesh → host index of each device, in mesh shape; without it devices are numbered host by host in
            mesh order.
    """

    name: str
    platform: str
    kind: str
    devices: int
    granules: int = 1
    hosts: int = 1
    hbm_bytes: int | None = None
    host_bytes: int | None = None
    hosts_on: Callable[[MeshSpec], np.ndarray] | None = field(default=None, repr=False, compare=False)

    @property
    def limit_bytes(self) -> int | None:
        """What a device can hold at most: its own memory, or its share of its host's; None where neither is known."""
        if self.hbm_bytes is not None or self.host_bytes is None:
            return self.hbm_bytes
        return self.host_bytes * self.hosts // self.devices

    def host_layout(self, mesh: MeshSpec) -> np.ndarray:
        """Host index of each device of `mesh`, in mesh shape."""
        if self.hosts_on is not None:
            return self.hosts_on(mesh)
        per_host = mesh.size // self.hosts
        return (np.arange(mesh.size) // per_host).reshape(tuple(size for _, size in mesh.axes))


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


class Recorder(Protocol):
    """Where a run's numbers go: what `levanter.tracker` offers, as far as a run uses it."""

    def log(self, metrics: Mapping[str, Any], *, step: int | None) -> None:
        """Records numbers of a step."""
        ...

    def log_summary(self, metrics: Mapping[str, Any]) -> None:
        """Records single values of the whole run."""
        ...

    def log_hyperparameters(self, hparams: Mapping[str, Any]) -> None:
        """Records what the run was made of."""
        ...

    def log_artifact(self, path: str, *, name: str | None = None, type: str | None = None) -> None:
        """Keeps a file."""
        ...


class _Unrecorded:
    """A recorder that keeps nothing."""

    def log(self, metrics: Mapping[str, Any], *, step: int | None) -> None:
        del metrics, step

    def log_summary(self, metrics: Mapping[str, Any]) -> None:
        del metrics

    def log_hyperparameters(self, hparams: Mapping[str, Any]) -> None:
        del hparams

    def log_artifact(self, path: str, *, name: str | None = None, type: str | None = None) -> None:
        del path, name, type


@dataclass(frozen=True, kw_only=True)
class Session:
    """What a process brings to a run beside its devices; one by itself for calls from Python.

    Attributes:
        run_id: the run's name, the same on all processes.
        tracker: where its numbers go.
        show: whether this process talks to the user: process 0 does.
    """

    run_id: str = field(default_factory=lambda: secrets.token_hex(4))
    tracker: Recorder = field(default_factory=_Unrecorded)
    show: bool = False


class Describe(Protocol[C, W]):  # pyright: ignore[reportInvalidTypeVarUse]
    """Describes a run without a device and without a weight."""

    def __call__(self, config: C, target: Target, *, written: Written | None = None) -> RunPlan[W]:
        """The plan of `config` on `target`.

        Args:
            config: the entry point's.
            target: the devices, counted.
            written: the keys that the user wrote; None for a config made in Python.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class EntryPoint(Generic[C, W, R]):
    """A command as a value.

    Attributes:
        name: what users call it, a module of `levanter.main`.
        config: the class of its configuration.
        describe: config and target → plan.
        execute: plan, mesh (None without devices) and session → what came of it; compiles nothing that the plan does
            not have.
        outputs: every place that a run writes, trackers' apart; folders are made and tried before a weight is read.
        conclude: says what came of it (files, terminal, trackers) and gives the exit code.
        facts: what trackers are told of a plan before it runs, beside its configuration.
        uses_devices: whether devices are looked for; without, process 0 does the work, on no mesh.
        tracked: whether the run's trackers are started.
        left: what an interrupted run can go back to, in a line.
        in_full: likewise `describe`, of the same run with the model's own weights trained where it trains adapters.
    """

    name: str
    config: type[C]
    describe: Describe[C, W]
    execute: Callable[[RunPlan[W], Mesh | None, Session], R]
    outputs: Callable[[RunPlan[W], Session], Sequence[Output]]
    conclude: Callable[[RunPlan[W], R, Session], int]
    facts: Callable[[RunPlan[W]], Mapping[str, Any]] = lambda _: {}
    uses_devices: bool = True
    tracked: bool = True
    left: Callable[[RunPlan[W], Session], str] | None = None
    in_full: Describe[C, W] | None = None
