"""Methods that still take the arguments they had in earlier generations.

    logits = model(ids, mask, key=key)                            # today: model.logits(model(ids).activations)
    part = mask.materialize(Pos, KeyPos, q_slice=…, k_slice=…)    # today: mask.materialize(Pos, KeyPos), and slice it

Upstream's models return logits when called; ours return activations, and `model.logits` computes logits from them on
request. A call with an argument that only upstream had (a mask by position or as an array, `key`, `pos_ids`) is taken
as upstream's, every other call as ours. `levanter.upstream.install` comes here for the former only.
"""

from collections.abc import Callable
from typing import Any

import haliax as hax
from haliax import Axis, NamedArray

from haliax_ext.pytree import PyTree
from levanter.layers.attention import AttentionMask
from levanter.models.base import LmHeadModel
from levanter.upstream.facades.saved import new_checkpointer as new_checkpointer
from levanter.upstream.imports import warn_once


def logits(
    current: Callable[..., Any],
    model: LmHeadModel,
    input_ids: NamedArray,
    attn_mask: AttentionMask | NamedArray | None = None,
    *,
    key: object = None,
    pos_ids: NamedArray | None = None,
    **ours: PyTree,
) -> NamedArray:
    """`model(ids, mask, key=key)`: float32 logits, `[…, position, vocab]`.

    Args:
        current: the model's own call.
        model: the model.
        input_ids: token ids, `[…, position]`.
        attn_mask: who attends to whom; causal if there is none. An array `[…, position, key_position]` is the complete
            rule.
        key: upstream's; unused, nothing is random here.
        pos_ids: the position of each token, where it is not its index.
        ours: further arguments of the model's own call.

    Raises:
        ValueError: positions are passed twice.
    """
    del key
    warn_once(
        "model(…)", "model(ids, mask, key=…) returns logits; the current call is model(ids).activations", stacklevel=4
    )
    if pos_ids is not None and ours.get("positions") is not None:
        raise ValueError("pos_ids and positions are the same argument; pass only one")
    if pos_ids is not None:
        ours["positions"] = pos_ids
    outputs = current(model, input_ids, attn_mask=as_mask(attn_mask), **ours)
    return model.logits(outputs.activations)


def as_mask(mask: AttentionMask | NamedArray | None) -> AttentionMask | None:
    """A mask as it is; an array as the rule it stands for, over `position` and `key_position`.

    Raises:
        ValueError: the array has axes of other names.
    """
    if not isinstance(mask, NamedArray):
        return mask
    names = {axis.name for axis in mask.axes}
    if not {"position", "key_position"} <= names:
        raise ValueError(f"a mask has the axes position and key_position, got {', '.join(sorted(names)) or 'none'}")
    return AttentionMask.of_array(mask.astype(bool))


def materialize(
    current: Callable[..., NamedArray | None],
    mask: AttentionMask,
    Pos: Axis,
    KeyPos: Axis,
    q_slice: PyTree = None,
    k_slice: PyTree = None,
) -> NamedArray | None:
    """`mask.materialize(Pos, KeyPos, q_slice=, k_slice=)`: the part of the full mask for some queries and keys."""
    whole = current(mask, Pos, KeyPos)
    if whole is None:
        return None
    for axis, part in ((Pos, q_slice), (KeyPos, k_slice)):
        if part is not None:
            whole = hax.slice(whole, axis.name, start=part.start, length=part.size)
    return whole


# --- members of masks ---


def causal_offset(mask: AttentionMask) -> int | NamedArray:
    """`mask.causal_offset`: the position of the first query."""
    return mask.offset if mask.query_positions is None else mask.query_positions


def segment_ids(mask: AttentionMask) -> tuple[NamedArray, NamedArray] | None:
    """`mask.segment_ids`: those of queries and of keys; None for one segment."""
    if mask.query_segments is None:
        return None
    keys = mask.key_segments
    return mask.query_segments, mask.query_segments.rename({"position": "key_position"}) if keys is None else keys
