"""The Program that looks for needles: how likely the tokens of answers are, and how they rank, in rows of a length."""

from collections.abc import Mapping

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np

from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.program import Input, Placement, Program
from levanter.eval.needles.prompts import SLOTS
from levanter.layers.attention.zigzag import positions
from levanter.models.base import LmHeadModel
from levanter.models.suffix_scores import score_targets
from levanter.models.zigzag import outputs_in_order, position_parts


def needle_program(
    model: LmHeadModel,
    *,
    rows: int,
    length: int,
    mappings: Mappings,
    placement: Placement,
    batch_axis: str,
    matmul_precision: str | None = None,
    compiler_options: Mapping[str, str] | None = None,
) -> Program:
    """model, tokens, places, targets → float32 log-probabilities and int32 ranks, `[batch, suffix]` both.

    Args:
        model: abstract, its weights in the compute dtype.
        rows: of a batch.
        length: tokens of a row.
        mappings: in scope.
        placement: where the parameters are.
        batch_axis: the name of the batch's axis.
        matmul_precision, compiler_options: see `Program`.
    """
    Batch, Pos = hax.Axis(batch_axis, rows), hax.Axis("position", length)
    Suffix = hax.Axis("suffix", SLOTS)

    def declared(name: str, *axes: hax.Axis) -> Input:
        ids = hax.NamedArray(jax.ShapeDtypeStruct([a.size for a in axes], np.int32), axes)  # pyright: ignore
        return Input(name=name, value=ids, placement=mappings.compute)

    return Program(
        name=program_name(length),
        function=_find,
        inputs=(
            Input(name="model", value=model, placement=placement),
            declared("tokens", Batch, Pos),
            declared("places", Batch, Suffix),
            declared("targets", Batch, Suffix),
        ),
        mappings=mappings,
        # A few kilobytes that every host reads: replicated.
        out_placement=AxisMapping(),
        matmul_precision=matmul_precision,
        compiler_options=dict(compiler_options or {}),
    )


def program_name(length: int) -> str:
    """The name of the Program for rows of a length."""
    return f"needles_{length}"


def _find(
    model: LmHeadModel, tokens: hax.NamedArray, places: hax.NamedArray, targets: hax.NamedArray
) -> tuple[hax.NamedArray, hax.NamedArray]:
    parts = position_parts(model)
    Pos, Suffix = tokens.resolve_axis("position"), places.resolve_axis("suffix")
    activations = outputs_in_order(model, tokens, parts=parts).activations
    # A product with a one-hot matrix, and not a gather: positions may lie on several devices, in any order, and none of
    # them then holds more than its part. Each sum has one term; the precision keeps that as it is.
    where = positions(Pos, parts)
    both = [
        each.rearrange((*places.axes, Pos)) for each in (places.broadcast_axis(Pos), where.broadcast_axis(places.axes))
    ]
    chosen = hax.named(both[0].array == both[1].array, both[0].axes).astype(activations.dtype)
    found = hax.dot(chosen, activations, axis=Pos, precision=jax.lax.Precision.HIGHEST)
    (Batch,) = (axis for axis in places.axes if axis != Suffix)
    scores = score_targets(
        hax.auto_sharded(found.rearrange((Batch, Suffix, ...))),
        model.head,
        targets,
        laws=(),
        vocab_size=model.config.vocab_size,
        soft_cap=model.config.logit_soft_cap,
    )
    return scores.logprobs.astype(jnp.float32), scores.ranks
