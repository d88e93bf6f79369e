"""Places rows of the data on the devices: every process places the rows of the global batch that its devices hold."""

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

import numpy as np
from jax.sharding import Mesh

from haliax_ext.prefetch import place, shardings
from haliax_ext.program import Input
from haliax_ext.pytree import PyTree
from levanter.data import TrainingData, TrainRows, batches, next_tokens
from levanter.trainer.loss import LmBatch


def rows_here(declared: Input, mesh: Mesh) -> tuple[int, int]:
    """The range of rows of the global batch that this process's devices hold: first row, and row after the last.

    Args:
        declared: the step's input, abstract.
        mesh: the devices.
    """
    shape = declared.value.tokens.array.shape
    size = shape[0]
    # Devices that replicate rows have equal ranges; the union of a process's ranges is taken to be contiguous.
    indices = shardings(declared, mesh)["tokens"].addressable_devices_indices_map(shape).values()
    spans = [index[0].indices(size)[:2] for index in indices if index is not None]
    return min(start for start, _ in spans), max(stop for _, stop in spans)


def place_rows(rows: TrainRows, declared: Input, mesh: Mesh) -> PyTree:
    """Rows as the batch of a train step, filled up with padding rows of weight 0.

    Args:
        rows: the rows of the global batch in the range `rows_here`, without padding.
        declared: the step's input, abstract.
        mesh: the devices.
    """
    abstract: LmBatch = declared.value
    (Batch, Pos) = abstract.tokens.axes
    first, stop = rows_here(declared, mesh)
    if rows.tokens.shape[0] < stop - first:
        # The batch is padded: rows of `TrainRows.empty` have weight 0 and a segment of their own.
        whole = TrainRows.empty(stop - first, Pos.size)
        whole.put(np.arange(rows.tokens.shape[0]), rows)
        rows = whole
    assert rows.tokens.shape == (stop - first, Pos.size), (rows.tokens.shape, Batch, Pos)
    # If the step's batch has no segments, each row is one sequence.
    targets = next_tokens(rows.tokens, None if abstract.segment_ids is None else rows.segment_ids)
    paths = shardings(declared, mesh).keys() - {"targets"}
    return place(declared, {"targets": targets, **{path: getattr(rows, path) for path in paths}}, mesh, first_row=first)


def placed_batches(
    data: TrainingData,
    input_of: Callable[[int], Input],
    mesh: Mesh,
    *,
    first: int,
    stop: int,
    ahead: int = 2,
    place: Callable[[int, tuple[int, int], TrainRows], PyTree] | None = None,
) -> Generator[tuple[int, Any], None, None]:
    """Yields the batches of steps `first` to `stop` on the devices; the next `ahead` are prepared in the background.

    Every process prepares only the rows that its devices hold.

    Args:
        data: the rows.
        input_of: step → the batch as the step's Program declares it.
        mesh: the devices.
        first: the first step.
        stop: the step after the last.
        ahead: number of batches prepared on the host.
        place: (step, (first row, row after the last), these rows of the global batch) → the step's batch on the
            devices; by default `place_rows`.
    """

    def local_rows(step: int) -> tuple[int, int]:
        # The batch may be padded beyond the rows that the data has for the step.
        total_rows = data.schedule.rows(step)
        begin, end = rows_here(input_of(step), mesh)
        return min(begin, total_rows), min(end, total_rows)

    # Closing the generator stops its background thread when the caller ends early.
    with closing(batches(data, first=first, stop=stop, rows=local_rows, ahead=ahead)) as row_batches:
        for step, rows in row_batches:
            yield step, place_rows(rows, input_of(step), mesh) if place is None else place(step, local_rows(step), rows)
