"""What a training run does between its steps, as a value: planned before the run, started when the state exists."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from jax.sharding import Mesh

from haliax_ext.program import Program
from levanter.models.base import LmHeadModel
from levanter.runplan import Check, RunPlan, Session, Workload
from levanter.trainer.loop import Pause
from levanter.trainer.train_state import TrainState


@dataclass(frozen=True, kw_only=True, eq=False)
class Running:
    """A run in progress, before its first step.

    Attributes:
        plan: of the run.
        mesh: its devices.
        session: its id, tracker and terminal.
        stop: the step after its last.
        frozen: the part of the model that is not in the state; None for nothing.
        first: the first step that is taken; more than 0 if the run is resumed.
        state: before that step. It must not be kept: the step consumes it.
    """

    plan: RunPlan
    mesh: Mesh
    session: Session
    stop: int
    frozen: LmHeadModel | None
    first: int
    state: TrainState


class BetweenSteps(Protocol):
    """Work between two steps: an evaluation, samples from the model.

    The plan has its Programs behind those of the steps, its workloads and its checks. While one of its Programs runs,
    the training state and the frozen parameters stay on the devices: the plan counts those that are no inputs of it.
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

    def start(self, running: Running) -> Pause | None:
        """The pause that does the work when it is due; None if this run has nothing to do.

        Work that was due at the checkpoint from which the run resumes, and that an earlier attempt did not finish, may
        be done here.

        Args:
            running: the run, whose state exists. The pause gets the state of each step, which it must not keep.
        """
        ...
