"""`EntryPoint`: a command as a value, `config → describe → RunPlan → execute`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from jax.sharding import Mesh

from levanter.config import ExplicitKeys
from levanter.io import Output
from levanter.runplan.run_plan import RunPlan
from levanter.runplan.session import Session
from levanter.runplan.target import Target

C = TypeVar("C")
W = TypeVar("W")
R = TypeVar("R")


class Describe(Protocol[C, W]):  # pyright: ignore[reportInvalidTypeVarUse]
    """Describes a run without a device and without a weight."""

    def __call__(self, config: C, target: Target, *, written: ExplicitKeys | None = None) -> RunPlan[W]:
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
