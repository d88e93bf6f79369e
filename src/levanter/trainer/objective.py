"""`Objective`: the function that a training step minimizes.

An objective computes *sums* over the rows of a batch: named float32 scalars. A step minimizes

    L = Σ_terms weight · S / N        S: the term's sum over the global batch, N: the *normalizer* of the global batch

N depends on the batch only and is known before any forward pass. So a batch may be split into microbatches on any mesh:
each contributes its sums divided by the same N, and the step is that of the global batch. Metrics have the same names:
`train/<name>` is `weight · S / N`.

N may be summed on the device, or be a number in the batch that the host computed. The weight of a term may follow a
schedule of steps: everything that changes from step to step is in the value `at` (`AtStep`). Sums that are no terms,
its *statistics*, are for parameters that are updated by rule (`trainer.update_rules`).

A *batch* is any pytree of named arrays. Those with the axis of rows are split: microbatches take every n-th row. Every
microbatch gets all of the others, such as a normalizer from the host. The language modeling objective is in
`trainer.loss`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, Self, TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis

from levanter.layers.outputs import Sums
from levanter.optim.schedules import Schedule
from levanter.trainer.update_rules import UpdateRule

M = TypeVar("M")
B = TypeVar("B")

LOSS = "loss"
"""The first term of every objective: shown by the progress bar, and checked by the guard."""

Weight: TypeAlias = float | Schedule
"""The weight of a term: a constant, or a function from the step (int32 scalar, from 0) to a float32 scalar."""


class AtStep(eqx.Module):
    """The position in the run at which an objective is computed.

    Attributes:
        step: number of steps taken before this one, int32 scalar.
    """

    step: jax.Array


def weight_at(weight: Weight, at: AtStep) -> float | jax.Array:
    """The value of a weight; a constant remains a Python number, which adds no operation to the compiled step."""
    return weight(at.step) if callable(weight) else weight


@dataclass(frozen=True, kw_only=True)
class Term:
    """One sum of an objective.

    Attributes:
        name: of the sum, and of its metric `train/<name>`.
        weight: its weight in the minimized function; None for a term that is only logged.
    """

    name: str
    weight: Weight | None = 1.0

    def shown(self, value: jax.Array, at: AtStep) -> jax.Array:
        """The term's contribution to the minimized function; the sum itself for a term that is only logged."""
        return value if self.weight is None or self.weight == 1.0 else weight_at(self.weight, at) * value


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """A sum over the batch that rules read: an array, not weighted, not divided by the normalizer, not logged.

    Attributes:
        name: of the sum.
        axes: its axes, none of which is that of the rows.
    """

    name: str
    axes: tuple[Axis, ...] = ()


class Objective(ABC, Generic[M, B]):
    """The function that is minimized, for models of type `M` and batches of type `B`.

    Attributes:
        sequences: sequences of the axis of positions in a row of a batch.
        chunk: positions that the output head scores at a time; None if the objective leaves that to the plan.
    """

    sequences: ClassVar[int] = 1
    chunk: int | None = None

    @property
    def gradient_in_loop(self) -> bool:
        """Whether `total` computes the gradient of the head in the loop that scores it."""
        return False

    @property
    @abstractmethod
    def terms(self) -> tuple[Term, ...]:
        """The terms, in the order of their summation; the first is named `LOSS`."""

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """The sums that only rules read."""
        return ()

    @property
    def rules(self) -> tuple[UpdateRule, ...]:
        """The updates of parameters that no gradient moves."""
        return ()

    @abstractmethod
    def abstract_batch(self, Batch: Axis, Pos: Axis) -> B:
        """A batch without data.

        Args:
            Batch: the axis of rows, which all arrays have.
            Pos: the axis of positions.
        """

    @abstractmethod
    def rows(self, batch: B) -> Axis:
        """The axis of the rows of a batch."""

    @abstractmethod
    def normalizer(self, batch: B) -> jax.Array:
        """The divisor of the sums of a batch, a float32 scalar: the number of tokens, pairs, …

        A sum over rows of the global batch, or a scalar in the batch that the host computed.
        """

    @abstractmethod
    def sums(self, model: M, batch: B, at: AtStep) -> Sums:
        """The sum of every term, then of every statistic, over the rows of a batch or of a part of one.

        Args:
            model: its weights in the compute dtype.
            batch: the training data.
            at: the step, for sums that change during the run.
        """

    def total(self, model: M, batch: B, at: AtStep, scale: jax.Array) -> tuple[jax.Array, Sums]:
        """`scale` × the minimized function, which a step differentiates, and the sums: `scale` × terms, and statistics.

        Both follow from `sums`. An objective with a cheaper way to compute the same gradient overrides this method.

        Args:
            model, batch, at: see `sums`.
            scale: a float32 scalar.
        """
        sums = self._scaled(self.sums(model, batch, at), scale)
        return self.minimized(sums, at), sums

    def in_chunks(self, chunk: int | None) -> Self:
        """The same objective with the planned chunk; itself if it scores no head."""
        del chunk
        return self

    def zeros(self) -> Sums:
        """The sums of no rows."""
        arrays = {one.name: jnp.zeros([axis.size for axis in one.axes], jnp.float32) for one in self.statistics}
        return Sums({**Sums.zeros(term.name for term in self.terms), **arrays})

    def _scaled(self, sums: Sums, scale: jax.Array) -> Sums:
        # Counts are whole numbers: unscaled, their sum over microbatches is exact, and rules see the same bits.
        exact = {one.name for one in self.statistics}
        return Sums({name: value if name in exact else value * scale for name, value in sums.items()})

    def minimized(self, sums: Sums, at: AtStep) -> jax.Array:
        """The differentiated function: the weighted sum of the terms that have a weight."""
        # Not `sum`, which starts with 0 + first: an additional operation in the compiled step.
        first, *others = (term.shown(sums[term.name], at) for term in self.terms if term.weight is not None)
        for other in others:
            first = first + other
        return first

    def shown(self, sums: Sums, at: AtStep) -> Sums:
        """The metrics of sums, by name."""
        return Sums({term.name: term.shown(sums[term.name], at) for term in self.terms})
