"""Attention of few queries to many keys: `reference_attention` with its division behind the product with the values.

Weights of a softmax have a common divisor, and a product is linear: `(Σ eᵢ vᵢ) / Σ eᵢ` in place of `Σ (eᵢ / Σ eⱼ) vᵢ`.
What is divided is then a result, `head_size` numbers of a query, and not a number for each of its keys, and a TPU's
compiler makes the exponentials inside the product with the values: a decode step loses a pass over all weights.
"""

import haliax as hax
import jax.numpy as jnp
from haliax import NamedArray

from levanter.layers.attention.mask import AttentionMask
from levanter.layers.attention.reference import HIDDEN, scaled_by, soft_capped


def attention_divided_last(
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    mask: AttentionMask,
    *,
    softmax_scale: float,
    soft_cap: float | None = None,
    sinks: NamedArray | None = None,
    scales: tuple[NamedArray, NamedArray] | None = None,
) -> NamedArray:
    """As `reference_attention`, for queries that each see a key at least.

    What is rounded to the inputs' dtype are exponentials, at most 1, and the sum of their products with the values is
    float32 until it is divided.

    Args:
        q, k, v, mask, softmax_scale, soft_cap, sinks, scales: see `reference_attention`. What comes of a query that
            sees no key means nothing, but is finite.

    Returns:
        The axes of `q`.
    """
    Pos, KeyPos = q.resolve_axis("position"), k.resolve_axis("key_position")
    axes = q.axes
    q = q.rearrange((*(axis for axis in axes if axis.name not in (Pos.name, "head_size")), Pos, "head_size"))
    scores = scaled_by(hax.dot(q, k, axis="head_size", preferred_element_type=jnp.float32), scales, 0)
    scores = soft_capped(scores * softmax_scale, soft_cap)
    visible = mask.materialize(Pos, KeyPos)
    if visible is not None:
        scores = hax.where(visible, scores, HIDDEN)
    top = hax.max(scores, KeyPos)
    own = None if sinks is None else sinks.astype(jnp.float32).broadcast_to(top.axes).rearrange(top.axes)
    top = top if own is None else hax.maximum(top, own)
    exponentials = hax.exp(scores - top)
    total = hax.sum(exponentials, KeyPos)
    total = total if own is None else total + hax.exp(own - top)
    weights = scaled_by(exponentials, scales, 1).astype(v.dtype)
    mixed = hax.dot(weights, v, axis=KeyPos, preferred_element_type=jnp.float32)
    return (mixed / total).astype(v.dtype).rearrange(axes)
