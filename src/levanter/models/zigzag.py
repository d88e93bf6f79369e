"""Puts whole sequences into zigzag order for context parallelism, at the start of a Program, while they are integers.

If the mappings in scope put positions in zigzag order (`layers.attention.zigzag`), a sequence to be scored or trained
on is reordered before it is embedded. Targets are computed before that, so no activation is shifted from one device to
the next. Results for each position are put back into natural order; sums need no order.
"""

from collections.abc import Sequence
from typing import TypeVar

import jax
from haliax import NamedArray

from haliax_ext.errors import ShardingError
from haliax_ext.mapping import zigzag_parts
from levanter.layers.attention import AttentionMask
from levanter.layers.attention.zigzag import positions, zigzag
from levanter.layers.embedding import positions_in_segments
from levanter.layers.outputs import Outputs
from levanter.models.base import LmHeadModel

T = TypeVar("T")


def zigzag_shards(model: LmHeadModel) -> int:
    """The number of shards over which positions are in zigzag order under the mappings and mesh in scope; 1 for none.

    Raises:
        ShardingError: a layer of the model needs natural order.
    """
    num_shards = zigzag_parts("position")
    # Recurrent mixers and convolutions run along the row itself;
    # attention masks by position and does not depend on the order.
    ordered_mixers = {
        type(part).__name__
        for layer in model.config.layers
        for part in (layer.mixer, layer.residual)
        if not getattr(part, "any_order", False)
    }
    if num_shards > 1 and ordered_mixers:
        raise ShardingError(
            f"position_order zigzag: layers by {', '.join(sorted(ordered_mixers))} need positions in natural order",
            suggestion="trainer.mesh.position_order: natural",
        )
    return num_shards


def to_zigzag(batch: T, num_shards: int) -> T:
    """A tree of named arrays `[…, position]` with their positions in zigzag order over `num_shards` shards."""

    def one(x: object) -> object:
        return zigzag(x, num_shards) if isinstance(x, NamedArray) else x

    return jax.tree.map(one, batch, is_leaf=lambda x: isinstance(x, NamedArray)) if num_shards > 1 else batch


def zigzag_outputs(
    model: LmHeadModel,
    tokens: NamedArray,
    *,
    segment_ids: NamedArray | None = None,
    auxiliary: Sequence[str] = (),
    num_shards: int,
) -> Outputs:
    """A model's outputs for whole sequences, with activations in zigzag order over `num_shards` shards; causal.

    Args:
        model: the model.
        tokens: ids, `[…, position]`, in natural order.
        segment_ids: in natural order; tokens see their own segment only.
        auxiliary: names of the sums to collect from the layers.
        num_shards: 1 for natural order.
    """
    if num_shards == 1:
        return model(tokens, segment_ids=segment_ids, auxiliary=auxiliary)
    Pos = tokens.resolve_axis("position")
    # Explicit positions: rotary embeddings and masks must use the natural position of each reordered token.
    zigzag_positions = positions(Pos, num_shards)
    # A learned position counts from the segment's beginning, which must be computed before the reordering.
    if segment_ids is not None and model.config.learned_positions:
        zigzag_positions = zigzag(positions_in_segments(segment_ids), num_shards)
    return model(
        zigzag(tokens, num_shards),
        segment_ids=None if segment_ids is None else zigzag(segment_ids, num_shards),
        attn_mask=AttentionMask.causal().in_zigzag(num_shards),
        positions=zigzag_positions,
        auxiliary=auxiliary,
    )
