"""Listeners and pauses of the training loop: the progress bar, checkpoints, and actions at intervals.

The metrics of a step are in `trainer.metrics`.
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
    """Advances the progress bar: tokens, tokens per second, time left, and step and loss as a note.

    Attributes:
        progress: the bar, in tokens.
        size_of: step number → amount of work.
        steps: number of steps of the whole run.
    """

    progress: Progress
    size_of: Callable[[int], StepSize]
    steps: int

    def __call__(self, report: StepReport) -> None:
        """Advances by the tokens of one step."""
        note = f"step {report.taken:,} of {self.steps:,}, loss {report.loss:.4f}"
        self.progress.advance(self.size_of(report.step).tokens, note=note)


@dataclass(frozen=True, kw_only=True)
class SaveCheckpoint:
    """Saves a checkpoint when the checkpointer says that one is due.

    Attributes:
        checkpointer: decides and saves.
        metadata: steps taken → metadata of the checkpoint.
        slice_replicas: replicated arrays → the same arrays, sharded so that each device writes a different part; None
            if there are none.
        sliced_paths: the paths of those arrays.
    """

    checkpointer: Checkpointer
    metadata: Callable[[int], Mapping[str, Any]]
    slice_replicas: Callable[[Mapping[str, jax.Array]], Mapping[str, jax.Array]] | None = None
    sliced_paths: frozenset[str] = frozenset()

    def due(self, taken: int) -> bool:
        """Whether a checkpoint is due, by step or by clock."""
        return self.checkpointer.due(taken)

    def __call__(self, taken: int, state: TrainState) -> None:
        """Starts a save; files are written in the background during the next steps."""
        self.save(taken, state)

    def save(self, taken: int, state: TrainState, *, force: bool = False) -> None:
        """Starts a save; with `force`, of a permanent checkpoint."""
        # One save at a time: the previous one must have finished before its arrays and its folder can be superseded.
        self.checkpointer.wait()
        # A pause and the end of the run may both save the same step.
        if self.checkpointer.has(taken, force=force):
            return
        arrays = state_arrays(state)
        # Without slices the first of the replicas would write the whole array.
        if self.slice_replicas is not None:
            arrays |= self.slice_replicas({path: arrays[path] for path in self.sliced_paths})
        self.checkpointer.save(taken, arrays, self.metadata(taken), force=force)


@dataclass(frozen=True, kw_only=True)
class Every:
    """Runs an action at an interval of steps.

    Attributes:
        steps: the interval.
        action: called with the steps taken and the state.
        until: from this step on the action is not due; the caller handles the end of the run itself.
    """

    steps: int
    action: Callable[[int, TrainState], object]
    until: int

    def due(self, taken: int) -> bool:
        """Whether the action is due."""
        # The caller runs the action once more after the last step, whatever the interval.
        return taken % self.steps == 0 and taken < self.until

    def __call__(self, taken: int, state: TrainState) -> None:
        """Runs the action."""
        self.action(taken, state)


def state_arrays(state: TrainState) -> dict[str, jax.Array]:
    """All arrays of a state by path, as in a checkpoint."""
    # Both traversals have the order of the pytree's leaves.
    return {leaf.path: x for leaf, x in zip(leaves(state), jax.tree.leaves(state), strict=True)}
