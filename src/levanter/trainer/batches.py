"""Rows of the data onto the devices: every process gives its devices their part of the global batch."""

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from haliax_ext.abstract import Leaf, map_arrays
from haliax_ext.program import Input, spec_of
from levanter.data import TrainingData, TrainRows, batches
from levanter.trainer.loss import LmBatch


def place_rows(rows: TrainRows, declared: Input, mesh: Mesh) -> LmBatch:
    """Rows as the batch that a train step takes; what it has more rows is padding of no weight.

    Args:
        rows: the global batch.
        declared: the step's input, abstract.
        mesh: the devices.
    """
    abstract: LmBatch = declared.value
    (Batch, Pos) = abstract.tokens.axes
    if rows.tokens.shape[0] < Batch.size:
        whole = TrainRows.empty(Batch.size, Pos.size)
        whole.put(np.arange(rows.tokens.shape[0]), rows)
        rows = whole
    placement = declared.placement
    assert placement is not None and rows.tokens.shape == (Batch.size, Pos.size), (rows.tokens.shape, Batch, Pos)

    def placed(leaf: Leaf, _: Any) -> jax.Array:
        values: np.ndarray = getattr(rows, leaf.path)
        sharding = NamedSharding(mesh, spec_of(leaf, placement))
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    return map_arrays(placed, abstract)


def placed_batches(
    data: TrainingData, input_of: Callable[[int], Input], mesh: Mesh, *, first: int, stop: int, ahead: int = 2
) -> Generator[tuple[int, LmBatch], None, None]:
    """The batches of steps `first` to `stop` on the devices; the rows of the next `ahead` are made in the background.

    Args:
        data: the rows.
        input_of: step → the batch as the step's Program declares it.
        mesh: the devices.
        first: the first step.
        stop: the step behind the last.
        ahead: batches kept ready on the host.
    """
    with closing(batches(data, first=first, stop=stop, ahead=ahead)) as made:
        for step, rows in made:
            yield step, place_rows(rows, input_of(step), mesh)
