"""Reference attention on named axes: the function that every other backend must reproduce."""

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray

from levanter.layers.attention.mask import AttentionMask

HIDDEN = -1e30
"""Score of a masked key: finite, so that rows without any visible key contain no NaN."""


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
        sinks: `[kv_head, q_heads_per_group]`: per head, the score of a key that every query sees and whose value is
            zero (gpt-oss, arXiv:2508.10925; Xiao et al., arXiv:2309.17453); neither scaled nor bounded.
        scales: scales of int8 `k` and `v`, `[…, key_position, kv_head]`; applied to the scores and to the weights.

    Returns:
        The axes of `q`.
    """
    Pos, KeyPos = q.resolve_axis("position"), k.resolve_axis("key_position")
    axes = q.axes
    # Heads before positions, the order of a batched product's result: otherwise XLA for CPUs transposes it back.
    q = q.rearrange((*(axis for axis in axes if axis.name not in (Pos.name, "head_size")), Pos, "head_size"))
    # Float32 `[…, kv_head, q_heads_per_group, position, key_position]`. Int8 keys arrive cast to the dtype of `q`;
    # their scales multiply the scores.
    scores = scaled_by(hax.dot(q, k, axis="head_size", preferred_element_type=jnp.float32), scales, 0)
    scores = soft_capped(scores * softmax_scale, soft_cap)
    visible = mask.materialize(Pos, KeyPos)
    if visible is not None:
        scores = hax.where(visible, scores, HIDDEN)
    weights = _softmax(scores, KeyPos, sinks)
    if visible is not None:
        # The softmax of a row of HIDDEN is uniform: a query without keys gets zeros instead.
        weights = hax.where(visible, weights, 0.0)
    weights = scaled_by(weights, scales, 1)
    return hax.dot(weights.astype(v.dtype), v, axis=KeyPos).rearrange(axes)


def few_query_attention(
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
    """`reference_attention` for few queries, with the division after the product with the values.

    The weights of a softmax have a common divisor, and a product is linear: `(Σ eᵢ vᵢ) / Σ eᵢ` equals
    `Σ (eᵢ / Σ eⱼ) vᵢ`. The division then takes `head_size` numbers per query instead of one per key, and the TPU
    fuses the exponentials into the product with the values: a decode step saves one pass over all weights.

    The exponentials, at most 1, are rounded to the inputs' dtype; their products with the values are summed in float32.

    Args:
        q, k, v, mask, softmax_scale, soft_cap, sinks, scales: see `reference_attention`. Each query must see at least
            one key; otherwise its result is finite but meaningless.

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
    # Text generation is not differentiated, so the maximum takes no `stop_gradient` as in `_softmax`.
    top = hax.max(scores, KeyPos)
    sink_scores = None if sinks is None else sinks.astype(jnp.float32).broadcast_to(top.axes).rearrange(top.axes)
    top = top if sink_scores is None else hax.maximum(top, sink_scores)
    exponentials = hax.exp(scores - top)
    total = hax.sum(exponentials, KeyPos)
    # As in `_softmax`, a sink adds to the denominator only.
    total = total if sink_scores is None else total + hax.exp(sink_scores - top)
    # Unnormalized weights: their common divisor `total` is applied to the mixed values below.
    weights = scaled_by(exponentials, scales, 1).astype(v.dtype)
    mixed = hax.dot(weights, v, axis=KeyPos, preferred_element_type=jnp.float32)
    return (mixed / total).astype(v.dtype).rearrange(axes)


def scaled_by(x: NamedArray, scales: tuple[NamedArray, NamedArray] | None, which: int) -> NamedArray:
    """Scores times the scales of the keys (`which` 0), or weights times those of the values (1); `x` without scales."""
    return x if scales is None else (x * scales[which].astype(x.dtype)).rearrange(x.axes)


def soft_capped(x: NamedArray, bound: float | None) -> NamedArray:
    """`bound · tanh(x / bound)`: close to `x` for small `x`, never beyond `bound` (Gemma 2, arXiv:2408.00118)."""
    return x if bound is None else hax.tanh(x / bound) * bound


def _softmax(scores: NamedArray, KeyPos: hax.Axis, sinks: NamedArray | None) -> NamedArray:
    top = hax.max(scores, KeyPos)
    if sinks is None:
        # Any constant subtracted from all scores gives the same softmax, so the true gradient through `top` is zero;
        # `stop_gradient` saves the backward pass of the maximum.
        exponentials = hax.exp(scores - jax.lax.stop_gradient(top))
        return exponentials / hax.sum(exponentials, KeyPos)
    # The sink enters the maximum and the denominator; its value is zero, so it has no weight of its own.
    sink_scores = sinks.astype(jnp.float32).broadcast_to(top.axes).rearrange(top.axes)
    top = jax.lax.stop_gradient(hax.maximum(top, sink_scores))
    exponentials = hax.exp(scores - top)
    return exponentials / (hax.sum(exponentials, KeyPos) + hax.exp(sink_scores - top))
