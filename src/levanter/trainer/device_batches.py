"""Rows of the data onto the devices: every process gives its devices their part of the global batch."""

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

import numpy as np
from jax.sharding import Mesh

from haliax_ext.prefetch import place, shardings
from haliax_ext.program import Input
from haliax_ext.pytree import PyTree
from levanter.data import NO_TARGET, TrainingData, TrainRows, batches, next_tokens, pair_targets
from levanter.trainer.dpo import PairBatch
from levanter.trainer.loss import LmBatch


def rows_here(declared: Input, mesh: Mesh) -> tuple[int, int]:
    """The first row of the global batch that this process's devices hold, and the one behind the last.

    Args:
        declared: the step's input, abstract.
        mesh: the devices.
    """
    shape = declared.value.tokens.array.shape
    size = shape[0]
    indices = shardings(declared, mesh)["tokens"].addressable_devices_indices_map(shape).values()
    spans = [index[0].indices(size)[:2] for index in indices if index is not None]
    return min(start for start, _ in spans), max(stop for _, stop in spans)


def place_rows(rows: TrainRows, declared: Input, mesh: Mesh, reference: np.ndarray | None = None) -> PyTree:
    """Rows as the batch that a train step takes; what it has more rows is padding of no weight.

    Args:
        rows: those of the global batch that `rows_here` says, as far as there are any.
        declared: the step's input, abstract.
        mesh: the devices.
        reference: of pairs, what the reference says, float32 `[rows, 2]`.
    """
    if isinstance(declared.value, PairBatch):
        return _place_pairs(rows, declared, mesh, reference)
    abstract: LmBatch = declared.value
    (Batch, Pos) = abstract.tokens.axes
    first, stop = rows_here(declared, mesh)
    if rows.tokens.shape[0] < stop - first:
        whole = TrainRows.empty(stop - first, Pos.size)
        whole.put(np.arange(rows.tokens.shape[0]), rows)
        rows = whole
    assert rows.tokens.shape == (stop - first, Pos.size), (rows.tokens.shape, Batch, Pos)
    # Where the step knows of no segments, each row is one sequence.
    targets = next_tokens(rows.tokens, None if abstract.segment_ids is None else rows.segment_ids)
    paths = shardings(declared, mesh).keys() - {"targets"}
    return place(declared, {"targets": targets, **{path: getattr(rows, path) for path in paths}}, mesh, first_row=first)


def _place_pairs(rows: TrainRows, declared: Input, mesh: Mesh, reference: np.ndarray | None) -> PairBatch:
    """Pairs as a batch; what it has more rows is padding, in which nothing counts."""
    first, stop = rows_here(declared, mesh)
    missing = [(0, stop - first - rows.tokens.shape[0]), (0, 0), (0, 0)]
    tokens, targets = pair_targets(rows)
    values = {"tokens": np.pad(tokens, missing), "targets": np.pad(targets, missing, constant_values=NO_TARGET)}
    if reference is not None:
        values["reference"] = np.pad(reference, missing[:2])
    return place(declared, values, mesh, first_row=first)


def placed_batches(
    data: TrainingData,
    input_of: Callable[[int], Input],
    mesh: Mesh,
    *,
    first: int,
    stop: int,
    ahead: int = 2,
    reference: Callable[[int, int, int], np.ndarray] | None = None,
    seen: Callable[[int, TrainRows], None] = lambda *_: None,
) -> Generator[tuple[int, Any], None, None]:
    """The batches of steps `first` to `stop` on the devices; the rows of the next `ahead` are made in the background.

    Every process makes the rows that its own devices hold, and no others.

    Args:
        data: the rows.
        input_of: step → the batch as the step's Program declares it.
        mesh: the devices.
        first: the first step.
        stop: the step behind the last.
        ahead: batches kept ready on the host.
        reference: (step, first row, row behind the last) → what the reference says of these pairs; None for nothing.
        seen: is told of each step's rows that are made here.
    """

    def local_rows(step: int) -> tuple[int, int]:
        total_rows = data.schedule.rows(step)
        begin, end = rows_here(input_of(step), mesh)
        return min(begin, total_rows), min(end, total_rows)

    with closing(batches(data, first=first, stop=stop, rows=local_rows, ahead=ahead)) as row_batches:
        for step, rows in row_batches:
            seen(step, rows)
            reference_logprobs = None if reference is None else reference(step, *local_rows(step))
            yield step, place_rows(rows, input_of(step), mesh, reference_logprobs)
