"""Attention as the formula says, on named axes: the meaning that every other backend must reproduce."""

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray

from levanter.layers.attention.mask import AttentionMask

HIDDEN = -1e30
"""Score of a key that a query may not see: finite, so that rows without any key stay free of NaN."""


def reference_attention(
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
    """`softmax(q·k · softmax_scale) · v` over the keys that `mask` shows.

    Scores and softmax are float32 whatever the inputs are; the weights are rounded to the inputs' dtype before they
    multiply `v`, as in Hugging Face's implementation.

    Args:
        q: `[…, position, kv_head, q_heads_per_group, head_size]`.
        k: `[…, key_position, kv_head, head_size]`.
        v: as `k`.
        mask: which keys each query may see.
        softmax_scale: multiplies the scores.
        soft_cap: bound of the scaled scores, see `soft_capped`; None for none.
        sinks: `[kv_head, q_heads_per_group]`, for each head the score of a key that every query sees and whose value
            is zero (gpt-oss, arXiv:2508.10925; Xiao et al., arXiv:2309.17453); neither scaled nor bounded.
        scales: where `k` and `v` hold integers, what each vector of them is to be multiplied by, `[…, key_position,
            kv_head]`: scores are, and the weights of values.

    Returns:
        The axes of `q`.
    """
    Pos, KeyPos = q.resolve_axis("position"), k.resolve_axis("key_position")
    axes = q.axes
    # Heads before positions: products over them come out in that order, and XLA for CPUs would transpose them back.
    q = q.rearrange((*(axis for axis in axes if axis.name not in (Pos.name, "head_size")), Pos, "head_size"))
    scores = scaled_by(hax.dot(q, k, axis="head_size", preferred_element_type=jnp.float32), scales, 0)
    scores = soft_capped(scores * softmax_scale, soft_cap)
    visible = mask.materialize(Pos, KeyPos)
    if visible is not None:
        scores = hax.where(visible, scores, HIDDEN)
    weights = _softmax(scores, KeyPos, sinks)
    if visible is not None:
        weights = hax.where(visible, weights, 0.0)
    weights = scaled_by(weights, scales, 1)
    return hax.dot(weights.astype(v.dtype), v, axis=KeyPos).rearrange(axes)


def scaled_by(x: NamedArray, scales: tuple[NamedArray, NamedArray] | None, which: int) -> NamedArray:
    """Scores or weights times the scales of the keys (0) or values (1) that they are of; themselves where none are."""
    return x if scales is None else (x * scales[which].astype(x.dtype)).rearrange(x.axes)


def soft_capped(x: NamedArray, bound: float | None) -> NamedArray:
    """`bound · tanh(x / bound)`: nearly `x` where it is small, never beyond `bound` (Gemma 2, arXiv:2408.00118)."""
    return x if bound is None else hax.tanh(x / bound) * bound


def _softmax(scores: NamedArray, KeyPos: hax.Axis, sinks: NamedArray | None) -> NamedArray:
    top = hax.max(scores, KeyPos)
    if sinks is None:
        exponentials = hax.exp(scores - jax.lax.stop_gradient(top))
        return exponentials / hax.sum(exponentials, KeyPos)
    own = sinks.astype(jnp.float32).broadcast_to(top.axes).rearrange(top.axes)
    top = jax.lax.stop_gradient(hax.maximum(top, own))
    exponentials = hax.exp(scores - top)
    return exponentials / (hax.sum(exponentials, KeyPos) + hax.exp(own - top))
