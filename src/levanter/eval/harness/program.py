"""The Programs that score a table's rows, one for each shape."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import haliax as hax
import jax
import numpy as np

from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.program import Input, Placement, Program
from levanter.eval.harness.packing import RowShape
from levanter.models.base import LmHeadModel
from levanter.models.suffix_scores import place_scores


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
    """A Program for each shape: model, tokens, segments, positions, places, targets → log-probabilities and ranks.

    Where segments may go on from others, it takes the trunks as well.

    Args:
        model: abstract, its weights in the compute dtype, unless `usable` brings them there.
        shapes: of batches.
        mappings: in scope.
        placement: where the parameters are.
        batch_axis: the name of the batch's axis.
        matmul_precision, compiler_options: see `Program`.
        usable: the model as it is used, of that which is given.
    """
    return {
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
        places: hax.NamedArray,
        targets: hax.NamedArray,
        trunks: hax.NamedArray | None = None,
    ) -> tuple[hax.NamedArray, hax.NamedArray]:
        where = {"segment_ids": segment_ids, "positions": positions, "trunks": trunks}
        found = place_scores(usable(model), tokens, places, targets, **where)
        return found.logprobs, found.ranks

    def declared(name: str, *axes: hax.Axis) -> Input:
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
        # A few hundred kilobytes that the host reads: replicated.
        out_placement=AxisMapping(),
    )
