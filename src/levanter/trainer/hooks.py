"""What hangs on the loop: progress listens to every step, checkpoints and exports pause it.

What is logged of a step is in `trainer.metrics`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from haliax_ext.abstract import leaves
from levanter.checkpoint import Checkpointer
from levanter.io import Progress
from levanter.trainer.metrics import StepSize as StepSize
from levanter.trainer.metrics import Throughput as Throughput
from levanter.trainer.metrics import Track as Track
from levanter.trainer.report import StepReport
from levanter.trainer.train_state import TrainState


@dataclass(kw_only=True)
class ShowProgress:
    """Moves the bar: tokens, tokens per second, time left; step and loss beside it.

    Attributes:
        progress: counts the tokens that are left to train on.
        size_of: how much a step does, by its number.
        steps: of the whole run.
    """

    progress: Progress
    size_of: Callable[[int], StepSize]
    steps: int

    def __call__(self, report: StepReport) -> None:
        """Counts one step."""
        note = f"step {report.taken:,} of {self.steps:,}, loss {report.loss:.4f}"
        self.progress.advance(self.size_of(report.step).tokens, note=note)


@dataclass(frozen=True, kw_only=True)
class SaveCheckpoint:
    """Saves the run where the checkpointer says so.

    Attributes:
        checkpointer: decides and saves.
        metadata: steps taken → what is saved beside the arrays.
        slice_replicas: arrays that several devices hold → the same, of which each device gives a part of its own; None
            where there are none.
        sliced_paths: the paths of those arrays.
    """

    checkpointer: Checkpointer
    metadata: Callable[[int], Mapping[str, Any]]
    slice_replicas: Callable[[Mapping[str, jax.Array]], Mapping[str, jax.Array]] | None = None
    sliced_paths: frozenset[str] = frozenset()

    def due(self, taken: int) -> bool:
        """Whether it is time, by step or by clock."""
        return self.checkpointer.due(taken)

    def __call__(self, taken: int, state: TrainState) -> None:
        """Begins to save; the files are written behind the next steps."""
        self.save(taken, state)

    def save(self, taken: int, state: TrainState, *, force: bool = False) -> None:
        """Begins to save, for ever if `force`."""
        self.checkpointer.wait()
        if self.checkpointer.has(taken, force=force):
            return
        arrays = state_arrays(state)
        if self.slice_replicas is not None:
            arrays |= self.slice_replicas({path: arrays[path] for path in self.sliced_paths})
        self.checkpointer.save(taken, arrays, self.metadata(taken), force=force)


@dataclass(frozen=True, kw_only=True)
class Every:
    """Does something every so many steps.

    Attributes:
        steps: how many.
        action: told the steps taken and the state.
        until: from this step on no more; the run's end is its own business.
    """

    steps: int
    action: Callable[[int, TrainState], object]
    until: int

    def due(self, taken: int) -> bool:
        """Whether it is time."""
        return taken % self.steps == 0 and taken < self.until

    def __call__(self, taken: int, state: TrainState) -> None:
        """Does it."""
        self.action(taken, state)


def state_arrays(state: TrainState) -> dict[str, jax.Array]:
    """Every array of a state by its path, as a checkpoint holds them."""
    return {leaf.path: x for leaf, x in zip(leaves(state), jax.tree.leaves(state), strict=True)}
