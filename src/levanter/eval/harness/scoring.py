"""A table through its Programs: log-probabilities of questions, summed in float64 on the host."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from haliax_ext.prefetch import results
from haliax_ext.program import Program
from haliax_ext.pytree import PyTree
from levanter.distributed.compile_barrier import jit_together
from levanter.eval.harness.encoding import Query
from levanter.eval.harness.packing import RowShape
from levanter.eval.harness.request_table import PADDING, Table

FETCH_BEHIND = 2
"""Batches in flight before a result is fetched, so that host work overlaps with device work."""


@dataclass(frozen=True, kw_only=True, eq=False)
class QueryScores:
    """What became of questions.

    Attributes:
        logprobs: float64, the sum of each question's log-probabilities.
        is_greedy: whether each of its targets was the likeliest token.
    """

    logprobs: np.ndarray
    is_greedy: np.ndarray

    @property
    def not_finite(self) -> np.ndarray:
        """The questions without a finite log-probability."""
        return np.flatnonzero(~np.isfinite(self.logprobs))


@dataclass(frozen=True, kw_only=True, eq=False)
class Scorer:
    """A loaded model and its Programs.

    Attributes:
        programs: by shape.
        mesh: the devices.
        model: the weights.
        cost: of a batch of a shape, in any unit.
    """

    programs: Mapping[RowShape, Program]
    mesh: Mesh
    model: PyTree
    cost: Callable[[RowShape], float]

    def run(self, table: Table, on_tokens: Callable[[int], None] = lambda _: None) -> list[np.ndarray]:
        """Runs every batch of a table.

        Args:
            table: what is computed; the same on all processes.
            on_tokens: hears of the tokens computed so far.

        Returns:
            For each batch float32 `[2, rows, slots]`: log-probabilities and ranks.
        """
        found, done = [], 0
        for packed in table.packed:
            batches = ((None, batch.inputs) for batch in table.batches(packed))
            program = self.programs[packed.shape]
            size = packed.shape.rows * packed.shape.length
            for _, (logprobs, ranks) in results(
                program, self.mesh, self.model, batches, behind=FETCH_BEHIND, jit=jit_together
            ):
                found.append(np.stack([logprobs.array, ranks.array.astype(np.float32)]))
                done += size
                on_tokens(done)
        return found

    def table(self, questions: Sequence[Query]) -> Table:
        """The table of a list of questions, in rows that the Programs take."""
        return Table.of(questions, tuple(self.programs), self.cost)


def answers(table: Table, count: int, found: Sequence[np.ndarray]) -> QueryScores:
    """The sums of what `Scorer.run` found, by question.

    A question's log-probabilities are added in the order of its tokens, whatever rows they were in: neither rows nor
    batches change a sum.

    Args:
        table: what was computed.
        count: how many questions there were.
        found: what came of its batches.
    """
    asked, numbers, logprobs, ranks = [], [], [], []
    computed = iter(found)
    for packed in table.packed:
        for batch in table.batches(packed):
            values = next(computed)
            assert batch.questions is not None and batch.numbers is not None
            real = batch.questions != PADDING
            asked.append(batch.questions[real])
            numbers.append(batch.numbers[real])
            logprobs.append(values[0][real].astype(np.float64))
            ranks.append(values[1][real])
    owners = np.concatenate(asked) if asked else np.zeros(0, np.int64)
    order = np.lexsort((np.concatenate(numbers), owners)) if asked else owners
    sums, greedy = np.zeros(count, np.float64), np.ones(count, bool)
    if asked:
        owners = owners[order]
        np.add.at(sums, owners, np.concatenate(logprobs)[order])
        np.logical_and.at(greedy, owners, np.concatenate(ranks)[order] == 0)
    assert np.all(np.bincount(owners, minlength=count) > 0), "a question was not answered"
    return QueryScores(logprobs=sums, is_greedy=greedy)
