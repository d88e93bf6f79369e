"""Attention block by block: the softmax is carried along the keys, so no `position × key_position` array exists.

The online softmax of Milakov and Gimelshein (arXiv:1805.02867) as used by Rabe and Staats (arXiv:2112.05682): per query
a running maximum, a running sum of exponentials and a running weighted sum of values, rescaled when the maximum grows.
Memory is `position × block`, forward and (each block being recomputed) backward.
"""

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from levanter.layers.attention.mask import AttentionMask
from levanter.layers.attention.reference import HIDDEN, scaled_by, soft_capped


def blockwise_attention(
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    mask: AttentionMask,
    *,
    softmax_scale: float,
    block_size: int,
    soft_cap: float | None = None,
    sinks: NamedArray | None = None,
    scales: tuple[NamedArray, NamedArray] | None = None,
) -> NamedArray:
    """As `reference_attention`, over blocks of `block_size` keys.

    Weights are rounded to the inputs' dtype relative to a running maximum and not to the final one, so 16-bit results
    differ from the reference by rounding; float32 results by the order of summation only.
    """
    Pos, KeyPos = q.resolve_axis("position"), k.resolve_axis("key_position")
    Block = KeyPos.resize(min(block_size, KeyPos.size))
    Blocks = Axis("key_blocks", -(-KeyPos.size // Block.size))
    padding = Blocks.size * Block.size - KeyPos.size

    def cut(x: NamedArray | None) -> NamedArray | None:
        """`key_position` as `key_blocks × key_position`, the end filled with zeros."""
        if x is None:
            return None
        return hax.pad(x, {KeyPos: (0, padding)}).unflatten_axis(KeyPos.name, (Blocks, Block))

    positions, segments = mask.positions_of_keys(KeyPos), mask.segments_of_keys(Pos, KeyPos)
    of_keys, of_values = (None, None) if scales is None else scales
    blocks = (
        cut(positions),
        cut(hax.ones(KeyPos, dtype=bool)),
        cut(k),
        cut(v),
        cut(segments),
        cut(of_keys),
        cut(of_values),
    )
    queries = mask.positions_of_queries(Pos)

    def step(carry, keys, exists, k_block, v_block, segment_block, key_scales, value_scales, explicit_block):
        top, total, mixed = carry
        visible = mask.visible(queries, keys, key_segments=segment_block, explicit=explicit_block)
        if padding:
            visible = exists if visible is None else hax.logical_and(visible, exists)
        of_block = None if key_scales is None else (key_scales, value_scales)
        scores = scaled_by(hax.dot(q, k_block, axis="head_size", preferred_element_type=jnp.float32), of_block, 0)
        scores = soft_capped(scores * softmax_scale, soft_cap)
        if visible is not None:
            scores = hax.where(visible, scores, HIDDEN)
        new_top = hax.maximum(top, jax.lax.stop_gradient(hax.max(scores, Block)))
        weights = hax.exp(scores - new_top)
        if visible is not None:
            weights = hax.where(visible, weights, 0.0)
        shrink = hax.exp(top - new_top)
        mixing = scaled_by(weights, of_block, 1).astype(v.dtype)
        values = hax.dot(mixing, v_block, axis=Block, preferred_element_type=jnp.float32)
        new_mixed = mixed * shrink + values.rearrange(mixed.axes)
        return (new_top, total * shrink + hax.sum(weights, Block), new_mixed), None

    rows = tuple(axis for axis in q.axes if axis.name != "head_size")
    top, total = hax.full(rows, HIDDEN, dtype=jnp.float32), hax.zeros(rows, dtype=jnp.float32)
    if sinks is not None:
        # As if its key had come first.
        own = sinks.astype(jnp.float32).broadcast_to(rows).rearrange(rows)
        top = jax.lax.stop_gradient(hax.maximum(top, own))
        total = hax.exp(own - top)
    start = (top, total, hax.zeros(q.axes, dtype=jnp.float32))
    (_, total, mixed), _ = hax.scan(step, Blocks, remat=True)(start, *blocks, cut(mask.explicit_mask))
    return (mixed / hax.maximum(total, float(jnp.finfo(jnp.float32).tiny))).astype(v.dtype)
