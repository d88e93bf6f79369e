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
    """Builds the plan of a run; uses no device and reads no weight."""

    def __call__(self, config: C, target: Target, *, written: ExplicitKeys | None = None) -> RunPlan[W]:
        """Returns the plan of `config` on `target`.

        Args:
            config: the configuration of the entry point.
            target: the devices, counted but not held.
            written: the keys that the user wrote; None for a config that was made in Python.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class EntryPoint(Generic[C, W, R]):
    """A command as a value.

    Attributes:
        name: the name of the command, which is a module of `levanter.main`.
        config: the class of its configuration.
        describe: config and target → plan.
        execute: plan, mesh (None without devices) and session → result; it compiles nothing that is not in the plan.
        outputs: every file and folder that a run writes, apart from those of trackers. They are created and tested
            for writing before a weight is read.
        finish: prints the result, writes files and logs to trackers; returns the exit code.
        facts: values of the plan that trackers record as hyperparameters in addition to the config.
        uses_devices: whether the command needs devices; without them process 0 does the work, and the mesh is None.
        tracked: whether the run starts its trackers.
        interrupted_message: one line for an interrupted run that says what it can resume from.
        describe_full_finetune: like `describe`, for the same run with every weight trained instead of adapters.
    """

    name: str
    config: type[C]
    describe: Describe[C, W]
    execute: Callable[[RunPlan[W], Mesh | None, Session], R]
    outputs: Callable[[RunPlan[W], Session], Sequence[Output]]
    finish: Callable[[RunPlan[W], R, Session], int]
    facts: Callable[[RunPlan[W]], Mapping[str, Any]] = lambda _: {}
    uses_devices: bool = True
    tracked: bool = True
    interrupted_message: Callable[[RunPlan[W], Session], str] | None = None
    describe_full_finetune: Describe[C, W] | None = None
