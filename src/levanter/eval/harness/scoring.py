"""The Programs that score a table's rows, and the sums of their log-probabilities by query, in float64 on the host."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import haliax as hax
import jax
import numpy as np
from jax.sharding import Mesh

from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.prefetch import results
from haliax_ext.program import Input, Placement, Program
from haliax_ext.pytree import PyTree
from levanter.distributed.compile_barrier import jit_together
from levanter.eval.harness.encoding import Query
from levanter.eval.harness.packing import RowShape
from levanter.eval.harness.request_table import PADDING, Table
from levanter.models.base import LmHeadModel
from levanter.models.suffix_scores import scores_at_positions

FETCH_LOOKAHEAD = 2
"""Batches in flight before a result is fetched, so that host work overlaps with device work."""


def score_programs(
    model: LmHeadModel,
    shapes: Sequence[RowShape],
    *,
    mappings: Mappings,
    placement: Placement,
    batch_axis: str,
    matmul_precision: str | None = None,
    compiler_options: Mapping[str, str] | None = None,
    usable: Callable[[LmHeadModel], LmHeadModel] = lambda model: model,
) -> Mapping[RowShape, Program]:
    """A Program for each shape: (model, tokens, segments, positions, target positions, targets) → log-probabilities,
    ranks.

    With branches, it takes the trunks as well.

    Args:
        model: the abstract model, its weights in the compute dtype, or in the dtype that `usable` converts.
        shapes: shapes of batches.
        mappings: the mappings of the run.
        placement: the sharding of the parameters.
        batch_axis: the name of the batch axis.
        matmul_precision, compiler_options: see `Program`.
        usable: converts the model to the form in which it computes.
    """
    return {
        # Compiler settings are the same for all shapes of a run.
        shape: replace(
            _score_program(model, shape, mappings, placement, batch_axis, usable),
            matmul_precision=matmul_precision,
            compiler_options=dict(compiler_options or {}),
        )
        for shape in shapes
    }


def _score_program(
    model: LmHeadModel,
    shape: RowShape,
    mappings: Mappings,
    placement: Placement,
    batch_axis: str,
    usable: Callable[[LmHeadModel], LmHeadModel],
) -> Program:
    Batch, Pos = hax.Axis(batch_axis, shape.rows), hax.Axis("position", shape.length)
    Suffix = hax.Axis("suffix", shape.slots)

    def score(
        model: LmHeadModel,
        tokens: hax.NamedArray,
        segment_ids: hax.NamedArray,
        positions: hax.NamedArray,
        target_positions: hax.NamedArray,
        targets: hax.NamedArray,
        trunks: hax.NamedArray | None = None,
    ) -> tuple[hax.NamedArray, hax.NamedArray]:
        attention = {"segment_ids": segment_ids, "positions": positions, "trunks": trunks}
        scores = scores_at_positions(usable(model), tokens, target_positions, targets, **attention)
        return scores.logprobs, scores.ranks

    def declared(name: str, *axes: hax.Axis) -> Input:
        # A declaration has a shape and no data: Programs are planned before there are devices.
        ids = hax.NamedArray(jax.ShapeDtypeStruct([a.size for a in axes], np.int32), axes)  # pyright: ignore
        return Input(name=name, value=ids, placement=mappings.compute)

    return Program(
        name=shape.name,
        function=score,
        inputs=(
            Input(name="model", value=model, placement=placement),
            *(declared(name, Batch, Pos) for name in ("tokens", "segment_ids", "positions")),
            *(declared(name, Batch, Suffix) for name in ("places", "targets")),
            *([declared("trunks", Batch, Pos)] if shape.branches else []),
        ),
        mappings=mappings,
        # The host reads all results, a few hundred kilobytes: they are replicated on purpose.
        out_placement=AxisMapping(),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class QueryScores:
    """The scores of a list of queries.

    Attributes:
        logprobs: float64, the sum of each query's log-probabilities.
        is_greedy: whether each of a query's targets was the most likely token.
    """

    logprobs: np.ndarray
    is_greedy: np.ndarray

    @property
    def not_finite(self) -> np.ndarray:
        """Indices of queries without a finite log-probability."""
        return np.flatnonzero(~np.isfinite(self.logprobs))


@dataclass(frozen=True, kw_only=True, eq=False)
class Scorer:
    """A loaded model and its Programs.

    Attributes:
        programs: Programs by shape.
        mesh: the devices.
        model: the weights.
        cost: cost of a batch of a shape, in any unit.
    """

    programs: Mapping[RowShape, Program]
    mesh: Mesh
    model: PyTree
    cost: Callable[[RowShape], float]

    def run(self, table: Table, on_tokens: Callable[[int], None] = lambda _: None) -> list[np.ndarray]:
        """Executes every batch of a table.

        Args:
            table: the same on all processes.
            on_tokens: called with the number of tokens computed so far.

        Returns:
            For each batch float32 `[2, rows, slots]`: log-probabilities and ranks.
        """
        outputs, done = [], 0
        for packed in table.packed:
            batches = ((None, batch.inputs) for batch in table.batches(packed))
            program = self.programs[packed.shape]
            size = packed.shape.rows * packed.shape.length
            for _, (logprobs, ranks) in results(
                program, self.mesh, self.model, batches, behind=FETCH_LOOKAHEAD, jit=jit_together
            ):
                # Ranks as float32: only whether one is 0 is read of them.
                outputs.append(np.stack([logprobs.array, ranks.array.astype(np.float32)]))
                done += size
                on_tokens(done)
        return outputs

    def table(self, queries: Sequence[Query]) -> Table:
        """The table of a list of queries, in rows for which there are Programs."""
        return Table.from_queries(queries, tuple(self.programs), self.cost)


def query_scores(table: Table, count: int, outputs: Sequence[np.ndarray]) -> QueryScores:
    """The scores of queries from the outputs of `Scorer.run`.

    A query's log-probabilities are added in the order of its tokens, whatever rows they were in: neither rows nor
    batches change a sum.

    Args:
        table: the executed table.
        count: number of queries.
        outputs: the outputs of its batches.
    """
    queries, numbers, logprobs, ranks = [], [], [], []
    # `outputs` are in the order in which `Scorer.run` executes: by shape, then batch.
    computed = iter(outputs)
    for packed in table.packed:
        for batch in table.batches(packed):
            values = next(computed)
            assert batch.queries is not None and batch.target_indices is not None
            is_target = batch.queries != PADDING
            queries.append(batch.queries[is_target])
            numbers.append(batch.target_indices[is_target])
            # float64 before the sum: the sum over a long text would lose digits in float32.
            logprobs.append(values[0][is_target].astype(np.float64))
            ranks.append(values[1][is_target])
    # Sort all targets by query and by their index in it, so that a query's sum does not depend on the packing.
    owners = np.concatenate(queries) if queries else np.zeros(0, np.int64)
    order = np.lexsort((np.concatenate(numbers), owners)) if queries else owners
    sums, greedy = np.zeros(count, np.float64), np.ones(count, bool)
    if queries:
        owners = owners[order]
        # Unbuffered: `sums[owners] += …` would add only the last target of each query.
        np.add.at(sums, owners, np.concatenate(logprobs)[order])
        np.logical_and.at(greedy, owners, np.concatenate(ranks)[order] == 0)
    assert np.all(np.bincount(owners, minlength=count) > 0), "a query has no score"
    return QueryScores(logprobs=sums, is_greedy=greedy)
