"""Positions in the order in which they lie on devices: at the head of a Program integers are laid out so.

Where the mappings in scope say that positions lie in zigzag order (`layers.attention.order`), a whole sequence that is
scored or learned from is put in that order before it is embedded. Targets are taken before, so no activation is ever
shifted from one device to the next; what comes out position by position is put back, or is a sum that has no order.
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
    """Over how many shards positions lie in zigzag order under the mappings and the mesh in scope; 1 for their own.

    Raises:
        ShardingError: a layer of the model needs them in their own.
    """
    num_shards = zigzag_parts("position")
    strangers = {
        type(layer.mixer).__name__ for layer in model.config.layers if not getattr(layer.mixer, "any_order", False)
    }
    if num_shards > 1 and strangers:
        raise ShardingError(
            f"position_order zigzag: layers by {', '.join(sorted(strangers))} take positions to be in their own order",
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
    """What a model makes of whole sequences, its activations in zigzag order over `num_shards` shards; causal.

    Args:
        model: the model.
        tokens: ids, `[…, position]`, in their own order.
        segment_ids: likewise; tokens see their own segment only.
        auxiliary: names of sums that are wanted of the layers.
        num_shards: 1 for their own order.
    """
    if num_shards == 1:
        return model(tokens, segment_ids=segment_ids, auxiliary=auxiliary)
    Pos = tokens.resolve_axis("position")
    where = positions(Pos, num_shards)
    if segment_ids is not None and model.config.learned_positions:
        where = zigzag(positions_in_segments(segment_ids), num_shards)
    return model(
        zigzag(tokens, num_shards),
        segment_ids=None if segment_ids is None else zigzag(segment_ids, num_shards),
        attn_mask=AttentionMask.causal().in_zigzag(num_shards),
        positions=where,
        auxiliary=auxiliary,
    )
