"""`Objective`: what a training step minimizes, as a value.

An objective makes *sums* over the rows of a batch: float32 scalars, each under a name. A step minimizes

    L = Σ_terms weight · S / N        S: the term's sum over the global batch, N: the *normalizer* of the global batch

and N is known from the batch alone, before any forward pass. So a batch may be taken in parts, on any mesh: each part
contributes its sums over the same N, and the step is that of the global batch. What a step shows follows the same
names: `train/<name>` is `weight · S / N`.

A *batch* is any pytree of named arrays that all have one axis of rows; microbatches take every n-th row. The language
modeling objective is in `trainer.loss`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import jax
from haliax import Axis

from levanter.layers.outputs import Sums

M = TypeVar("M")
B = TypeVar("B")

LOSS = "loss"
"""The first term of every objective: what progress shows, and what a guard watches."""


@dataclass(frozen=True, kw_only=True)
class Term:
    """One sum of an objective.

    Attributes:
        name: of the sum, and of its metric `train/<name>`.
        weight: what it counts in what is minimized; None where it is only shown.
    """

    name: str
    weight: float | None = 1.0

    def shown(self, value: jax.Array) -> jax.Array:
        """What the term adds to what is minimized; the sum itself, where it adds nothing."""
        return value if self.weight is None or self.weight == 1.0 else self.weight * value


class Objective(ABC, Generic[M, B]):
    """What is minimized: for models of type `M`, over batches of type `B`."""

    @property
    @abstractmethod
    def terms(self) -> tuple[Term, ...]:
        """The sums, in the order in which they are added up; the first is called `LOSS`."""

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
        """What the sums of a batch are divided by, a float32 scalar: how many tokens, pairs, … there are."""

    @abstractmethod
    def sums(self, model: M, batch: B) -> Sums:
        """The sum of every term over the rows of a batch or of a part of one.

        Args:
            model: its weights in the compute dtype.
            batch: what to learn from.
        """

    def total(self, model: M, batch: B, scale: jax.Array) -> tuple[jax.Array, Sums]:
        """`scale` × what is minimized, which a step differentiates; and `scale` × every sum, which it only shows.

        Both follow from `sums`. An objective that can have the same gradient cheaper says so here.

        Args:
            model, batch: see `sums`.
            scale: a float32 scalar.
        """
        sums = self.sums(model, batch) * scale
        return self.minimized(sums), sums

    def minimized(self, sums: Sums) -> jax.Array:
        """What is differentiated: the terms that count, added up with their weights."""
        first, *others = (term.shown(sums[term.name]) for term in self.terms if term.weight is not None)
        for other in others:
            first = first + other
        return first

    def shown(self, sums: Sums) -> Sums:
        """The metrics that sums stand for, by name."""
        return Sums({term.name: term.shown(sums[term.name]) for term in self.terms})
