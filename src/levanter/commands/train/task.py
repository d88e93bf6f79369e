"""`TrainingTask`: a kind of training, as a value that `commands/train` describes and runs without knowing which it is.

A task provides its rows, its objective, the models beside the trained one, the work between steps (evaluations), what
it records, and what must not change when a run resumes. Model, mesh, optimizer, state, steps, checkpoints and exports
are those of every training run. Language modeling (`train.lm`) and preferences (`train.dpo`) are two tasks.

    describe    find_rows → objective → find_models → programs_before_state, between_steps
    execute     build_rows → check_resumed → before_state → start → batches, pauses
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from jax.sharding import Mesh

from haliax_ext.program import Input, Program
from haliax_ext.pytree import PyTree
from levanter.checkpoint import CheckpointRef
from levanter.commands.model.workloads import stage_program
from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train.config_diff import ResumeKeys
from levanter.commands.train.run_dirs import RunDirs
from levanter.commands.train.trained_run import TaskModels, TaskRows, TrainedRun
from levanter.data import Tokenizer
from levanter.data.train_dataset import BatchSchedule
from levanter.distributed.compile_barrier import jit_together
from levanter.models.base import LmHeadModel
from levanter.models.registry import LmConfig
from levanter.runplan import Check, RunPlan, Session, Target, Workload
from levanter.trainer.batch_plan import BatchPlan
from levanter.trainer.frozen_identity import FrozenPart
from levanter.trainer.loop import Pause
from levanter.trainer.objective import Objective
from levanter.trainer.report import StepReport
from levanter.trainer.train_state import TrainState

TASK = "task"
"""What a task records in the metadata of a checkpoint is under this key."""


class TrainingRows(Protocol):
    """The rows of a run, readable: `levanter.data.TrainingData`, or a task's own."""

    @property
    def schedule(self) -> BatchSchedule:
        """Rows of each step."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hex digest of everything that decides which rows come when; the same on every process."""
        ...

    @property
    def steps(self) -> int | None:
        """Whole steps until the rows end; None if they repeat."""
        ...

    def steps_of_epochs(self, epochs: int) -> int:
        """Whole steps until every row has been read `epochs` times."""
        ...

    def report(self, steps: int) -> Sequence[str]:
        """Lines for the log, for a run of so many steps."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Running:
    """A run in progress: the arguments of everything that a task does.

    Attributes:
        plan: of the run; `plan.work` is a `TrainWork`.
        run: the same run in abstract form.
        mesh: its devices.
        session: its id, tracker and terminal.
        dirs: its folders.
        resumed: the checkpoint it resumes from; None if it begins.
        rows: its rows.
        stop: the step after its last.
        earlier: what the task's `before_state` returned.
        frozen: the part of the model that is not in the state; None for nothing.
        reference: the second model, if it stays on the devices; None for none.
        frozen_part: how checkpoints identify `frozen`, with digests.
        state: before the first step, while work between steps is started. It must not be kept: the step consumes it.
    """

    plan: RunPlan
    run: TrainedRun
    mesh: Mesh
    session: Session
    dirs: RunDirs
    resumed: CheckpointRef | None
    rows: TrainingRows
    stop: int
    earlier: object = None
    frozen: LmHeadModel | None = None
    reference: LmHeadModel | None = None
    frozen_part: FrozenPart | None = None
    state: TrainState | None = None

    @property
    def first(self) -> int:
        """The first step that is taken."""
        return 0 if self.resumed is None else self.resumed.step

    def tokens(self, step: int) -> int:
        """Tokens of all steps before one."""
        return self.rows.schedule.first_draw(step) * self.run.config.positions

    def jit(self, program: str) -> Callable[..., PyTree]:
        """A Program of the plan, callable."""
        return jit_together(self.plan.program(program), self.mesh)

    def batch(self, step: int) -> Input:
        """The batch of a step as its Program declares it, abstract."""
        return stage_program(self.plan, self.run.batches, step).input("batch")


class Result(Protocol):
    """The result of an evaluation."""

    @property
    def not_finite(self) -> Sequence[str]:
        """The sets whose loss is no number; the run then ends with an error."""
        ...

    @property
    def headline(self) -> str:
        """One line for the user."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """By the names under which they are logged."""
        ...


class TrainingEvaluation:
    """A `Pause` that evaluates, and keeps its last result for the end of the run."""

    result: Result | None = None


class BetweenSteps(Protocol):
    """Work between two steps, as planned: an evaluation, samples from the model, rollouts.

    The plan has its Programs behind those of the steps, its workloads and its checks. While one of its Programs runs,
    the training state, the frozen parameters and a resident second model stay on the devices: the plan counts those
    that are no inputs of it.
    """

    @property
    def programs(self) -> tuple[Program, ...]:
        """Every Program that it runs, in order. Resident parameters are inputs placed by a `ShardingPlan`."""
        ...

    @property
    def coresident(self) -> Mapping[str, int]:
        """Program → further bytes on a device that stay while it runs (its own arrays, such as a cache)."""
        ...

    @property
    def workloads(self) -> tuple[Workload, ...]:
        """The work of its Programs in the whole run."""
        ...

    @property
    def checks(self) -> tuple[Check, ...]:
        """Lines of the plan."""
        ...

    def start(self, running: Running, /) -> Pause | None:
        """The pause that does the work when it is due; None if this run has nothing to do.

        Work that is due before the first step of this attempt is done here, with `running.state`.

        Args:
            running: the run. The pause gets the state after each step, which it must not keep.
        """
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedEvaluation:
    """`BetweenSteps` of which nothing is to be said but its Programs; see there for the fields."""

    programs: tuple[Program, ...]
    start: Callable[[Running], Pause | None]
    coresident: Mapping[str, int] = field(default_factory=dict[str, int])
    workloads: tuple[Workload, ...] = ()
    checks: tuple[Check, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskRun:
    """What a started task does in the loop.

    Attributes:
        batches: (first step, step after the last) → (step, batch on the devices) of each step. With rows that are
            generated by the model itself, a pause generates them, before the first step and after each.
        listeners: called with the report of every step.
        numbers: step → metrics that are logged with those of the step.
        metadata: steps taken → what a checkpoint records, for `check_resumed`.
    """

    batches: Callable[[int, int], Generator[tuple[int, PyTree]]]
    listeners: tuple[Callable[[StepReport], None], ...] = ()
    numbers: Callable[[int], Mapping[str, float]] = field(default=lambda _: {})
    metadata: Callable[[int], Mapping[str, object]] = field(default=lambda _: {})


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingTask(ABC):
    """A kind of training.

    Attributes:
        config: of the run: `TrainLmConfig`, or a class derived from it.
        resume_keys: how the keys that only this task has are compared when a run resumes.
    """

    config: TrainLmConfig
    resume_keys: ClassVar[ResumeKeys] = ResumeKeys()

    @abstractmethod
    def find_rows(self, tokenizer: Tokenizer | None, *, vocab_size: int) -> TaskRows:
        """Checks that the rows exist, and names the sets that are evaluated; reads no row.

        Args:
            tokenizer: None if it is unavailable.
            vocab_size: ids that the model distinguishes.
        """

    @abstractmethod
    def objective(self, model: LmConfig) -> Objective:
        """What a step minimizes.

        Args:
            model: the architecture.
        """

    def find_models(self, run: TrainedRun, target: Target) -> TaskModels:  # noqa: ARG002
        """The models beside the trained one; by default none. Reads headers only.

        Raises:
            ValueError: one of them does not exist or does not fit to the trained one.
        """
        return TaskModels()

    def programs_before_state(self, run: TrainedRun, largest: BatchPlan) -> tuple[Program, ...]:  # noqa: ARG002
        """The Programs of `before_state`, which run while the devices hold nothing of the run."""
        return ()

    def between_steps(self, run: TrainedRun, largest: BatchPlan) -> tuple[BetweenSteps, ...]:  # noqa: ARG002
        """The work between steps: evaluations, in the order in which they run.

        Args:
            run: the run.
            largest: the batch with the largest microbatch; see `TrainedRun.evaluation_rows`.
        """
        return ()

    @abstractmethod
    def build_rows(self, run: TrainedRun, *, show: bool) -> TrainingRows:
        """The rows; process 0 builds what is missing while the others wait.

        Raises:
            DataError: the data is not what the configuration says.
        """

    def check_resumed(self, running: Running, recorded: Mapping[str, object]) -> None:
        """Compares what the task recorded in the checkpoint with this run, before weights are read.

        Keys of the configuration are compared already (`resume_keys`).

        Args:
            running: the run, which resumes.
            recorded: by `TaskRun.metadata`; empty if the checkpoint has nothing of the task.

        Raises:
            ValueError: the run that was saved is another one.
        """
        del running, recorded

    def before_state(self, running: Running) -> object:
        """Work that needs the devices for itself; what it returns is `Running.earlier`."""
        del running

    @abstractmethod
    def start(self, running: Running) -> TaskRun:
        """Prepares the task's part of the loop; the state and all models exist."""
