"""The Program of needle evaluation: log-probabilities and ranks of answer tokens, in rows of one length."""

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
from levanter.models.zigzag import zigzag_outputs, zigzag_shards


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
    """(model, tokens, target positions, targets) → float32 log-probabilities and int32 ranks, both `[batch, suffix]`.

    Args:
        model: the abstract model, its weights in the compute dtype.
        rows: rows of a batch.
        length: tokens of a row.
        mappings: the mappings of the run.
        placement: the sharding of the parameters.
        batch_axis: the name of the batch axis.
        matmul_precision, compiler_options: see `Program`.
    """
    Batch, Pos = hax.Axis(batch_axis, rows), hax.Axis("position", length)
    # The size is that of the longest answer, not of the batch: all batches of a length use one Program.
    Suffix = hax.Axis("suffix", SLOTS)

    def declared(name: str, *axes: hax.Axis) -> Input:
        ids = hax.NamedArray(jax.ShapeDtypeStruct([a.size for a in axes], np.int32), axes)  # pyright: ignore
        return Input(name=name, value=ids, placement=mappings.compute)

    return Program(
        name=program_name(length),
        function=_score_answers,
        inputs=(
            Input(name="model", value=model, placement=placement),
            declared("tokens", Batch, Pos),
            declared("places", Batch, Suffix),
            declared("targets", Batch, Suffix),
        ),
        mappings=mappings,
        # Every host reads the results, a few kilobytes: they are replicated on purpose.
        out_placement=AxisMapping(),
        matmul_precision=matmul_precision,
        compiler_options=dict(compiler_options or {}),
    )


def program_name(length: int) -> str:
    """The name of the Program for rows of a length."""
    return f"needles_{length}"


def _score_answers(
    model: LmHeadModel, tokens: hax.NamedArray, target_positions: hax.NamedArray, targets: hax.NamedArray
) -> tuple[hax.NamedArray, hax.NamedArray]:
    sequence_shards = zigzag_shards(model)
    Pos, Suffix = tokens.resolve_axis("position"), target_positions.resolve_axis("suffix")
    activations = zigzag_outputs(model, tokens, num_shards=sequence_shards).activations
    # A product with a one-hot matrix instead of a gather: positions may be sharded over devices, in zigzag order, and a
    # gather would have to replicate the activations. Each sum has one nonzero term, so HIGHEST precision copies it.
    row_positions = positions(Pos, sequence_shards)
    operands = [
        indices.rearrange((*target_positions.axes, Pos))
        for indices in (target_positions.broadcast_axis(Pos), row_positions.broadcast_axis(target_positions.axes))
    ]
    one_hot = hax.named(operands[0].array == operands[1].array, operands[0].axes).astype(activations.dtype)
    target_activations = hax.dot(one_hot, activations, axis=Pos, precision=jax.lax.Precision.HIGHEST)
    (Batch,) = (axis for axis in target_positions.axes if axis != Suffix)
    scores = score_targets(
        hax.auto_sharded(target_activations.rearrange((Batch, Suffix, ...))),
        model.head,
        targets,
        # Only log-probabilities and ranks: no probabilities of sampling settings.
        laws=(),
        vocab_size=model.config.vocab_size,
        soft_cap=model.config.logit_soft_cap,
    )
    return scores.logprobs.astype(jnp.float32), scores.ranks
