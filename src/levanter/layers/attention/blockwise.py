"""Blockwise attention: an online softmax over blocks of keys, so no `position × key_position` array exists.

The online softmax of Milakov and Gimelshein (arXiv:1805.02867) as used by Rabe and Staats (arXiv:2112.05682): per query
a running maximum, a running sum of exponentials and a running weighted sum of values, rescaled when the maximum grows.
Memory is `position × block`, forward and (each block being recomputed) backward.
"""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.typing import DTypeLike

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
    """`reference_attention` over blocks of `block_size` keys.

    Weights are rounded to the inputs' dtype relative to a running maximum instead of the final one, so 16-bit results
    differ from the reference by rounding; float32 results differ by the order of summation only.
    """
    Pos, KeyPos = q.resolve_axis("position"), k.resolve_axis("key_position")
    Block = KeyPos.resize(min(block_size, KeyPos.size))
    # All blocks have one size, because one scan runs over them: the last one is padded.
    Blocks = Axis("key_blocks", -(-KeyPos.size // Block.size))
    padding = Blocks.size * Block.size - KeyPos.size

    def cut(x: NamedArray | None) -> NamedArray | None:
        """Splits `key_position` into `key_blocks × key_position`, zero-padded at the end."""
        if x is None:
            return None
        return hax.pad(x, {KeyPos: (0, padding)}).unflatten_axis(KeyPos.name, (Blocks, Block))

    positions, segments = mask.positions_of_keys(KeyPos), mask.segments_of_keys(Pos, KeyPos)
    of_keys, of_values = (None, None) if scales is None else scales
    # The arguments of `step` for each block, in its order; None holds no array, so the scan passes it on as None.
    blocks = (
        cut(positions),
        # True for the keys that exist: padding makes it False, since `hax.pad` fills with zeros.
        cut(hax.ones(KeyPos, dtype=bool)),
        cut(k),
        cut(v),
        cut(segments),
        cut(of_keys),
        cut(of_values),
    )
    queries = mask.positions_of_queries(Pos)

    def step(
        state: SoftmaxState, keys, exists, k_block, v_block, segment_block, key_scales, value_scales, explicit_block
    ):
        visible = mask.visible(queries, keys, key_segments=segment_block, explicit=explicit_block)
        if padding:
            # Padded keys are zeros, whose score 0 would take part in the softmax.
            visible = exists if visible is None else hax.logical_and(visible, exists)
            assert isinstance(visible, NamedArray)
        of_block = None if key_scales is None else (key_scales, value_scales)
        how = {"softmax_scale": softmax_scale, "soft_cap": soft_cap, "scales": of_block}
        return state.update(q, k_block, v_block, visible, **how), None

    # remat: the backward pass recomputes the scores of a block instead of keeping those of all blocks.
    final_state, _ = hax.scan(step, Blocks, remat=True)(SoftmaxState.start(q, sinks), *blocks, cut(mask.explicit_mask))
    return final_state.normalized(v.dtype)


class SoftmaxState(eqx.Module):
    """The online softmax of each query over the keys processed so far.

    A block of keys that a query does not see leaves its state unchanged, bit for bit.

    Attributes:
        top: the largest score, float32, over the axes of the queries without `head_size`.
        total: the sum of exp(score − top).
        mixed: the sum of exp(score − top) · value, over the axes of the queries.
    """

    top: NamedArray
    total: NamedArray
    mixed: NamedArray

    @staticmethod
    def start(q: NamedArray, sinks: NamedArray | None) -> "SoftmaxState":
        """The state before the first key."""
        rows = tuple(axis for axis in q.axes if axis.name != "head_size")
        # HIDDEN instead of −inf: −inf − (−inf) is NaN in the rescaling of a row that has seen no key yet.
        top, total = hax.full(rows, HIDDEN, dtype=jnp.float32), hax.zeros(rows, dtype=jnp.float32)
        if sinks is not None:
            # A sink is a first key whose value is zero: it sets `top` and `total`, and adds nothing to `mixed`.
            sink_scores = sinks.astype(jnp.float32).broadcast_to(rows).rearrange(rows)
            top = jax.lax.stop_gradient(hax.maximum(top, sink_scores))
            total = hax.exp(sink_scores - top)
        assert isinstance(top, NamedArray)
        return SoftmaxState(top=top, total=total, mixed=hax.zeros(q.axes, dtype=jnp.float32))

    def update(
        self,
        q: NamedArray,
        k: NamedArray,
        v: NamedArray,
        visible: NamedArray | None,
        *,
        softmax_scale: float,
        soft_cap: float | None,
        scales: tuple[NamedArray, NamedArray] | None,
    ) -> "SoftmaxState":
        """The state after one more block of keys; see `reference_attention`.

        Args:
            q: the queries.
            k: the keys.
            v: their values.
            visible: which keys a query sees; None for all.
            softmax_scale, soft_cap, scales: as in `reference_attention`.
        """
        Block = k.resolve_axis("key_position")
        scores = scaled_by(hax.dot(q, k, axis="head_size", preferred_element_type=jnp.float32), scales, 0)
        scores = soft_capped(scores * softmax_scale, soft_cap)
        if visible is not None:
            scores = hax.where(visible, scores, HIDDEN)
        # The result does not depend on `top` mathematically, so no gradient flows through the maximum.
        top = hax.maximum(self.top, jax.lax.stop_gradient(hax.max(scores, Block)))
        assert isinstance(top, NamedArray)
        weights = hax.exp(scores - top)
        if visible is not None:
            # If no key was visible so far, top is HIDDEN and exp(HIDDEN − HIDDEN) is 1: mask the weights as well.
            weights = hax.where(visible, weights, 0.0)
        # Rescales the old sums from the old maximum to the new one.
        shrink = hax.exp(self.top - top)
        mixing = scaled_by(weights, scales, 1).astype(v.dtype)
        values = hax.dot(mixing, v, axis=Block, preferred_element_type=jnp.float32)
        # `total` sums the weights before the value scales: those belong to the values, not to the denominator.
        mixed = self.mixed * shrink + values.rearrange(self.mixed.axes)
        return SoftmaxState(top=top, total=self.total * shrink + hax.sum(weights, Block), mixed=mixed)

    def normalized(self, dtype: DTypeLike) -> NamedArray:
        """The attention output, `mixed / total`; zeros for a query that saw no key."""
        # `total` is 0 only where no key was visible; `mixed` is 0 there too, so the smallest normal number gives 0, not
        # NaN.
        return (self.mixed / hax.maximum(self.total, float(jnp.finfo(jnp.float32).tiny))).astype(dtype)
